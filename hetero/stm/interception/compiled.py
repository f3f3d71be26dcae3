"""Compiled submodules: operators whose operands are all of a submodule's parameters.

Owns the wrapping of `torch.compile`d submodules inside a managed model, and puts the calls of
`hetero.stm.interception.fastpaths` in place. Nothing can be intercepted inside a compiled region, so the call as a
whole is the operator: device copies of every parameter below the submodule take their places in
``module._parameters`` while it runs, and the parameters return when it ends, however it ends.
Invariant: outside of such a call ``_parameters`` holds the user's own parameters.

What is compiled while the model is managed (``block.compile()``, ``model[0] = torch.compile(...)``) is wrapped as
well, at once or before the next forward: `compile_module` and `note_registered` tell.

Compile per block: all of a region's parameters are on the device at once, in forward and in backward.

A compiled function or method that is no module's call meets managed parameters as it is traced. What is ours is no part
of what a compiler makes (`keep_compilers_out`): it leaves out the operators that parameters come to, which are
intercepted as anywhere else.
"""

import contextlib
import copy
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hetero.autograd import in_backward
from hetero.errors import BudgetError, ManageError
from hetero.stm.interception.arguments import any_on
from hetero.stm.interception.fastpaths import HAVE_FAST_PATHS, asked_as_ever, taking_fast_paths
from hetero.stm.interception.formulas import INSTEAD
from hetero.stm.interception.misplaced import note_misplaced
from hetero.stm.interception.operators import substituted
from hetero.stm.interception.outside import full_copies, keeps_its_type
from hetero.stm.interception.parameter import ManagedParameter, managed_of, managed_places
from hetero.stm.interception.parts import is_part_of, look_again
from hetero.stm.interception.scopes import in_scope
from hetero.stm.living import Living
from hetero.stm.running.guard import unguarded
from hetero.stm.tensors.fetch import plain
from hetero.stm.tensors.managed import ManagedTensor

__all__ = [
    "SLOT",
    "CompiledCalls",
    "SlotCall",
    "check_called_eagerly",
    "check_stepped_eagerly",
    "compile_apart",
    "compile_module",
    "is_compiling",
    "is_entry",
    "note_registered",
    "run_eagerly",
    "set_slot",
]

# Not torch._dynamo, which takes longer to load than everything else of hetero.
_FRAMES: Any = torch._C._dynamo.eval_frame

SLOT = "_compiled_call_impl"  # torch's own slot for a replaced call, which modules neither copy nor pickle


# Those that are attached: torch tells which module is compiled, not whose model it belongs to.
_ATTACHED: "Living[CompiledCalls]" = Living()

_WHOLE_REGION = (
    "hetero: a compiled region has all its parameters on the device at once, and nothing in it can be tried again when "
    "others have left: compile blocks of it instead"
)

_NO_PART = (
    "hetero: operators on managed parameters are no part of a compiled function that is no module's call"
)
_COMPILE_MODULE = "compile the module that has the parameters: block.compile()"
# By the names of Dynamo's errors, which takes long to load: what compiles whole functions, and nothing less.
_STRICT = {
    "Unsupported": f"{_NO_PART}. Leave out fullgraph=True there, or {_COMPILE_MODULE}",
    "UncapturedHigherOrderOpError": (
        f"{_NO_PART}, and torch compiles the functions that torch.cond, while_loop, scan and their like are given: "
        f"{_COMPILE_MODULE}"
    ),
}

_compile = torch.compile

_PACKAGE = Path(__file__).parents[2]


class SlotCall(functools.partial[Any]):
    """What we put into a module's slot, where ``own`` was. Modules that `torch.nn.utils.parametrize` has changed are
    copied with all they have: a copy gets ``own``, because ours would compute with the original's parameters.
    ``is_compiled``: around a compiled module's call; others do not make theirs a compiled one. ``is_entry``: where the
    model, or a part of it, is entered (`hetero.stm.modelcalls`)."""

    own: Callable[..., Any] | None
    is_compiled: bool
    is_entry: bool

    def __new__(
        cls,
        call: Callable[..., Any],
        own: Callable[..., Any] | None,
        *,
        is_compiled: bool = False,
        is_entry: bool = False,
    ) -> "SlotCall":
        slot_call = super().__new__(cls, call)
        slot_call.own, slot_call.is_compiled, slot_call.is_entry = own, is_compiled, is_entry
        return slot_call

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any] | None:
        return copy.deepcopy(self.own, memo)


def compile_module(module: nn.Module, compile: Callable[[], None]) -> None:
    """``compile`` is ``module``'s own ``compile()``, which replaces its call: ours is put around it again."""
    with contextlib.ExitStack() as stack:
        for calls in _ATTACHED:
            if calls.covers(module):
                stack.enter_context(calls.changing())
        compile()


def note_registered(parent: nn.Module, name: str, submodule: nn.Module | None) -> None:
    """``submodule`` is about to become one of ``parent``'s: torch's hook for that."""
    look_again()
    if submodule is not None and _is_compiled(submodule):
        for calls in _ATTACHED:
            if calls.covers(parent):
                calls.note_compiled(submodule)


def _keep_apart(*calls: Any) -> None:
    """A compiler makes them no part of their callers: what ``torch.compiler.disable(recursive=False)`` does, without
    loading it."""
    for call in calls:
        call._torchdynamo_disable = True


def run_eagerly(function: Callable[..., Any]) -> Callable[..., Any]:
    """A compiler that is on leaves ``function`` itself alone, wherever it is called; not what it calls."""
    action: Any = _FRAMES._FrameAction
    _FRAMES.set_code_exec_strategy(function.__code__, _FRAMES._FrameExecStrategy(action.SKIP, action.DEFAULT))
    _keep_apart(function)
    return function


def keep_compilers_out() -> None:
    """None traces what is ours, nor looks into managed parameters, from now on. There is nothing to do before the
    compiler is loaded, which ``torch.compile`` does."""
    # As in `_is_optimized`: not imported for this, and perhaps not loaded in full.
    found: Any = sys.modules.get
    rules, config = found("torch._dynamo.trace_rules"), found("torch._dynamo.config")
    if not (hasattr(rules, "add") and hasattr(config, "nontraceable_tensor_subclasses")):
        return
    if ManagedParameter not in config.nontraceable_tensor_subclasses:
        config.nontraceable_tensor_subclasses.add(ManagedParameter)
        rules.add(_PACKAGE.name)
        # In graphs they stand for the functions that they replace, as which they are traced.
        allow: Any = found("torch._dynamo.decorators").allow_in_graph
        allow(list(INSTEAD.values()))


@functools.wraps(_compile)
def compile_apart(*args: Any, **kwargs: Any) -> Any:
    """``torch.compile``, which may have loaded the compiler."""
    compiled = _compile(*args, **kwargs)
    keep_compilers_out()
    return compiled


def is_entry(call: Callable[..., Any] | None) -> bool:
    """`SlotCall.is_entry` of what is in a module's slot."""
    return isinstance(call, SlotCall) and call.is_entry


def set_slot(module: nn.Module, call: Callable[..., Any] | None) -> None:
    """``call`` is what calling ``module`` does; None: what its class does. Past the ``__setattr__`` of OptimizedModule,
    which would set it on the original."""
    if call is None:
        module.__dict__.pop(SLOT, None)
    else:
        module.__dict__[SLOT] = call


@run_eagerly
def is_compiling() -> bool:
    """Within a function that is compiled as a whole."""
    return _FRAMES.get_eval_frame_callback() not in (None, False)


@run_eagerly
def check_called_eagerly(module: nn.Module, name: str) -> None:
    """The managed model, or a part of it, is called with parameters of ours: raises `ManageError` within a function
    that is compiled as a whole."""
    if is_compiling() and managed_places(module):
        raise ManageError(
            f"{name} is called within a function that was compiled with it (torch.compile({name}) after "
            f"hetero.manage?): a compiled region would want all its parameters at once. Call {name}.compile() or "
            "block.compile() instead, or pass the compiled model to hetero.manage"
        )


@run_eagerly
def check_stepped_eagerly(is_managed: Callable[[], bool]) -> None:
    """An optimizer is about to step: raises `ManageError` if it ``is_managed``, within a function that is compiled as a
    whole."""
    if is_compiling() and is_managed():
        raise ManageError(
            "optimizer.step() is called within a function that was compiled with it: a compiled region would want all "
            "parameters, gradients and states at once. Call it outside of what torch.compile compiles"
        )


def _refuse_late_compile(name: str) -> ManageError:
    """The error for a forward that was compiled, as a function, while it was managed."""
    return ManageError(
        f"the forward of {name} was replaced by a compiled function while managed, which cannot be noticed in time: "
        f"call {name}.compile() instead, or compile before hetero.manage"
    )


class CompiledCalls:
    """The wrapped calls of one model's submodules: of compiled ones, and of those that have fast paths. `attach` once,
    `detach` once.

    ``release`` and ``wrap``, set by the manager, take its wrapper off the model's call and put it on again.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.release: Callable[[], None] = lambda: None
        self.wrap: Callable[[], None] = lambda: None
        self.is_outdated = False
        self._wrapped: list[tuple[nn.Module, SlotCall]] = []
        # Parameters are ordinary ones on the device (`hetero.stm.settled`).
        self._is_paused = False

    def attach(self) -> None:
        """Wrap every outermost compiled submodule (the model itself included), and those with fast paths."""
        keep_compilers_out()
        self.is_outdated = False
        _ATTACHED.add(self)
        # One that is there under several names is wrapped once.
        for submodule, name in dict(_to_be_wrapped(self._model, "")).items():
            own = submodule.__dict__.get(SLOT)
            inner = own or submodule._call_impl
            is_compiled = _is_compiled(submodule)
            if is_compiled:
                ours = _substituting(submodule, name, inner, is_paused=lambda: self._is_paused)
            else:
                ours = taking_fast_paths(submodule, inner, is_paused=lambda: self._is_paused)
            call = SlotCall(ours, own, is_compiled=is_compiled)
            _keep_apart(ours, call)
            set_slot(submodule, call)
            self._wrapped.append((submodule, call))

    def own_call(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The user's own, if ``call`` is one of ours."""
        for submodule, ours in self._wrapped:
            if ours is call:
                return ours.own or submodule._call_impl
        return call

    @contextlib.contextmanager
    def explaining(
        self, device: torch.device, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Iterator[None]:
        """Around a forward on ``device`` with these arguments: a compiler's error that is due to a call we did not wrap
        says so (raises `ManageError`), and one about devices names what lies on the host."""
        try:
            yield
        except Exception as error:
            if isinstance(error, RuntimeError):
                note_misplaced(error, self._model, device, args, kwargs)
            if type(error).__module__.startswith("torch._dynamo"):
                known = [self._model, *(submodule for submodule, _ in self._wrapped)]
                for name, submodule in self._model.named_modules():
                    if _is_compiled(submodule) and submodule not in known:
                        raise _refuse_late_compile(name) from error
                if str(_PACKAGE) in str(error) and type(error).__name__ in _STRICT:
                    error.add_note(_STRICT[type(error).__name__])
            raise

    def covers(self, module: nn.Module) -> bool:
        """`is_part_of` its model."""
        return is_part_of(self._model, module)

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Within it all calls are the user's own; afterwards those that are compiled then are wrapped."""
        is_paused = self._is_paused
        self.release()
        self.detach()
        try:
            yield
        finally:
            self._is_paused = False
            self.attach()
            self.wrap()
            if is_paused:
                self.pause()

    def follow(self) -> None:
        """Wrap what has been compiled since."""
        with self.changing():
            pass

    def note_compiled(self, submodule: nn.Module) -> None:
        """``submodule`` is about to be one that the model is made of: `follow` at the next forward, which may be its
        own."""
        self.is_outdated = True
        own = submodule.__dict__.get(SLOT)

        def following(*args: Any, **kwargs: Any) -> Any:
            self.follow()  # which takes this away
            return submodule(*args, **kwargs)

        if not any(wrapped is submodule for wrapped, _ in self._wrapped):
            call = SlotCall(run_eagerly(following), own)
            self._wrapped.append((submodule, call))
            if not self._is_paused:
                set_slot(submodule, call)

    def pause(self) -> None:
        """Calls are the user's own until `resume`; one that somebody has wrapped since hands on."""
        self._is_paused = True
        for submodule, call in self._wrapped:
            if submodule.__dict__.get(SLOT) is call:
                set_slot(submodule, call.own)

    def resume(self) -> None:
        """They are ours again."""
        self._is_paused = False
        for submodule, call in self._wrapped:
            if submodule.__dict__.get(SLOT) is call.own:
                set_slot(submodule, call)

    def detach(self) -> None:
        """Give back the calls as they were, where nobody has replaced ours since."""
        _ATTACHED.discard(self)
        for submodule, call in self._wrapped:
            if submodule.__dict__.get(SLOT) is call:
                set_slot(submodule, call.own)
        self._wrapped.clear()


def _to_be_wrapped(module: nn.Module, name: str) -> Iterator[tuple[nn.Module, str]]:
    """The outermost compiled ones, and all that have fast paths, of which a part may take its own alone."""
    if _is_compiled(module):
        yield module, name
        return
    if isinstance(module, HAVE_FAST_PATHS):
        yield module, name
    for child_name, child in module.named_children():
        yield from _to_be_wrapped(child, f"{name}.{child_name}" if name else child_name)


def _is_compiled(module: nn.Module) -> bool:
    forward = getattr(module, "forward", None)  # its own, or its class's
    compiled_forward = hasattr(forward, "_torchdynamo_orig_callable")
    # ``torch.compiler.disable`` leaves the same mark.
    compiled_forward = compiled_forward and not getattr(forward, "_torchdynamo_disable", False)
    call = module.__dict__.get(SLOT)
    replaced = call is not None and (not isinstance(call, SlotCall) or call.is_compiled)
    return compiled_forward or replaced or _is_optimized(module)


def _is_optimized(module: nn.Module) -> bool:
    # Not imported for this: the compiler takes longer to load than everything else of hetero.
    # Another thread may be loading it just now, as the first optimizer of a process does.
    optimized = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", None)
    return optimized is not None and isinstance(module, optimized)


def _substituting(
    submodule: nn.Module,
    name: str,
    inner: Callable[..., Any],
    *,
    is_paused: Callable[[], bool],
) -> Callable[..., Any]:
    label = f"compiled {name or type(submodule).__name__}"

    @functools.wraps(inner)
    def call(*args: Any, **kwargs: Any) -> Any:
        if is_paused():
            return inner(*args, **kwargs)
        places = managed_places(submodule)
        if not places or not _on_device(places[0][2], args, kwargs):
            return inner(*args, **kwargs)
        operands: list[ManagedTensor] = []
        for _, _, parameter in places:
            tensor = managed_of(parameter)
            if tensor not in operands:
                operands.append(tensor)
        for tensor in operands:
            tensor.owner.uses.note_unguarded()
        # Modes would make the compiler run everything eagerly, which is not the same arithmetic.
        outside = not in_scope() and keeps_its_type(operands)
        with _noting(_WHOLE_REGION), asked_as_ever():
            given = full_copies(operands) if outside else substituted(operands, label)
            with plain(), given as copies, unguarded():
                try:
                    for module, key, parameter in places:
                        module._parameters[key] = copies[id(parameter)]  # type: ignore[assignment]
                    with torch._C._EnableTorchFunction():
                        return inner(*args, **kwargs)
                except torch.OutOfMemoryError as error:
                    if isinstance(error, BudgetError):
                        raise
                    raise operands[0].owner.relief.refused(label, error) from error
                finally:
                    for module, key, parameter in places:
                        module._parameters[key] = parameter

    return call


@contextlib.contextmanager
def _noting(note: str) -> Iterator[None]:
    """What raises `BudgetError` within it has this ``note``."""
    try:
        yield
    except BudgetError as error:
        error.add_note(note)
        raise


def _on_device(parameter: nn.Parameter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if in_scope() or in_backward():
        return True
    return any_on(managed_of(parameter).owner.device, args, kwargs)
