"""The modules of managed models, and those that are called by themselves: ``model.encoder(x)``.

Owns which they are, and how the first such call is told: by an operator that meets a managed parameter outside of any
forward, of Python's stack, where ``nn.Module.__call__`` has a frame for as long as the module runs. From then on such
calls are ours (`hetero.stm.modelcalls`); a wrapper around every submodule would cost each call within the model's own.
"""

import sys
import weakref
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

__all__ = ["called_part", "forget_model", "managed_modules", "note_model", "tensors_in"]

_CALL: CodeType = nn.Module._call_impl.__code__

_models: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()


def note_model(model: nn.Module) -> None:
    """``model`` is managed from now on."""
    _models.add(model)


def forget_model(model: nn.Module) -> None:
    """It is not any more."""
    _models.discard(model)


def managed_modules() -> frozenset[int]:
    """Ids of all modules of all managed models."""
    return frozenset(id(part) for model in _models for part in model.modules())


def called_part(device: torch.device) -> nn.Module | None:
    """The outermost module of a managed model that is being called on this thread, with a tensor on ``device``."""
    found = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _CALL:
            called = frame.f_locals
            given = (*called["args"], *called["kwargs"].values())
            if any(value.device == device for value in tensors_in(given)) and _is_part(called["self"]):
                found = called["self"]
        frame = frame.f_back
    return found


def _is_part(module: nn.Module) -> bool:
    return any(part is module for model in _models for part in model.modules())


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """Tensors among ``values``, in lists, tuples and dictionaries as well."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)
        elif isinstance(value, dict):
            yield from tensors_in(value.values())
