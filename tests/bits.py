"""What "the same numbers" means to tests: the same type, shape and bits, and NaN where the other has NaN."""

import torch


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Both on one device. A NaN equals any NaN, and nothing else: on the virtual device it is poison."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    nan = one.isnan()
    return torch.equal(nan, other.isnan()) and torch.equal(one.masked_fill(nan, 0), other.masked_fill(nan, 0))


def bits_of(tensor: torch.Tensor) -> bytes:
    """All of it, to be compared later: exact on any device, where sums are not, and nobody's memory is held for it."""
    return tensor.detach().cpu().contiguous().numpy().tobytes()
