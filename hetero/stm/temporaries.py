"""What an update on the device allocates for a while.

Owns the number, in units of what one call of the kernel steps: of one parameter, or with ``foreach`` of a group.
Invariant: no update of an optimizer that may be stepped there takes more. Measured on torch 2.11 and 2.13 for what is
in the table; for everything else the most that any of torch's kernels takes.
"""

from typing import Any

import torch

__all__ = ["temporaries"]

_MOST = 7

# What for-loop and foreach kernels make besides a changed gradient, where their settings are numbers.
_OWN: dict[type[torch.optim.Optimizer], int] = {
    torch.optim.ASGD: 1,
    torch.optim.Adadelta: 2,
    torch.optim.Adagrad: 2,
    torch.optim.Adam: 2,
    torch.optim.AdamW: 2,
    torch.optim.Adamax: 1,
    torch.optim.NAdam: 2,
    torch.optim.RAdam: 5,
    torch.optim.RMSprop: 1,
    torch.optim.Rprop: 3,
    torch.optim.SGD: 0,
}


def temporaries(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> int:
    """Of an update by ``optimizer`` as ``group`` is set now."""
    if group.get("fused"):
        return 0
    values = [value for key, value in group.items() if key not in ("params", "betas")]
    has_tensors = any(isinstance(value, torch.Tensor) for value in (*values, *group.get("betas", ())))
    if type(optimizer) is torch.optim.SGD:
        return _changed(group) + has_tensors
    if has_tensors or group.get("capturable") or group.get("differentiable"):
        return _MOST
    return _OWN.get(type(optimizer), _MOST) + _changed(group)


def _changed(group: dict[str, Any]) -> int:
    """Copies of the gradient: a product or a sum each, at most."""
    decays = bool(group.get("weight_decay")) and not group.get("decoupled_weight_decay")
    return decays + bool(group.get("nesterov")) + bool(group.get("maximize"))
