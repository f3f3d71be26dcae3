"""What an update on the device allocates for a while.

Owns the number of bytes, for each parameter that one call of the kernel steps: one, or with ``foreach`` a group's.
Invariant: no update of an optimizer that `is_measured` takes more, but for a few blocks of scalars. Of kernels that
treat each number by itself it is so many copies of the parameter: measured on torch 2.11 and 2.13 for what is in the
table, for other settings the most that any of them takes. Of Adafactor and Muon it depends on the shape (2.13). Of
others nothing is known: the most is a guess, and `to_undo` comes on top, in case it is wrong.
"""

from math import ceil

import torch

from hetero.stm.updates.optimizers import Entry, Group

__all__ = ["is_measured", "temporaries", "to_undo"]

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


# What libraries of matrix products take for themselves, whatever the size; and to how many numbers the shorter side of
# an operand is filled up where they pack it into tiles, as oneDNN does for processors with AMX.
_WORKSPACE, _TILE = 256 << 10, 64


def is_measured(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is known what an update by ``optimizer`` takes."""
    return type(optimizer) in _OWN or type(optimizer) in (torch.optim.Adafactor, torch.optim.Muon)


def temporaries(optimizer: torch.optim.Optimizer, group: Group, parameter: torch.Tensor, nbytes: int) -> int:
    """Of an update of ``parameter``, a copy of which takes ``nbytes``, by ``optimizer`` as ``group`` is set now."""
    if type(optimizer) is torch.optim.Adafactor:
        return ceil(_of_adafactor(group, parameter) * nbytes)
    if type(optimizer) is torch.optim.Muon:
        return ceil(_of_muon(group, parameter) * nbytes) + _packed_bytes(parameter) + _WORKSPACE
    return _copies(optimizer, group) * nbytes


def to_undo(entry: Entry | None, nbytes: int) -> int:
    """Copies of a parameter of ``nbytes``, its states and its gradient."""
    states = (value for value in (entry or {}).values() if isinstance(value, torch.Tensor))
    return 2 * nbytes + sum(value.nbytes for value in states)


def _of_adafactor(group: Group, parameter: torch.Tensor) -> float:
    """In copies. It decays the parameter, not the gradient."""
    own = 2.0  # of a vector: the square, and the update
    if parameter.dim() > 1:
        rows, columns = max(parameter.size(-2), 1), max(parameter.size(-1), 1)
        means = 1 / rows + 1 / columns + 1 / (rows * columns)
        # Norms along a dimension of a half-precision gradient are taken of a float32 copy, into float32.
        own = 1 + means if parameter.element_size() > 2 else 2 + 3 * means
    return own + bool(group.get("maximize"))


def _of_muon(group: Group, parameter: torch.Tensor) -> float:
    """In copies. The iteration is in bfloat16, whatever the parameter is in: with the matrix, old and new, there are
    two of its products with itself, which are squares of the shorter side."""
    short, long = sorted(parameter.shape[-2:])
    one = 2 / parameter.element_size()
    iteration = one * (2 + 2 * short / max(long, 1))
    # Kernels of a CPU cast whole operands: the update, for the sum with the parameter; all of lerp's in float16.
    least = 1 + one if parameter.element_size() > 2 else _MOST
    return max(bool(group.get("nesterov")) + iteration, least)


def _packed_bytes(parameter: torch.Tensor) -> int:
    """Of the matrix, in bfloat16, in tiles."""
    short, long = sorted(parameter.shape[-2:])
    return 2 * long * _TILE * ceil(short / _TILE)


def _copies(optimizer: torch.optim.Optimizer, group: Group) -> int:
    if group.get("fused"):
        return 0
    values = [value for key, value in group.items() if key not in ("params", "betas")]
    has_tensors = any(isinstance(value, torch.Tensor) for value in (*values, *group.get("betas", ())))
    if type(optimizer) is torch.optim.SGD:
        return _changed(group) + has_tensors
    if has_tensors or group.get("capturable") or group.get("differentiable"):
        return _MOST
    return _OWN.get(type(optimizer), _MOST) + _changed(group)


def _changed(group: Group) -> int:
    """Copies of the gradient: a product or a sum each, at most."""
    decays = bool(group.get("weight_decay")) and not group.get("decoupled_weight_decay")
    return decays + bool(group.get("nesterov")) + bool(group.get("maximize"))
