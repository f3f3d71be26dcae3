"""Whether anybody besides the model, the optimizer and us holds a tensor's memory.

Owns the answer, by reference counts. A write that is done later must not be seen to come late: whoever reads
through the parameter, ``p.grad`` or ``optimizer.state`` waits for it, but an alias that was taken earlier
(``p.data``, ``state_dict()``, a NumPy array, an element of ``optimizer.state``) is an ordinary tensor. Invariant:
`is_private` is True only if there is none. A reference more than there should be makes it False: that costs
time, never a number.
"""

import functools
import sys
import types
from typing import Any, Protocol

import torch
from torch import nn

__all__ = [
    "gradient_has_one_name",
    "gradient_is_plain",
    "gradient_is_private",
    "holds_alone",
    "incoming_is_shared",
    "listed_alone",
    "measure_incoming",
    "memory_is_private",
    "state_is_private",
]


def memory_is_private(tensor: torch.Tensor, aliases: int) -> bool:
    """``tensor``'s storage is held by it and ``aliases`` further tensors only."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) == _ONE_TENSOR + aliases


def gradient_is_private(parameter: torch.Tensor) -> bool:
    """Only ``parameter.grad`` holds its gradient. Call without ``__torch_function__`` dispatch."""
    gradient = parameter.grad
    return gradient is not None and _counts(gradient) == _GRADIENT


def gradient_has_one_name(parameter: torch.Tensor) -> bool:
    """As `gradient_is_private`, but its memory may be ours as well."""
    gradient = parameter.grad
    return gradient is not None and _counts(gradient)[:2] == _GRADIENT[:2]


def gradient_is_plain(gradient: torch.Tensor | None) -> bool:
    """An ordinary tensor at home: of flat memory, and no part of a graph. Call likewise."""
    return (
        gradient is not None
        and gradient.layout is torch.strided
        and gradient.device.type == "cpu"
        and not gradient.requires_grad
    )


def incoming_is_shared(gradient: torch.Tensor) -> bool:
    """Somebody besides autograd's node holds ``gradient``, which that node's ``backward`` was given and asks about by
    the name of its argument. ``AccumulateGrad`` would not take such a tensor over, either: it may be written to."""
    if gradient.layout is not torch.strided:  # it is copied home before anybody goes on
        return False
    references, uses, _ = _counts(gradient)
    return (references, uses) != measure_incoming()


class _Holder(Protocol):
    gradient: torch.Tensor


def holds_alone(holder: _Holder) -> bool:
    """Only ``holder.gradient`` holds that tensor, and its memory."""
    return _counts(holder.gradient) == _HELD


def listed_alone(tensors: list[torch.Tensor]) -> bool:
    """Only this list holds ``tensors``; others may hold their memory."""
    return all((sys.getrefcount(tensor), _uses(tensor)) == _LISTED for tensor in tensors)


def state_is_private(entry: dict[str, Any], kept: frozenset[int]) -> bool:
    """Only the optimizer's state holds ``entry`` and the tensors in it; we hold those whose ids are ``kept``.

    The caller holds ``entry`` by one name.
    """
    if sys.getrefcount(entry) != _ENTRY:
        return False
    for value in entry.values():
        if isinstance(value, torch.Tensor):
            references, uses, storage = _counts(value)
            if (references - (id(value) in kept), uses, storage) != _VALUE:
                return False
        elif not isinstance(value, int | float | str | bool | complex | type(None)):
            return False  # a container of its own: nobody knows who else has it
    return True


def _uses(tensor: torch.Tensor) -> int:
    uses: int = tensor._use_count()  # type: ignore[attr-defined]
    return uses


def _counts(tensor: torch.Tensor) -> tuple[int, int, int]:
    return (
        sys.getrefcount(tensor),
        _uses(tensor),
        torch._C._storage_Use_Count(tensor.untyped_storage()._cdata),
    )


@functools.cache
def measure_incoming() -> tuple[int, int]:
    """What `incoming_is_shared` compares with. It runs a backward, and the first of a process fixes for which devices
    autograd has threads: not before the device in use is there, and not within another."""
    seen: list[tuple[int, int]] = []

    def asked(gradient: torch.Tensor) -> tuple[int, int]:  # as deep as `incoming_is_shared` asks
        references, uses, _ = _counts(gradient)
        return references, uses

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
            return value.detach()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            seen.append(asked(gradient))
            return gradient

    with torch.inference_mode(False), torch.enable_grad():
        value: Any = Probe.apply(torch.zeros(2, device="cpu", requires_grad=True))
        (value * value).sum().backward()
    return seen[0]


# Measured, because they differ between versions of Python and torch: each in the way in which it is asked for.


def _measure_gradient() -> tuple[int, int, int]:
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.zeros(2)
    gradient = parameter.grad
    return _counts(gradient)


def _measure_value() -> tuple[int, int, int]:
    entry = {"exp_avg": torch.zeros(2)}
    return next(_counts(value) for value in entry.values())


def _measure_held() -> tuple[int, int, int]:
    holder = types.SimpleNamespace(gradient=torch.zeros(2))
    return _counts(holder.gradient)


def _measure_listed() -> tuple[int, int]:
    return next((sys.getrefcount(tensor), _uses(tensor)) for tensor in [torch.zeros(2)])


def _measure_entry() -> int:
    state: dict[int, dict[str, Any]] = {0: {}}

    def asked(entry: dict[str, Any]) -> int:
        return sys.getrefcount(entry)

    entry = state[0]
    return asked(entry)


_GRADIENT = _measure_gradient()
_VALUE = _measure_value()
_HELD = _measure_held()
_LISTED = _measure_listed()
_ENTRY = _measure_entry()
_ONE_TENSOR = _VALUE[2]
