"""The demo's model and text: a byte-level GPT in plain torch, and the source of Python's standard library.

Owns both. Knows nothing of devices or of hetero: the demo shows that an ordinary model needs no change.
"""

import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from hetero.errors import ConfigError

__all__ = ["ByteGPT", "batches_of", "standard_library_text"]

_BYTES = 256
_MOST_TEXT = 4 << 20


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each behind a norm and beside a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.attention_in = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.feed_norm = nn.LayerNorm(width)
        self.feed_in = nn.Linear(width, 4 * width)
        self.feed_out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """``x`` of shape (batch, length, width), ``mask`` as for `attend`."""
        batch, length, width = x.shape
        heads = self.attention_in(self.attention_norm(x)).view(
            batch, length, 3, self.heads, width // self.heads
        )
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attended = self.attend(query, key, value, mask)
        x = x + self.attention_out(attended.transpose(1, 2).reshape(batch, length, width))
        fed: Tensor = self.feed_out(functional.gelu(self.feed_in(self.feed_norm(x))))
        return x + fed

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """All of shape (batch, heads, length, width of one); ``mask`` (length, length) is added to the scores, to make
        them causal."""
        # Written out, because the backward of CUDA's fused attention does not add in a fixed order.
        scores = query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5
        attended: Tensor = (scores if mask is None else scores + mask).softmax(-1) @ value
        return attended


class ByteGPT(nn.Module):
    """A GPT over bytes, its head tied to its embedding."""

    mask: Tensor

    def __init__(self, *, width: int, layers: int, heads: int, length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_BYTES, width)
        self.position = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, _BYTES, bias=False)
        self.head.weight = self.embedding.weight
        nn.init.normal_(self.embedding.weight, std=0.02)
        mask = torch.full((length, length), float("-inf")).triu(1)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, text: Tensor) -> Tensor:
        """Scores of shape (batch, length, 256) for the byte after each byte of ``text`` (batch, length)."""
        places = torch.arange(text.shape[1], device=text.device)
        x = self.embedding(text) + self.position(places)
        for block in self.blocks:
            x = block(x, self.mask)
        scores: Tensor = self.head(self.norm(x))
        return scores


def standard_library_text() -> Tensor:
    """The first 4 MiB of this Python's own modules, by name, as int64 of shape (n,)."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= _MOST_TEXT:
            break
    if len(text) < 1 << 16:
        raise ConfigError(
            f"only {len(text)} bytes of Python source in {sysconfig.get_path('stdlib')}, on which the demo "
            "trains: run it with a Python whose standard library is installed as files"
        )
    return torch.frombuffer(text, dtype=torch.uint8)[:_MOST_TEXT].long()


def batches_of(
    text: Tensor, *, count: int, batch: int, length: int, seed: int
) -> list[tuple[Tensor, Tensor]]:
    """``count`` pairs (bytes, following bytes), each of shape (batch, length), drawn from ``text``."""
    generator = torch.Generator().manual_seed(seed)
    pairs = []
    for _ in range(count):
        begins = torch.randint(len(text) - length - 1, (batch,), generator=generator)
        rows = torch.stack([text[begin : begin + length + 1] for begin in begins.tolist()])
        pairs.append((rows[:, :-1].contiguous(), rows[:, 1:].contiguous()))
    return pairs
