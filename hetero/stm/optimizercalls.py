"""Calls of any optimizer of the process, managed or not, that holds managed parameters.

Owns what is put around its step (torch's hooks), and its methods that are replaced while models are managed:
``zero_grad``, also a module's, looks whether there is a gradient, which would wait for it; before ``load_state_dict``
and ``add_param_group`` what a step has left to be done is done.
"""

import functools
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from hetero.stm.interception.parameter import is_managed, managed_in, managed_of
from hetero.stm.settled.added import note_group
from hetero.stm.settled.who import before_change, note_optimizer
from hetero.stm.tensors.fetch import plain
from hetero.stm.tensors.owner import Owner

__all__ = ["REPLACED_ALWAYS", "REPLACEMENTS", "before_step", "note_step"]

_Module: Any = nn.Module
_Optimizer: Any = torch.optim.Optimizer
_module_zero_grad = _Module.zero_grad
_optimizer_zero_grad = _Optimizer.zero_grad


def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Before the step of any optimizer of the process: it may read parameters below interception."""
    for tensor in managed_in(optimizer):
        tensor.owner.check_process()
    _wait_for_updates(optimizer)
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:  # else the iteration is within
        for owner in _owners(optimizer):
            owner.steps.begin_kept(optimizer)


def _owners(optimizer: torch.optim.Optimizer) -> list[Owner]:
    """The managers of its parameters."""
    return list({id(tensor.owner): tensor.owner for tensor in managed_in(optimizer)}.values())


def _wait_for_updates(optimizer: torch.optim.Optimizer) -> None:
    """Of its parameters, unless it is stepping them now."""
    for tensor in managed_in(optimizer):
        if not tensor.owner.steps.is_running(optimizer):
            tensor.owner.home_access.wait(tensor)


def note_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """After the step of any optimizer of the process: fused kernels write parameters without moving their version,
    so whatever has a gradient counts as written."""
    with plain():
        for tensor in managed_in(optimizer):
            if tensor.parameter.grad is None:
                continue
            if tensor.owner.steps.is_running(optimizer):
                written = not tensor.stays
            else:  # was up to date before; what is not now, the managed optimizer has stepped within this step
                written = tensor.pending is None and not tensor.is_dirty
            if written:
                tensor.clock.note_write()
                tensor.owner.home_access.after_write(tensor)
    for owner in _owners(optimizer):
        owner.steps.end_kept(optimizer)


@functools.wraps(_module_zero_grad)
def _zero_module_grad(self: nn.Module, set_to_none: bool = True) -> None:
    if set_to_none:
        _drop_gradients(self.parameters())
        _module_zero_grad(self, set_to_none)
    else:
        rest = _without_zeroed(self.parameters())
        is_replica = getattr(self, "_is_replica", False)
        _module_zero_grad(SimpleNamespace(parameters=lambda: rest, _is_replica=is_replica), set_to_none)


@functools.wraps(_optimizer_zero_grad)
def _zero_optimizer_grad(self: torch.optim.Optimizer, set_to_none: bool = True) -> None:
    if set_to_none:
        _drop_gradients(parameter for group in self.param_groups for parameter in group["params"])
        _optimizer_zero_grad(self, set_to_none)
    elif not managed_in(self):
        _optimizer_zero_grad(self, set_to_none)
    else:
        if not hasattr(self, "_zero_grad_profile_name"):
            self._patch_step_function()
        rest = [{**group, "params": _without_zeroed(group["params"])} for group in self.param_groups]
        _optimizer_zero_grad(
            SimpleNamespace(
                param_groups=rest,
                defaults=self.defaults,
                _zero_grad_profile_name=self._zero_grad_profile_name,
            ),
            set_to_none,
        )


def _drop_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Those of managed parameters; the rest is left to the original."""
    for parameter in parameters:
        if is_managed(parameter):
            managed_of(parameter).owner.gradient_access.drop(managed_of(parameter))


def _without_zeroed(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """What is left to the original, which would look at gradients to make them zero."""
    return [
        p
        for p in parameters
        if not (is_managed(p) and managed_of(p).owner.gradient_access.zero(managed_of(p)))
    ]


def _after_updates(method: Any) -> Any:
    @functools.wraps(method)
    def updated(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        before_change(self)
        _wait_for_updates(self)
        groups = len(getattr(self, "param_groups", ()))  # a class may make them with its first
        try:
            return method(self, *args, **kwargs)
        finally:
            note_optimizer(self)
            if len(self.param_groups) > groups:
                note_group(self)

    return updated


REPLACEMENTS: list[tuple[Any, str, Any]] = [
    (_Module, "zero_grad", _zero_module_grad),
    (_Optimizer, "zero_grad", _zero_optimizer_grad),
]
"""As `hetero.stm.patches` wants them."""

REPLACED_ALWAYS: list[tuple[Any, str, Any]] = [
    (_Optimizer, name, _after_updates(getattr(_Optimizer, name)))
    for name in ("load_state_dict", "add_param_group")
]
"""Likewise, also while everybody rests."""
