"""The functions of torch that are replaced while any model is managed.

Owns those replacements; they are taken back when the last manager closes. Each only looks at its arguments and
goes on to the original unless a managed parameter is involved. Those that every iteration calls are taken back as soon
as all managers rest (`hetero.stm.settled`).

* ``autograd.Function.apply`` does not dispatch through ``__torch_function__``: a custom Function would receive the
  parameter itself, at home, and its backward would return a gradient on the wrong device.
* ``Module._apply`` (``model.to``, ``.half``, ``.cuda`` ...) would replace homes behind the manager's back
  (`hetero.stm.conversions`).
* ``autograd._engine_run_backward``, through which ``backward`` and ``grad`` go: nothing else tells when a backward
  begins, ends, or fails.
* ``torch.clear_autocast_cache``, which ``torch.autocast`` calls where its outermost region ends.
* ``zero_grad`` of optimizers and modules looks whether there is a gradient, which would wait for it.
* Clipping (`hetero.stm.interception.clipping`).
* ``torch.inference_mode``'s end, where modes have come or gone within (`hetero.stm.running.staying`).
* Constructors of sparse tensors, which tell nobody of their values (`hetero.stm.interception.constructors`).
* Functions of torch that ATen computes otherwise while operators are guarded (`hetero.stm.interception.formulas`).
* ``Tensor.cpu`` and ``Tensor.to``, which copy what is on a device (`hetero.stm.tensors.hostcopies`).
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
* ``Optimizer.load_state_dict`` and ``add_param_group``: what a step has left to be done is done before.

Only for the time of a call, `hetero.stm.interception.fastpaths` replaces ``torch.overrides.has_torch_function``.
Beside them, torch's own hooks around every optimizer's step, and for every submodule that is set
(`hetero.stm.wrappers`).
"""

import contextlib
import functools
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from hetero.autograd import in_backward
from hetero.errors import DeviceError
from hetero.stm import conversions
from hetero.stm.activations.saved import part_saved_as_handles
from hetero.stm.checkpoints import check_loads_in_place
from hetero.stm.deferred import finish_everything
from hetero.stm.interception import clipping, constructors, formulas, interrupts, lists, scaling
from hetero.stm.interception.casts import begin_region
from hetero.stm.interception.compiled import compile_apart, compile_module, note_registered
from hetero.stm.interception.onethread import await_device_thread, run_on_device_thread
from hetero.stm.interception.operands import collect, replace_one
from hetero.stm.interception.operators import ahead_of_home, outside, substituted, write_back
from hetero.stm.interception.outside import full_copies, keeps_its_type
from hetero.stm.interception.parameter import is_managed, managed_in, managed_of
from hetero.stm.interception.parts import look_again
from hetero.stm.interception.scopes import in_scope
from hetero.stm.interception.transforms import is_transforming
from hetero.stm.running import guard, staying
from hetero.stm.running.segments import Segments
from hetero.stm.settled.who import before_change, note_optimizer
from hetero.stm.tensors import hostcopies
from hetero.stm.tensors.fetch import plain
from hetero.stm.tensors.managed import ManagedTensor
from hetero.stm.tensors.owner import Owner
from hetero.stm.wrappers import check_wrapped

__all__ = ["install", "remove", "rest", "wake"]

# Any: these are not meant to be assigned to, says their typing. Until torch 2.14 ``Function.apply`` is Python that goes
# on to its base's; since 2.15 it is that of the base itself.
_Function: Any = (
    torch.autograd.function._SingleLevelFunction
    if isinstance(torch.autograd.Function.__dict__["apply"], classmethod)
    else torch.autograd.Function
)
_Module: Any = nn.Module
_autograd: Any = torch.autograd
_Optimizer: Any = torch.optim.Optimizer
_compiler: Any = torch.compiler
_compile_session: Any = getattr(_compiler, "_compile_session_context", None)  # not in every version
_Parameter: Any = nn.Parameter
_new_parameter = _Parameter.__new__
_module_compile = _Module.compile
_module_zero_grad = _Module.zero_grad
_module_load_state_dict = _Module.load_state_dict
_optimizer_zero_grad = _Optimizer.zero_grad
_load_state_dict = _Optimizer.load_state_dict
_add_param_group = _Optimizer.add_param_group
_run_backward = _autograd._engine_run_backward
_clear_autocast_cache = torch.clear_autocast_cache
_checkpoint: Any = torch.utils.checkpoint
_make_saved_tensor: Any = getattr(_checkpoint, "_make_saved_tensor", None)  # not in every version


_lock = threading.RLock()  # of what follows: managers come, rest and wake on whatever thread
_managers = 0
_listeners: list[Segments] = []  # of those managers that do not rest
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
        if not _listeners:
            _replace(_REPLACEMENTS, _replaced)
            clipping.install()
            _step_hooks.append(register_optimizer_step_pre_hook(_before_step))
            _step_hooks.append(register_optimizer_step_post_hook(_note_step))
        _listeners.append(listener)


def rest(listener: Segments) -> None:
    """It does not any more, for the time being or for good."""
    with _lock:
        if listener not in _listeners:
            return
        _listeners.remove(listener)
        if not _listeners:
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


def _announced_backward(outputs: Any, *args: Any, **kwargs: Any) -> Any:
    # One of a transform's reaches nothing of ours, and nothing of ours can be copied within it.
    if is_transforming():
        return _run(outputs, args, kwargs)
    captures = not kwargs.get("accumulate_grad", True)
    listeners = tuple(_listeners)  # Python's collector may let go of one in between
    # A backward within a backward: a reentrant checkpoint, an adjoint.
    if in_backward():
        _note_nested(listeners)
        with contextlib.ExitStack() as stack:
            for listener in listeners:
                stack.enter_context(listener.backward_within())
                if captures:
                    stack.enter_context(listener.capture_within())
            return _run(outputs, args, kwargs)
    keeps_graph = _keeps_graph(*args, **kwargs)
    look_again()
    with contextlib.ExitStack() as stack:
        for listener in listeners:  # before the first of them looks at what there is on the device
            listener.prepare_backward()
        for listener in listeners:
            stack.enter_context(
                listener.backward(captures=captures, keeps_graph=keeps_graph, inputs=_inputs(*args, **kwargs))
            )
        try:
            for listener in listeners:
                # One that is recorded numbers nodes at home as well, by whatever thread they run on.
                records = _is_recorded(*args, **kwargs) and _begins_on(listener.device, outputs)
                if records or listener.need_one_thread:
                    with _late_device_explained():
                        return run_on_device_thread(listener.device, lambda: _run(outputs, args, kwargs))
            return _run(outputs, args, kwargs)
        except BaseException:
            for device in {listener.device for listener in listeners}:
                await_device_thread(device)
            raise


def _note_nested(listeners: Iterable[Segments]) -> None:
    for listener in listeners:
        listener.nest = True


def _run(outputs: Any, args: Any, kwargs: Any) -> Any:
    # autograd.grad with respect to managed parameters comes here with interception off, and its threads inherit that;
    # but what runs within backward (a checkpoint's recompute, a Function of the user's) needs it.
    # What a backward saves that is recorded itself leaves as what a forward saves does.
    saving = part_saved_as_handles() if _is_recorded(*args, **kwargs) else contextlib.nullcontext()
    with torch._C._EnableTorchFunction(), guard.formulas_kept(outputs), saving, _late_device_explained():
        return _run_backward(outputs, *args, **kwargs)


@contextlib.contextmanager
def _late_device_explained() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if _NO_THREAD in str(error):
            raise DeviceError(
                "autograd has no thread for this device, because it came after the process's first backward: make "
                "it (hetero.virtual_device()) before anything is trained, in a fresh process"
            ) from error
        raise


def _begins_on(device: torch.device, outputs: Iterable[Any]) -> bool:
    """A backward from ``outputs`` (tensors or gradient edges) does."""
    return any(
        output.device == device
        if isinstance(output, torch.Tensor)
        else output.node._input_metadata[output.output_nr].device == device
        for output in outputs
    )


def _keeps_graph(gradients: Any = None, keep_graph: Any = False, *args: Any, **kwargs: Any) -> bool:
    return bool(keep_graph)


def _is_recorded(
    gradients: Any = None, keep_graph: Any = None, create_graph: Any = False, *args: Any, **kwargs: Any
) -> bool:
    return bool(create_graph)


def _inputs(
    gradients: Any = None,
    keep_graph: Any = None,
    create_graph: Any = None,
    inputs: Sequence[Any] = (),
    *args: Any,
    **kwargs: Any,
) -> Sequence[Any]:
    return inputs


_NO_THREAD = "device_ready_queues_"  # of an assertion within torch's engine, which says no more


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
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
            tensor.owner.homes.wait(tensor)


@contextlib.contextmanager
def _updated_session(*args: Any, **kwargs: Any) -> Any:
    finish_everything()
    with _compile_session(*args, **kwargs) as session:
        yield session


def _after_updates(method: Any) -> Any:
    @functools.wraps(method)
    def updated(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        before_change(self)
        _wait_for_updates(self)
        try:
            return method(self, *args, **kwargs)
        finally:
            note_optimizer(self)

    return updated


def _save_argument(argument: torch.Tensor, is_output: bool) -> Any:
    if is_managed(argument):
        tensor = managed_of(argument)
        if in_scope():
            with plain(), substituted([tensor], "checkpoint"), torch._C._EnableTorchFunction():
                return _make_saved_tensor(argument, is_output=is_output)
        tensor.owner.homes.wait(tensor)
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


@functools.wraps(_module_zero_grad)
def _zero_module_grad(self: nn.Module, set_to_none: bool = True) -> None:
    if set_to_none:
        _drop_gradients(self.parameters())
    _module_zero_grad(self, set_to_none)


@functools.wraps(_optimizer_zero_grad)
def _zero_optimizer_grad(self: torch.optim.Optimizer, set_to_none: bool = True) -> None:
    if set_to_none:
        _drop_gradients(parameter for group in self.param_groups for parameter in group["params"])
    _optimizer_zero_grad(self, set_to_none)


def _drop_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Those of managed parameters; the rest is left to the original."""
    for parameter in parameters:
        if is_managed(parameter):
            managed_of(parameter).owner.grads.drop(managed_of(parameter))


def _note_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
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
                tensor.owner.homes.after_write(tensor)
    for owner in _owners(optimizer):
        owner.steps.end_kept(optimizer)


def _apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    original = super(_Function, cls).apply
    if cls is _checkpoint.CheckpointFunction:  # known before its first backward
        _note_nested(tuple(_listeners))
    operands: list[ManagedTensor] = []
    collect(args, operands)
    # Outside a scope a Function of the user's may well be about home (a regulariser, say): device tensors decide.
    if not operands or not (in_scope() or _has_device_operand(operands[0].owner.device, args)):
        for tensor in operands:
            if torch.is_grad_enabled():
                tensor.paths.note_home_graph(None)
            tensor.owner.homes.wait(tensor)
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


_REPLACEMENTS: list[tuple[Any, str, Any]] = [
    (_Function, "apply", classmethod(_apply)),
    (_Module, "zero_grad", _zero_module_grad),
    (_autograd, "_engine_run_backward", _announced_backward),
    (torch, "clear_autocast_cache", _announced_clear),
    (_Optimizer, "zero_grad", _zero_optimizer_grad),
    *constructors.REPLACEMENTS,
    *formulas.REPLACEMENTS,
    *staying.REPLACEMENTS,
    *hostcopies.REPLACEMENTS,
    *scaling.REPLACEMENTS,
    *lists.REPLACEMENTS,
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
    (_Optimizer, "load_state_dict", _after_updates(_load_state_dict)),
    (_Optimizer, "add_param_group", _after_updates(_add_param_group)),
]
