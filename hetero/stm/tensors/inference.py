"""Inference tensors: what is made within `torch.inference_mode`, and what a parameter becomes that is given one.

After ``p.data = x``, ``x`` being one, autograd records what an operator does with ``p`` only where the other operands
make it, and cannot save ``p``. So managed parameters become inference tensors as well; their homes, and the copies made
of these, are ordinary ones, because nobody counts the writes to an inference tensor within that mode.

Owns how a tensor becomes one, or none any more. Its memory and version counter stay what they are.
"""

import torch

__all__ = ["has_counter", "make_inference", "make_ordinary", "ordinary_alias"]


def has_counter(tensor: torch.Tensor) -> bool:
    """Somebody counts the writes to ``tensor``: not if it was made in that mode, whatever its ``data`` are now."""
    try:
        return tensor._version >= 0
    except RuntimeError:
        return False


def make_inference(tensor: torch.Tensor) -> None:
    """``tensor`` is an inference tensor from now on."""
    tensor.data = _alias(tensor, is_inference=True)


def make_ordinary(tensor: torch.Tensor) -> None:
    """``tensor`` is none any more."""
    if tensor.is_inference():
        tensor.data = _alias(tensor, is_inference=False)


def ordinary_alias(tensor: torch.Tensor) -> torch.Tensor:
    """An ordinary tensor of ``tensor``'s memory, with a version counter of its own."""
    return _alias(tensor, is_inference=False)


def _alias(tensor: torch.Tensor, *, is_inference: bool) -> torch.Tensor:
    with torch.inference_mode(is_inference), torch.no_grad():
        alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return alias.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())
