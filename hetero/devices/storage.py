"""Which memory a tensor lies in."""

import torch

__all__ = ["storage_of"]


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """None if it has none of its own: sparse tensors, functorch's."""
    return tensor.untyped_storage() if torch._C._has_storage(tensor) else None
