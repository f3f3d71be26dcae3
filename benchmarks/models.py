"""The small Hugging Face models whose traces are measured, built from configs; nothing is downloaded.

Owns their sizes: a few million parameters, with embeddings no larger than a fifth of them, so that every budget
share of `benchmarks.bytes_moved` leaves something to decide.
"""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

__all__ = ["MODELS", "Loss", "adamw"]

Loss = Callable[[nn.Module, torch.device], Tensor]
"""Runs one forward on a device and returns the scalar loss."""

_TOKENS = 512
_LENGTH = 32
_WIDE: dict[str, Any] = {"num_hidden_layers": 8, "hidden_size": 192, "num_attention_heads": 6}


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)


def _text_loss(model: nn.Module, device: torch.device) -> Tensor:
    tokens = torch.randint(_TOKENS, (2, _LENGTH)).to(device)
    loss: Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


def _image_loss(model: nn.Module, device: torch.device) -> Tensor:
    images, labels = torch.randn(2, 3, 64, 64).to(device), torch.randint(10, (2,)).to(device)
    loss: Tensor = model(pixel_values=images, labels=labels).loss
    return loss


def _gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        n_layer=8, n_embd=192, n_head=6, vocab_size=_TOKENS, n_positions=64, bos_token_id=0, eos_token_id=0
    )
    model: nn.Module = transformers.GPT2LMHeadModel(config)
    return model


def _llama() -> nn.Module:
    config = transformers.LlamaConfig(
        **_WIDE, intermediate_size=512, num_key_value_heads=2, vocab_size=_TOKENS
    )
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


# The default calls histc on integers, which a CPU, and so the virtual accelerator, does not have.
_EAGER_EXPERTS: dict[str, Any] = {"experts_implementation": "eager"}


def _mixtral() -> nn.Module:
    config = transformers.MixtralConfig(
        num_hidden_layers=8,
        hidden_size=128,
        intermediate_size=256,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        vocab_size=_TOKENS,
        **_EAGER_EXPERTS,
    )
    model: nn.Module = transformers.MixtralForCausalLM(config)
    return model


def _bert() -> nn.Module:
    config = transformers.BertConfig(
        **_WIDE, intermediate_size=768, vocab_size=_TOKENS, max_position_embeddings=64
    )
    model: nn.Module = transformers.BertForMaskedLM(config)
    return model


def _vit() -> nn.Module:
    config = transformers.ViTConfig(**_WIDE, intermediate_size=768, image_size=64, patch_size=8)
    config.num_labels = 10
    model: nn.Module = transformers.ViTForImageClassification(config)
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], Loss]] = {
    "GPT-2": (_gpt2, _text_loss),
    "Llama": (_llama, _text_loss),
    "Mixtral": (_mixtral, _text_loss),
    "BERT": (_bert, _text_loss),
    "ViT": (_vit, _image_loss),
}
