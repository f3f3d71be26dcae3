"""Running the operators of a loop so that an arena can place what they make.

Owns the dispatch mode `Placing` and the rules by operator: which make nothing, which can write into a slot at once.
Places nothing itself: see `hetero.pool.arena`, and there [Note: placing]. Knows torch.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from hetero.devices import calling
from hetero.devices.operators import ALLOCATE_ONLY, NO_KERNEL, tensors_of
from hetero.pool.slots import Call, Offer

__all__ = ["INTO_OUT", "IntoOut", "Placing", "look_of", "only_plain"]

# Structured operators: torch generates both variants around one kernel, which the functional one gives an
# output of the strides it wants. Operator and overload: the overload that writes into its argument.
INTO_OUT = {
    **{f"{name}.Tensor": "out" for name in ("add", "sub", "mul", "div")},
    **{f"{name}.default": "out" for name in ("mm", "bmm", "addmm", "baddbmm")},
    **{f"{name}.default": "out" for name in ("exp", "log", "tanh", "sigmoid", "silu", "gelu", "sqrt")},
    **{f"{name}.default": "out" for name in ("rsqrt", "neg", "sin", "cos", "reciprocal")},
    **{f"{name}.default": "out" for name in ("_softmax", "_log_softmax")},
    **{f"{name}_backward.default": "grad_input" for name in ("gelu", "silu", "tanh", "sigmoid", "threshold")},
    **{f"{name}_backward_data.default": "out" for name in ("_softmax", "_log_softmax")},
    "maximum.default": "out",
    "minimum.default": "out",
    "pow.Tensor_Scalar": "Tensor_Scalar_out",
    "cat.default": "out",
    "sum.dim_IntList": "IntList_out",
    "mean.dim": "out",
}


class _Places(Protocol):
    """What the mode needs of an arena."""

    def run_into_slot(
        self, func: OpOverload, into: "IntoOut", args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[torch.Tensor | None, Call | None]: ...

    def offer(self, func: OpOverload) -> Offer | None: ...

    def withdraw(self, offer: Offer) -> None: ...

    def settle(
        self,
        func: OpOverload,
        out: Any,
        args: tuple[Any, ...],
        call: Call | None,
        *,
        bare: bool,
        offer: Offer | None,
    ) -> None: ...

    def leave_alone(self, args: Any, *, resized: bool) -> None: ...


@dataclass(frozen=True, slots=True)
class IntoOut:
    """The variant of an operator that writes into its argument of this name."""

    func: OpOverload
    argument: str


@dataclass(frozen=True, slots=True)
class Rule:
    """How calls of an operator are treated; worked out once an operator."""

    passes: bool  # makes views only, or nothing, or writes in place
    resizes: bool = False
    other_stream: bool = False
    bare: bool = False
    into: IntoOut | None = None


class Placing(TorchDispatchMode):
    """Runs every operator, and lets the arena place what it makes."""

    supports_higher_order_operators = True

    def __init__(self, arena: _Places) -> None:
        super().__init__()
        self._arena = arena
        self._rules: dict[OpOverload, Rule] = {}

    def __torch_dispatch__(
        self,
        func: OpOverload | HigherOrderOperator,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):  # what its functions make comes from the device's allocator
            return func(*args, **kwargs)
        rule = self._rules.get(func)
        if rule is None:
            rule = self._rules[func] = rule_of(func)
        if rule.resizes or rule.other_stream:
            self._arena.leave_alone((*args, *kwargs.values()), resized=rule.resizes)
        if rule.passes or kwargs.get("pin_memory"):
            return calling.call(func, args, kwargs)
        call = None
        if rule.into is not None:
            out, call = self._arena.run_into_slot(func, rule.into, args, kwargs)
            if out is not None:
                return out
        offer = self._arena.offer(func)
        try:
            out = calling.call(func, args, kwargs)
        finally:
            if offer is not None:
                self._arena.withdraw(offer)
        self._arena.settle(func, out, (*args, *kwargs.values()), call, bare=rule.bare, offer=offer)
        return out


def rule_of(func: OpOverload) -> Rule:
    """Read off its schema and its name."""
    schema = func._schema
    name = schema.name.split("::")[-1]
    writes_out = any(argument.is_out for argument in schema.arguments)
    in_place = all(returned.alias_info is not None for returned in schema.returns)
    into = INTO_OUT.get(f"{name}.{schema.overload_name or 'default'}") if func.namespace == "aten" else None
    if into is not None:
        variant = getattr(func.overloadpacket, into)
        argument = next(argument.name for argument in variant._schema.arguments if argument.is_out)
    return Rule(
        passes=func.is_view or func.namespace in NO_KERNEL or in_place or name == "_pin_memory",
        resizes=writes_out or name in ("resize_", "resize_as_", "set_"),
        other_stream=name == "record_stream",
        bare=name.startswith(ALLOCATE_ONLY),
        into=None if into is None else IntoOut(variant, argument),
    )


def only_plain(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """No subclass among the tensors, whose own code would see the call."""
    return all(
        type(tensor) in (torch.Tensor, torch.nn.Parameter) for tensor in tensors_of((args, *kwargs.values()))
    )


def look_of(value: Any) -> Any:
    """What decides the strides and type of an operator's result, comparable with ``==``."""
    if isinstance(value, torch.Tensor):
        return (value.shape, value.stride(), value.dtype, value.device, value.is_conj(), value.is_neg())
    if isinstance(value, list | tuple):
        return tuple(look_of(item) for item in value)
    if isinstance(value, dict):
        return tuple((key, look_of(item)) for key, item in value.items())
    return (type(value), value)
