"""What `benchmarks.sweep` and `benchmarks.fits` train: a GPT and a ResNet50, their batches, loss and optimizer.

Owns their sizes, which the command line sets. Invariant: the same settings give the same weights and the same batches.
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn import functional

from examples import cnn
from hetero.cli import gpt

__all__ = [
    "GPT",
    "Settings",
    "adamw",
    "add_model_arguments",
    "batches",
    "build",
    "loss_of",
    "model_settings",
    "shapes",
]

_CLASSES = 10
_TOY = {
    "side": 32,
    "layers": 6,
    "width": 384,
    "heads": 6,
    "length": 64,
    "batch": 2,
    "vocabulary": 4096,
    "exact": True,
}

Settings = dict[str, Any]


class Block(gpt.Block):
    """The demo's, with the attention that one would use where speed counts."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        assert mask is None
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True)


class GPT(nn.Module):
    def __init__(self, *, layers: int, width: int, heads: int, length: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            # Recomputed in backward: FSDP2 and DeepSpeed move no activations, which would fill small budgets.
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        scores: Tensor = self.head(self.norm(x))
        return scores


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """What `model_settings` reads, but for ``exact``."""
    parser.add_argument("--toy", action="store_true", help="toy size, on the virtual accelerator if need be")
    parser.add_argument("--model", choices=("gpt", "resnet50"), default="gpt")
    parser.add_argument("--side", type=int, default=64, help="of the ResNet's images")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--steps", type=int, default=5, help="timed, after those of warm-up")


def model_settings(arguments: argparse.Namespace) -> Settings:
    """``arguments``, with what ``--toy`` says in place of its own."""
    settings = {key: value for key, value in vars(arguments).items() if key != "toy"}
    return settings | _TOY if arguments.toy else settings


def shapes(settings: Settings) -> nn.Module:
    """The model on the meta device."""
    with torch.device("meta"):
        if settings["model"] == "resnet50":
            network: nn.Module = cnn.resnet("resnet50", classes=_CLASSES)
            return network
        return GPT(**{key: settings[key] for key in ("layers", "width", "heads", "length", "vocabulary")})


def build(settings: Settings, device: torch.device) -> nn.Module:
    """The model on the host, initialised on ``device`` where that is quicker; the same every time."""
    model = shapes(settings).to_empty(device="cpu")
    generator = torch.Generator(device if device.type in ("cuda", "xpu") else "cpu").manual_seed(0)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.reset_running_stats()
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
                continue
            fresh = torch.empty(parameter.shape, device=generator.device)
            parameter.copy_(fresh.normal_(std=0.02, generator=generator))
    return model


def batches(settings: Settings, count: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    """The inputs and targets of each of ``count`` steps, by its number."""
    torch.manual_seed(0)
    if settings["model"] == "resnet50":
        images = torch.randn(settings["batch"], 3, settings["side"], settings["side"])
        labels = torch.randint(_CLASSES, (count, settings["batch"]))
        return lambda number: (images.roll(number, dims=0), labels[number])
    tokens = torch.randint(settings["vocabulary"], (count, settings["batch"], settings["length"] + 1))
    return lambda number: (tokens[number, :, :-1], tokens[number, :, 1:])


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    scores = model(inputs)
    return functional.cross_entropy(scores.flatten(0, -2), targets.flatten())


def adamw(settings: Settings, model: nn.Module, device: torch.device) -> torch.optim.Optimizer:
    # Fused is what one would use; it rounds otherwise than the loop does, and the virtual accelerator has none.
    fused = not settings["exact"] and device.type != "virtual"
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused, foreach=None if fused else False)
