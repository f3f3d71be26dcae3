"""The functions of torch that are replaced while any model is managed.

Owns those replacements; they are taken back when the last manager closes. Each only looks at its arguments and
goes on to the original unless a managed parameter is involved. Those that every iteration calls are taken back as soon
as all managers rest (`hetero.stm.settled`).

* ``autograd.Function.apply`` (`hetero.stm.interception.customfunctions`).
* ``Module._apply`` (``model.to``, ``.half``, ``.cuda`` ...) would replace homes behind the manager's back
  (`hetero.stm.conversions`).
* ``autograd._engine_run_backward`` (`hetero.stm.interception.backwards`).
* What switches hooks on saved tensors off for ``torch.func.grad`` (`hetero.stm.activations.saved`).
* What wraps the operands of ``torch.func``'s transforms (`hetero.stm.interception.transforms`).
* ``torch.clear_autocast_cache``, which ``torch.autocast`` calls where its outermost region ends.
* ``zero_grad`` of optimizers and modules, and optimizers' ``load_state_dict`` and ``add_param_group``
  (`hetero.stm.optimizercalls`).
* Clipping (`hetero.stm.interception.clipping`).
* ``torch.inference_mode``'s end, where modes have come or gone within (`hetero.stm.running.staying`).
* Constructors of sparse tensors, which tell nobody of their values (`hetero.stm.interception.constructors`).
* Functions of torch that ATen computes otherwise while operators are guarded (`hetero.stm.interception.formulas`).
* ``torch._foreach_*_`` on plain tensors within a forward (`hetero.stm.interception.lists`).
* ``Tensor.cpu``, ``to``, ``cuda`` and ``xpu``, which copy what is on a device (`hetero.stm.tensors.hostcopies`).
* ``torch.compiler``'s session: while one thread compiles, ``torch.compiler.is_compiling()`` answers True to all, and
  optimizers compute otherwise then. What is queued is done before.
* ``Module.compile`` replaces a call that may be wrapped, and ``torch.compile`` loads the compiler, which is to be kept
  out of what is ours (`hetero.stm.interception.compiled`).
* ``nn.Parameter(p)`` of a managed ``p``: an ordinary one over the same memory, as unmanaged.
* ``Module.load_state_dict``, where it would put other tensors in the place of parameters (`hetero.stm.checkpoints`).
* ``GradScaler``, whose numbers would be read at home before they have arrived (`hetero.stm.interception.scaling`).
* The process's handler of SIGINT (`hetero.stm.interception.interrupts`).
* What ``torch.utils.checkpoint`` saves its arguments with: torch compares their versions around our hook, which would
  wait for a parameter's update in between.

Only for the time of a call, `hetero.stm.interception.fastpaths` replaces ``torch.overrides.has_torch_function``.
Beside them, torch's own hooks around every optimizer's step, and for every submodule that is set
(`hetero.stm.wrappers`).
"""

import contextlib
import functools
import threading
from collections.abc import Mapping
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from hetero.stm import conversions, optimizercalls
from hetero.stm.activations import saved
from hetero.stm.checkpoints import check_loads_in_place
from hetero.stm.deferred import finish_everything
from hetero.stm.interception import (
    backwards,
    clipping,
    constructors,
    customfunctions,
    formulas,
    interrupts,
    lists,
    scaling,
    transforms,
)
from hetero.stm.interception.backwards import listeners
from hetero.stm.interception.casts import begin_region
from hetero.stm.interception.compiled import compile_apart, compile_module, note_registered
from hetero.stm.interception.operators import substituted
from hetero.stm.interception.parameter import is_managed, managed_of
from hetero.stm.interception.scopes import in_scope
from hetero.stm.optimizercalls import before_step, note_step
from hetero.stm.running import staying
from hetero.stm.running.segments import Segments
from hetero.stm.tensors import hostcopies
from hetero.stm.tensors.fetch import plain
from hetero.stm.wrappers import check_wrapped

__all__ = ["install", "remove", "rest", "wake"]

# Any: these are not meant to be assigned to, says their typing.
_Module: Any = nn.Module
_compiler: Any = torch.compiler
_compile_session: Any = getattr(_compiler, "_compile_session_context", None)  # not in every version
_Parameter: Any = nn.Parameter
_new_parameter = _Parameter.__new__
_module_compile = _Module.compile
_module_load_state_dict = _Module.load_state_dict
_clear_autocast_cache = torch.clear_autocast_cache
_checkpoint: Any = torch.utils.checkpoint
_make_saved_tensor: Any = getattr(_checkpoint, "_make_saved_tensor", None)  # not in every version


_lock = threading.RLock()  # of what follows: managers come, rest and wake on whatever thread
_managers = 0
_step_hooks: list[RemovableHandle] = []
_registration_hooks: list[RemovableHandle] = []
# What stood in the places that are taken over now; `_INHERITED`: nothing of their own.
_replaced: list[tuple[Any, str, Any]] = []
_replaced_always: list[tuple[Any, str, Any]] = []
_INHERITED = object()


def install(listener: Segments) -> None:
    """One more manager is active."""
    global _managers
    with _lock:
        interrupts.install()  # first: they are put off from now on
        if not _managers:
            _replace(_REPLACED_ALWAYS, _replaced_always)
            _registration_hooks.append(register_module_module_registration_hook(_before_registered))
        wake(listener)
        _managers += 1


def remove(listener: Segments) -> None:
    """One manager fewer."""
    global _managers
    with _lock:
        _managers -= 1
        rest(listener)
        if not _managers:
            _put_back(_replaced_always)
            _registration_hooks.pop().remove()
        interrupts.remove()  # last: from now on they come at once


def wake(listener: Segments) -> None:
    """A manager intercepts operators."""
    with _lock:
        if not listeners:
            _replace(_REPLACEMENTS, _replaced)
            clipping.install()
            _step_hooks.append(register_optimizer_step_pre_hook(before_step))
            _step_hooks.append(register_optimizer_step_post_hook(note_step))
        listeners.append(listener)


def rest(listener: Segments) -> None:
    """It does not any more, for the time being or for good."""
    with _lock:
        if listener not in listeners:
            return
        listeners.remove(listener)
        if not listeners:
            _put_back(_replaced)
            clipping.remove()
            while _step_hooks:
                _step_hooks.pop().remove()


def _replace(replacements: list[tuple[Any, str, Any]], replaced: list[tuple[Any, str, Any]]) -> None:
    for place, name, replacement in replacements:
        replaced.append((place, name, vars(place).get(name, _INHERITED)))
        setattr(place, name, replacement)


def _put_back(replaced: list[tuple[Any, str, Any]]) -> None:
    while replaced:
        place, name, own = replaced.pop()
        if own is _INHERITED:
            delattr(place, name)
        else:
            setattr(place, name, own)


def _before_registered(parent: nn.Module, name: str, submodule: nn.Module | None) -> None:
    check_wrapped(parent, submodule)
    note_registered(parent, name, submodule)


def _announced_clear() -> None:
    begin_region()
    _clear_autocast_cache()


@contextlib.contextmanager
def _updated_session(*args: Any, **kwargs: Any) -> Any:
    finish_everything()
    with _compile_session(*args, **kwargs) as session:
        yield session


def _save_argument(argument: torch.Tensor, is_output: bool) -> Any:
    if is_managed(argument):
        tensor = managed_of(argument)
        if in_scope():
            with plain(), substituted([tensor], "checkpoint"), torch._C._EnableTorchFunction():
                return _make_saved_tensor(argument, is_output=is_output)
        tensor.owner.home_access.wait(tensor)
    return _make_saved_tensor(argument, is_output=is_output)


@functools.wraps(_new_parameter)
def _new(cls: type[nn.Parameter], data: Any = None, requires_grad: bool = True) -> Any:
    # torch would ask `ManagedParameter.detach` for another of that class.
    return _new_parameter(cls, data.detach() if is_managed(data) else data, requires_grad)


@functools.wraps(_module_load_state_dict)
def _load_in_place(
    self: nn.Module, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
) -> Any:
    if assign or torch.__future__.get_swap_module_params_on_conversion():
        check_loads_in_place(self, assign=assign)
    return _module_load_state_dict(self, state_dict, strict, assign)


@functools.wraps(_module_compile)
def _compile(self: nn.Module, *args: Any, **kwargs: Any) -> None:
    compile_module(self, lambda: _module_compile(self, *args, **kwargs))


_REPLACEMENTS: list[tuple[Any, str, Any]] = [
    *customfunctions.REPLACEMENTS,
    *saved.REPLACEMENTS,
    *backwards.REPLACEMENTS,
    *optimizercalls.REPLACEMENTS,
    (torch, "clear_autocast_cache", _announced_clear),
    *constructors.REPLACEMENTS,
    *formulas.REPLACEMENTS,
    *staying.REPLACEMENTS,
    *hostcopies.REPLACEMENTS,
    *scaling.REPLACEMENTS,
    *lists.REPLACEMENTS,
    *transforms.REPLACEMENTS,
]
if _compile_session is not None:
    _REPLACEMENTS.append((_compiler, "_compile_session_context", _updated_session))
if _make_saved_tensor is not None:
    _REPLACEMENTS.append((_checkpoint, "_make_saved_tensor", _save_argument))
_REPLACED_ALWAYS: list[tuple[Any, str, Any]] = [
    (_Parameter, "__new__", staticmethod(_new)),
    *conversions.REPLACEMENTS,
    (torch, "compile", compile_apart),
    (_Module, "compile", _compile),
    (_Module, "load_state_dict", _load_in_place),
    *optimizercalls.REPLACED_ALWAYS,
]
