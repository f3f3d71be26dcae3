"""Which memory a tensor lies in."""

import torch

__all__ = ["fills_memory", "storage_of"]


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """None if it has none of its own: sparse tensors, functorch's."""
    return tensor.untyped_storage() if torch._C._has_storage(tensor) else None


def fills_memory(tensor: torch.Tensor) -> bool:
    """A strided tensor's storage is as large as it is: it is no view of more, nor expanded."""
    return tensor.untyped_storage().nbytes() == tensor.nbytes
