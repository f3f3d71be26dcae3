"""Whether anybody besides the model, the optimizer and us holds a tensor's memory.

Owns the answer, by reference counts. A write that is done later must not be seen to come late: whoever reads
through the parameter, ``p.grad`` or ``optimizer.state`` waits for it, but an alias that was taken earlier
(``p.data``, ``state_dict()``, a NumPy array, an element of ``optimizer.state``) is an ordinary tensor. Invariant:
what ends in ``_is_private`` is True only if there is none. A reference more than there should be makes it False: that
costs time, never a number.

[Note: how many there should be]
It is measured, because it differs between versions of Python and torch, each in the way in which it is asked for. And
it changes: a call is given references of its own while Dynamo looks at frames, as it does for good once a compilation
has failed.
"""

import functools
import sys
import types
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

__all__ = [
    "ATTRIBUTE_AND_NAME",
    "WRAPPER_USES",
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
    return gradient is not None and _counts(gradient) == _expected().gradient


def gradient_has_one_name(parameter: torch.Tensor) -> bool:
    """As `gradient_is_private`, but its memory may be ours as well."""
    gradient = parameter.grad
    return gradient is not None and _counts(gradient)[:2] == _expected().gradient[:2]


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
    return (references, uses) != _incoming(_asked(_PROBE))


class _Holder(Protocol):
    gradient: torch.Tensor


def holds_alone(holder: _Holder) -> bool:
    """Only ``holder.gradient`` holds that tensor, and its memory."""
    return _counts(holder.gradient) == _expected().held


def listed_alone(tensors: list[torch.Tensor]) -> bool:
    """Only this list holds ``tensors``; others may hold their memory."""
    listed = _expected().listed
    return all((sys.getrefcount(tensor), _uses(tensor)) == listed for tensor in tensors)


def state_is_private(entry: dict[str, Any], kept: frozenset[int]) -> bool:
    """Only the optimizer's state holds ``entry`` and the tensors in it; we hold those whose ids are ``kept``.

    The caller holds ``entry`` by one name.
    """
    expected = _expected()
    if sys.getrefcount(entry) != expected.entry:
        return False
    for value in entry.values():
        if isinstance(value, torch.Tensor):
            references, uses, storage = _counts(value)
            if (references - (id(value) in kept), uses, storage) != expected.value:
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


def measure_incoming() -> None:
    """What `incoming_is_shared` compares with. It runs a backward, and the first of a process fixes for which devices
    autograd has threads: not before the device in use is there, and not within another."""
    _incoming(_asked(_PROBE))


@functools.cache
def _incoming(_: int) -> tuple[int, int]:
    """[Note: how many there should be]"""
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


# -- how many there should be --------------------------------------------------------------------------


class _Expected(NamedTuple):
    gradient: tuple[int, int, int]
    value: tuple[int, int, int]
    held: tuple[int, int, int]
    listed: tuple[int, int]
    entry: int


def _expected() -> _Expected:
    return _measured(_asked(_PROBE))


@functools.cache
def _measured(_: int) -> _Expected:
    """[Note: how many there should be]"""
    return _Expected(
        _measure_gradient(), _measure_value(), _measure_held(), _measure_listed(), _measure_entry()
    )


def _asked(value: object) -> int:
    return sys.getrefcount(value)


_PROBE = object()


def _measure_gradient() -> tuple[int, int, int]:
    parameter = nn.Parameter(torch.zeros(2, device="cpu"))
    parameter.grad = torch.zeros(2, device="cpu")
    gradient = parameter.grad
    return _counts(gradient)


def _measure_value() -> tuple[int, int, int]:
    entry = {"exp_avg": torch.zeros(2, device="cpu")}
    return next(_counts(value) for value in entry.values())


def _measure_held() -> tuple[int, int, int]:
    holder = types.SimpleNamespace(gradient=torch.zeros(2, device="cpu"))
    return _counts(holder.gradient)


def _measure_listed() -> tuple[int, int]:
    return next((sys.getrefcount(tensor), _uses(tensor)) for tensor in [torch.zeros(2, device="cpu")])


def _measure_entry() -> int:
    state: dict[int, dict[str, Any]] = {0: {}}

    entry = state[0]
    return _asked(entry)


def _measure_attribute_and_name() -> int:
    holder = types.SimpleNamespace(value=torch.zeros(2, device="cpu"))
    value = holder.value
    return sys.getrefcount(value)


_ONE_TENSOR = _expected().value[2]
# How many uses of a storage come on top of the tensors': its Python wrapper.
WRAPPER_USES = _ONE_TENSOR - 1
# What sys.getrefcount answers for what only an attribute and a local name hold. To be asked without another call, which
# would hold its argument while Dynamo looks at frames.
ATTRIBUTE_AND_NAME = _measure_attribute_and_name()
