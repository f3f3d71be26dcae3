"""The modules of managed models, and what of them is called by itself: ``model.encoder(x)``, ``model.encode(x)``.

Owns which they are, and how the first such call is told: by an operator that meets a managed parameter outside of any
forward, of Python's stack, where ``nn.Module.__call__`` has a frame for as long as the module runs. From then on such
calls are ours (`hetero.stm.modelcalls`); a wrapper around every submodule would cost each call within the model's own.
A method, which is never ours, is told by its own frame each time.

[Note: known modules]
Every operator outside of a forward asks, so which modules there are is not gone through each time. It is again after a
forward or backward has begun, and once a module has been registered anywhere: torch tells that, but not what is put
into a module's ``_modules`` directly. Another thread may register one meanwhile, of any model.
"""

import inspect
import sys
import weakref
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

from hetero.stm.interception.arguments import any_on
from hetero.stm.living import Living

__all__ = [
    "called_part",
    "computes_on",
    "forget_model",
    "is_part_of",
    "look_again",
    "managed_modules",
    "note_model",
]

_CALL: CodeType = nn.Module._call_impl.__code__

_models = Living[nn.Module]()


class _Known:
    """Their modules, by id, once somebody has asked. [Note: known modules]"""

    modules: "dict[int, weakref.ref[nn.Module]] | None" = None


_known = _Known()


def note_model(model: nn.Module) -> None:
    """``model`` is managed from now on."""
    _models.add(model)
    look_again()


def forget_model(model: nn.Module) -> None:
    """It is not any more."""
    _models.discard(model)
    look_again()


def look_again() -> None:
    """Models may be made of other modules than before."""
    global _known
    _known = _Known()  # whoever is going through them does so for the one before


def managed_modules() -> frozenset[int]:
    """Ids of all modules of all managed models."""
    return frozenset(id(part) for model in _models for part in _modules(model))


def called_part(device: torch.device) -> nn.Module | None:
    """The outermost module of a managed model that is being called on this thread, with a tensor on ``device``."""
    found = None
    for module, args, kwargs in _calls():
        if any_on(device, args, kwargs):
            found = module
    return found


def computes_on(device: torch.device) -> bool:
    """A module of a managed model, or a method of one, is being called on this thread, with a tensor on ``device``, or
    a module that has a buffer there: a parametrization is called with a parameter alone. Of methods it is the
    innermost, and those that called it as long as they are methods of managed models: where one is an optimizer's or a
    logger's, it is not the model that computes."""
    for module, args, kwargs in _calls():
        if any_on(device, args, kwargs) or any_on(device, tuple(module._buffers.values()), {}):
            return True
    return _runs_method(device)


def _calls() -> Iterator[tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]:
    """Of modules of managed models, on this thread, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _CALL:
            called = frame.f_locals
            if _is_part(called["self"]):
                yield called["self"], called["args"], called["kwargs"]
        frame = frame.f_back


def _runs_method(device: torch.device) -> bool:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_argcount and code.co_varnames[0] == "self":
            given = frame.f_locals
            itself = given.get("self")
            if not isinstance(itself, torch.Tensor):
                is_ours = isinstance(itself, nn.Module) and _is_part(itself)
                found = is_ours and any_on(device, ([given.get(name) for name in _parameters(code)],), {})
                if (
                    type(given) is dict
                ):  # a frame keeps it, and with it what its variables had before (Python < 3.13)
                    given.clear()
                if found or not is_ours:
                    return found
        frame = frame.f_back
    return False


def _parameters(code: CodeType) -> tuple[str, ...]:
    """Names of what a function is given, ``*args`` and ``**kwargs`` among them."""
    rest = bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + rest]


def is_part_of(model: nn.Module, module: nn.Module) -> bool:
    """``module`` is ``model``, or one that it is made of now."""
    return any(part is module for part in _modules(model))


def _is_part(module: nn.Module) -> bool:
    known = _known
    if known.modules is None:
        known.modules = {id(part): weakref.ref(part) for model in _models for part in _modules(model)}
    found = known.modules.get(id(module))
    return found is not None and found() is module


def _modules(model: nn.Module) -> Iterator[nn.Module]:
    """As `nn.Module.modules`, which raises if another thread registers one meanwhile."""
    waiting, seen = [model], {id(model)}
    while waiting:
        yield (module := waiting.pop())
        for child in list(module._modules.values()):
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                waiting.append(child)
