"""Which of torch's kernels steps a parameter at home.

Owns the choice where the user made none: torch's fused CPU kernels read and write each number once, at the speed of
the memory; its for-loops, which are what torch takes by itself on a CPU, read and write it once for each of their
operations. Invariant: nothing is chosen unless ``fused`` and ``foreach`` are both None, and never for what these
kernels do not compute as they should; groups stay as the user set them. What is chosen has the bits of the same run
with ``fused=True``.

[Note: what fused kernels do not take]
They go through memory as if every operand were laid out alike, unchecked: a gradient with other strides is added to
the wrong numbers. They take no mixed types, and SGD's leaves float16 and bfloat16 parameters as they were
(torch 2.13). They write without moving version counters; we move the parameter's, as a for-loop would have, so that
autograd still finds what was changed under it. Momentum has to exist for all or for none of a call's parameters.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

from hetero.stm.updates.optimizers import Entry, Group

__all__ = [
    "GroupKernels",
    "count_kernels",
    "has_momentum",
    "is_count",
    "is_open",
    "same_layout",
    "split",
    "takes_fused",
    "will_take_fused",
]

_FULL = frozenset({torch.float32, torch.float64})
_HALF = frozenset({torch.float16, torch.bfloat16})
_FUSED: dict[type[torch.optim.Optimizer], frozenset[torch.dtype]] = {
    torch.optim.Adagrad: _FULL | _HALF,
    torch.optim.Adam: _FULL | _HALF,
    torch.optim.AdamW: _FULL | _HALF,
    torch.optim.SGD: _FULL,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupKernels:
    """How many of a group's parameters torch's fused kernels step, and how many whatever else the group says.

    ``chosen``: the user left it open.
    """

    fused: int
    others: int
    chosen: bool


def is_open(optimizer: torch.optim.Optimizer, group: Group) -> bool:
    """The user left the choice, and there is one."""
    return (
        type(optimizer) in _FUSED
        and group.get("fused", False) is None
        and group.get("foreach", False) is None
        and not group.get("differentiable")
        and not group.get("capturable")
    )


def takes_fused(
    optimizer: torch.optim.Optimizer,
    parameter: torch.Tensor,
    gradient: torch.Tensor | None,
    entry: Entry | None,
) -> bool:
    """Whether the fused kernel computes this update as the for-loop would, up to rounding; for a group that
    `is_open`. Call without dispatch.

    ``entry``: the optimizer's state for it, None or empty before the first step.
    """
    if parameter.dtype not in _FUSED[type(optimizer)]:
        return False
    if gradient is not None and not same_layout(gradient, parameter):
        return False
    return all(_fits(key, value, parameter) for key, value in (entry or {}).items())


def will_take_fused(
    optimizer: torch.optim.Optimizer, group: Group, parameter: torch.Tensor, entry: Entry | None
) -> bool:
    """Whether they are chosen once the number of steps lies where it has to, for a gradient laid out as the
    parameter."""
    placed = dict(entry or {})
    step = placed.pop("step", None)
    if isinstance(step, torch.Tensor) and not is_count(step):
        return False
    return is_open(optimizer, group) and takes_fused(optimizer, parameter, None, placed)


def _fits(key: str, value: Any, parameter: torch.Tensor) -> bool:
    if not isinstance(value, torch.Tensor):
        return value is None  # momentum that does not exist yet
    if key == "step":
        return value.device == parameter.device and is_count(value)
    return same_layout(value, parameter)


def is_count(step: torch.Tensor) -> bool:
    """A number of steps as fused kernels take it, wherever it is."""
    return step.dtype is torch.float32 and step.numel() == 1


def same_layout(tensor: torch.Tensor, like: torch.Tensor) -> bool:
    """Both fill memory without gaps, the n-th number of one beside the n-th of the other."""
    if (
        tensor.layout is not torch.strided
        or tensor.device != like.device
        or tensor.dtype != like.dtype
        or tensor.shape != like.shape
        or tensor.is_neg()
    ):
        return False
    if like.is_contiguous():
        return tensor.is_contiguous()
    # The rule of torch.empty_like: strides are kept if they are dense.
    return tensor.stride() == like.stride() == torch.empty_like(like, device="meta").stride()


def split(
    optimizer: torch.optim.Optimizer, groups: Sequence[Group], is_ours: Callable[[torch.Tensor], bool]
) -> tuple[list[Group], list[torch.Tensor]]:
    """``groups`` for one call of torch's step, and the parameters for which the fused kernels are chosen.

    They are runs of parameters in their order; whatever is not chosen is as it was. Call without dispatch.
    """

    def kernel(parameter: torch.Tensor) -> tuple[bool, bool]:
        entry = dict.get(optimizer.state, parameter)
        gradient = parameter.grad
        if gradient is None or not is_ours(parameter):
            return False, False
        fused = takes_fused(optimizer, parameter, gradient, entry)
        return fused, fused and has_momentum(entry)

    result: list[Group] = []
    chosen: list[torch.Tensor] = []
    for group in groups:
        if not group["params"] or not is_open(optimizer, group):
            result.append(group)
            continue
        for (fused, _), run in groupby(group["params"], kernel):
            part = {**group, "params": list(run)}
            result.append({**part, "fused": True} if fused else part)
            if fused:
                chosen += part["params"]
    return result, chosen


def count_kernels(
    optimizer: torch.optim.Optimizer, group: Group, is_ours: Callable[[torch.Tensor], bool]
) -> GroupKernels:
    """Of the parameters at home that are ours. Call without dispatch."""
    ours = [parameter for parameter in group["params"] if is_ours(parameter)]
    if not is_open(optimizer, group):
        fused = len(ours) if group.get("fused") else 0
        return GroupKernels(fused=fused, others=len(ours) - fused, chosen=False)
    fused = sum(
        takes_fused(optimizer, parameter, parameter.grad, dict.get(optimizer.state, parameter))
        for parameter in ours
    )
    return GroupKernels(fused=fused, others=len(ours) - fused, chosen=True)


def has_momentum(entry: Entry | None) -> bool:
    """Of SGD's, which makes it at the first step with momentum."""
    return entry is not None and entry.get("momentum_buffer") is not None
