"""What an update on the device allocates for a while.

Owns the number, in units of the parameter. Invariant: no update of an optimizer that may be stepped there takes more.
Read off torch's kernels: a for-loop has the most of them at once, a fused kernel none.
"""

import torch

__all__ = ["temporaries"]

_MOST = 5  # square roots, bias corrections, weight decay


def temporaries(optimizer: torch.optim.Optimizer) -> int:
    """Of one parameter's update by ``optimizer`` as it is set now."""
    if type(optimizer) is not torch.optim.SGD:
        return _MOST
    return max((_of_sgd(group) for group in optimizer.param_groups), default=0)


def _of_sgd(group: dict[str, object]) -> int:
    """A product or a sum each, at most: everything else is added in place."""
    changed = bool(group["weight_decay"]) + bool(group["nesterov"]) + bool(group["maximize"])
    return changed + isinstance(group["lr"], torch.Tensor)
