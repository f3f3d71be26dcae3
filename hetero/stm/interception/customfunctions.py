"""The user's own ``autograd.Function``s, given parameters.

Owns ``Function.apply`` while models are managed, which does not dispatch through ``__torch_function__``: a custom
Function would receive the parameter itself, at home, and its backward would return a gradient on the wrong device.
"""

import contextlib
from typing import Any

import torch
import torch.utils.checkpoint

from hetero.stm.interception.backwards import note_nested
from hetero.stm.interception.operands import collect, replace_one
from hetero.stm.interception.operators import ahead_of_home, outside, substituted, write_back
from hetero.stm.interception.outside import full_copies, keeps_its_type
from hetero.stm.interception.parameter import is_managed
from hetero.stm.interception.scopes import in_scope
from hetero.stm.tensors.fetch import plain
from hetero.stm.tensors.managed import ManagedTensor

__all__ = ["REPLACEMENTS"]

# Until torch 2.14 ``Function.apply`` is Python that goes on to its base's; since 2.15 it is that of the base itself.
_Function: Any = (
    torch.autograd.function._SingleLevelFunction
    if isinstance(torch.autograd.Function.__dict__["apply"], classmethod)
    else torch.autograd.Function
)


def _apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    original = super(_Function, cls).apply
    if cls is torch.utils.checkpoint.CheckpointFunction:  # known before its first backward
        note_nested()
    operands: list[ManagedTensor] = []
    collect(args, operands)
    # Outside a scope a Function of the user's may well be about home (a regulariser, say): device tensors decide.
    if not operands or not (in_scope() or _has_device_operand(operands[0].owner.device, args)):
        for tensor in operands:
            if torch.is_grad_enabled():
                tensor.paths.note_home_graph(None)
            tensor.owner.home_access.wait(tensor)
        return original(*args, **kwargs)
    if not in_scope() and keeps_its_type(operands):
        with plain(), full_copies(operands) as copies, torch._C._EnableTorchFunction():
            return original(*(replace_one(value, copies) for value in args), **kwargs)
    with plain():
        saving = contextlib.nullcontext() if in_scope() else outside(operands, args, kwargs)
    with plain(), saving, substituted(operands, cls.__name__) as copies:
        ahead = ahead_of_home(operands)
        try:
            given = [replace_one(value, copies) for value in args]
        except KeyError:  # one of another model, which had settled and has just made way for ``operands``
            return _apply(cls, *args, **kwargs)
        with torch._C._EnableTorchFunction():
            result = original(*given, **kwargs)
        if not in_scope():
            write_back(operands, ahead)
    return result


def _has_device_operand(device: torch.device, args: tuple[Any, ...]) -> bool:
    return any(
        isinstance(value, torch.Tensor) and not is_managed(value) and value.device == device for value in args
    )


REPLACEMENTS: list[tuple[Any, str, Any]] = [(_Function, "apply", classmethod(_apply))]
"""As `hetero.stm.patches` wants them."""
