"""Which memory a tensor lies in."""

from collections.abc import Sequence

import torch

__all__ = ["bytes_of", "extent_of", "fills_memory", "has_no_gaps", "storage_of"]


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """None if it has none of its own: sparse tensors, functorch's."""
    return tensor.untyped_storage() if torch._C._has_storage(tensor) else None


def fills_memory(tensor: torch.Tensor) -> bool:
    """A strided tensor's storage is as large as it is: it is no view of more, nor expanded."""
    return tensor.untyped_storage().nbytes() == tensor.nbytes


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of its storage: uint8, shape (bytes,), over the same memory, and no view of ``tensor``."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def extent_of(size: Sequence[int], stride: Sequence[int]) -> int:
    """How many numbers there are in memory from a strided tensor's first to its last, gaps included."""
    return 0 if 0 in size else 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))


def has_no_gaps(tensor: torch.Tensor) -> bool:
    """Its numbers lie one beside the other in memory, in whatever order of dimensions."""
    return tensor.is_contiguous() or extent_of(tensor.size(), tensor.stride()) == tensor.numel()
