"""Which memory a tensor lies in."""

import torch

__all__ = ["storage_of"]


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """None if it has none of its own: sparse tensors, wrapper subclasses, functorch's."""
    try:
        return tensor.untyped_storage()
    except NotImplementedError:
        return None
