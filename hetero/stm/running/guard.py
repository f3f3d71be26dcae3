"""Out-of-memory errors, answered by making room.

Owns the retry. An iteration that follows no plan may need more than is left beside the copies that are resident;
the device's allocator is then capped at the budget (`Accelerator.cap`), so that an operator that would pass it
fails, and the guard evicts what no operator uses and runs that operator again. Operators allocate before they
write, so running one again after a failed allocation repeats nothing; for the few that do not, several times the room
of their operands is made before, and they run once. Which they are was found by failing each allocation of PyTorch's
operator database. Random numbers are another matter: CUDA's attention with dropout draws before it allocates, so an
operator that draws gets the same numbers when it is tried again.

It costs a few microseconds an operator: iterations that follow their plan run without it.

[Note: errors of libraries]
cuDNN tries engines until the memory that one wants can be had, and catches the allocator's error itself. Where all want
too much, it says that there is no engine for this computation, in an ordinary `RuntimeError`. That it was memory is
told by the allocator's count of its errors.

[Note: formulas]
ATen chooses the backward formula of a few operators by whether any dispatch mode is active, and another formula
gives other bits. For those nodes the guard steps aside, after making all the room there is. Which they are was
found by running PyTorch's operator database, and losses of mixed types, with and without a mode. Of forward
formulas there is one: cross entropy with label smoothing, divided by the sum of the weights of what is not ignored.
"""

import contextlib
import functools
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.hooks import RemovableHandle

from hetero.stm.running.byvalues import depends_on_values
from hetero.stm.tensors.fetch import plain

__all__ = [
    "REPLACEMENTS",
    "Relieve",
    "arm",
    "formulas_kept",
    "guarded",
    "leave",
    "lifted",
    "stay",
    "unguarded",
]

_CHOSEN_BY_MODE = frozenset(
    {
        "ProdBackward0",
        "ProdBackward1",
        "CumprodBackward0",
        "MaskedFillBackward1",
        # Only where types are mixed: in place, or not.
        "BinaryCrossEntropyBackward0",
        "BinaryCrossEntropyWithLogitsBackward0",
    }
)


_cross_entropy: Any = torch._C._nn.cross_entropy_loss
_MEAN = 1  # as ATen counts reductions

# In place: what they divide by, or, of a list, the casts of a later operand, is allocated when something is written.
_WRITE_EARLY = re.compile(r"aten\.(scatter_reduce_|index_reduce_|_foreach_\w+_)\.\w+")
_DRAWS = torch.Tag.nondeterministic_seeded
_THEIR_OWN = 4  # bytes for each byte of their operands: a count of float64, or casts to it, are twice as many


@functools.cache
def _writes_early(func: Any) -> bool:
    return _WRITE_EARLY.fullmatch(str(func)) is not None


@functools.cache
def _draws(func: Any) -> bool:
    return _DRAWS in func.tags


Relieve = Callable[..., int]
"""Frees device memory, and returns how many bytes: 0 if nothing is left that could be freed, or, given a number of
bytes, if as many are free."""

Explain = Callable[[str, RuntimeError], Exception]
"""What to raise for an operator of that name, and the allocator's error, when nothing is left to be freed."""

Numbers = Callable[[torch.Generator | None], Callable[[], object]]
"""Notes where the random numbers of the device, or of a generator, are; what it returns goes back there."""

Uncapped = Callable[[RuntimeError], contextlib.AbstractContextManager[bool]]
"""Within it the allocator is not capped, if it has refused what the budget allows; whether it was."""


class _Guard(TorchDispatchMode):
    """While it is active, every operator is tried again after ``relieve()`` freed memory."""

    def __init__(
        self,
        relieve: Relieve,
        note_answered: Callable[[], None],
        explain: Explain,
        uncapped: Uncapped,
        failures: Callable[[], int],
        note_values: Callable[[], None],
        numbers: Numbers,
    ) -> None:
        super().__init__()
        self._numbers = numbers
        self.note_values = note_values
        self._failures = failures
        self._seen_failures = 0
        self.explain = explain
        self._uncapped = uncapped
        self.relieve = relieve
        self._note_answered = note_answered
        self.is_armed = False
        self.is_over = False  # it may still be in place (`leave`), and does nothing
        # Of backwards that run within it, as long as it is not armed.
        self.roots: list[list[Any]] = []
        self.handles: list[RemovableHandle] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Else what is compiled would run eagerly, which is not the same arithmetic."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.is_over:
            return func(*args, **(kwargs or {}))
        # Below autograd a managed parameter is only memory at home: it must not be intercepted again.
        with plain(), contextlib.ExitStack() as stack:
            if depends_on_values(func, args):
                self.note_values()
            is_uncapped = is_sure = False
            copies: list[torch.Tensor] = []
            runs_once = _writes_early(func)
            draw_again = self._numbers((kwargs or {}).get("generator")) if _draws(func) else None
            if runs_once:
                ordinary = _ordinary_parameters((args, kwargs))
                given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
                own = sum(tensor.nbytes for tensor in given)
                while self.relieve(_THEIR_OWN * own):
                    pass
                args, kwargs = _on_device_still(ordinary, (args, kwargs), copies)
            while True:
                try:
                    result = func(*args, **(kwargs or {}))
                    if copies and func._schema.is_mutable:  # autograd counts a write to what it was given
                        torch.autograd.graph.increment_version(copies)
                    return result
                except RuntimeError as error:
                    if not self._is_shortage(error):
                        raise
                    # What was counted may be an earlier operator's, which did without: the second time it is not.
                    is_sure = is_sure or isinstance(error, torch.OutOfMemoryError)
                    if runs_once:
                        raise self.explain(str(func), error) from error
                    ordinary = _ordinary_parameters((args, kwargs))
                    if self.relieve() == 0 and is_sure:
                        if is_uncapped or not stack.enter_context(self._uncapped(error)):
                            raise self.explain(str(func), error) from error
                        is_uncapped = True
                    is_sure = True
                    self._note_answered()
                    if draw_again is not None:
                        draw_again()
                    args, kwargs = _on_device_still(ordinary, (args, kwargs), copies)

    def make_room(self) -> None:
        """All there is, for what cannot be tried again."""
        while self.relieve():
            pass

    def begin(self) -> None:
        """It is about to be put in place: errors from now on count."""
        self._seen_failures = self._failures()

    def end(self) -> None:
        """From now on it does nothing, and keeps nobody."""
        self.is_over = True
        self.relieve, self.explain = lambda unless_free=None: 0, lambda operator, error: error
        self._note_answered, self._failures = lambda: None, lambda: 0
        self._numbers = lambda generator: lambda: None

    def _is_shortage(self, error: RuntimeError) -> bool:
        """[Note: errors of libraries]"""
        before, self._seen_failures = self._seen_failures, self._failures()
        return isinstance(error, torch.OutOfMemoryError) or self._seen_failures > before


def _ordinary_parameters(given: Any) -> set[int]:
    """Ids of those in ``given`` that nobody intercepts."""
    return {id(value) for value in tree_leaves(given) if type(value) is nn.Parameter}


def _on_device_still(ordinary: set[int], given: Any, copies: list[torch.Tensor]) -> Any:
    """``given`` to an operator that is tried again. Those that were ``ordinary`` parameters of another model, which had
    settled and has made way for it, are at home now, and home is behind: the copies in their place, which are added to
    ``copies``."""

    def copy_of(parameter: nn.Parameter) -> Any:
        managed = getattr(parameter, "_hetero", None) if id(parameter) in ordinary else None
        if managed is None:
            return parameter
        copies.append(managed.data)
        return managed.data

    return tree_map_only(nn.Parameter, copy_of, given) if ordinary else given


class _Here(threading.local):
    guard: _Guard | None = None


_here = _Here()
_guards: list[_Guard] = []  # of all threads


@contextlib.contextmanager
def guarded(
    relieve: Relieve,
    *,
    at_once: bool,
    note_answered: Callable[[], None] = lambda: None,
    explain: Explain = lambda operator, error: error,
    uncapped: Uncapped = lambda error: contextlib.nullcontext(False),
    failures: Callable[[], int] = lambda: 0,
    note_values: Callable[[], None] = lambda: None,
    numbers: Numbers = lambda generator: lambda: None,
) -> Iterator[None]:
    """Within it, operators of this thread, and of a backward that begins here, are guarded: ``at_once``, or from
    `arm` on. ``note_answered``: called for each error after which an operator is tried again. ``explain``,
    ``uncapped``: see `Explain`, `Uncapped`. ``failures``: how many out-of-memory errors there have been.
    ``note_values``: called for each operator whose memory depends on values (`hetero.stm.running.byvalues`).
    ``numbers``: see `Numbers`."""
    guard = _Guard(relieve, note_answered, explain, uncapped, failures, note_values, numbers)
    outer, _here.guard = _here.guard, guard
    _guards.append(guard)
    if at_once:
        arm(relieve)
    try:
        yield
    finally:
        _here.guard = outer
        _guards.remove(guard)
        if guard.is_armed:
            _remove(guard)


def stay(
    relieve: Relieve,
    *,
    note_answered: Callable[[], None],
    explain: Explain,
    failures: Callable[[], int],
    numbers: Numbers,
) -> Callable[[], None]:
    """From now on operators of this thread are guarded, whoever calls them, until what is returned is called, on
    whatever thread; `leave` then takes it away. What is given is as in `guarded`."""
    leave()
    guard = _Guard(
        relieve,
        note_answered,
        explain,
        lambda error: contextlib.nullcontext(False),
        failures,
        lambda: None,
        numbers,
    )
    guard.begin()
    _push_below(guard)
    return guard.end


def leave() -> None:
    """Take guards that have stayed, and are over, from this thread: where the user has called us, because whoever
    leaves inference mode, or enters it, has torch restore that there were modes."""
    modes = _get_current_dispatch_mode_stack()
    if any(map(_is_over, modes)) and not torch.is_inference_mode_enabled():
        _push_all([mode for mode in _pop_all() if not _is_over(mode)])


def _is_over(mode: object) -> bool:
    return isinstance(mode, _Guard) and mode.is_over


@contextlib.contextmanager
def lifted(cap: Callable[[bool], None], lifts: bool) -> Iterator[bool]:
    """An `Uncapped`, of a ``cap`` that is on: whether it ``lifts`` is decided."""
    if lifts:
        cap(False)
    try:
        yield lifts
    finally:
        if lifts:
            cap(True)


def arm(relieve: Relieve) -> None:
    """What runs now on this thread needs guarding after all, by the guard that has ``relieve``.

    In a backward, which runs on threads of autograd's, it is every node that is still to come."""
    guard = _here.guard
    if guard is None:
        guard = next((guard for guard in reversed(_guards) if guard.relieve == relieve), None)
        if guard is not None and guard.roots and not guard.handles:
            _arm_nodes(guard, guard.roots[-1])
    elif not guard.is_armed:
        guard.is_armed = True
        guard.begin()
        _push_below(guard)


def _arm_nodes(guard: _Guard, roots: Sequence[Any]) -> None:
    guard.begin()

    def put_in_place(gradients: Any) -> None:
        _push_below(guard)  # for this node: autograd restores its threads' modes afterwards

    def step_aside(gradients: Any) -> None:
        guard.make_room()

    for node in _reachable(roots):
        name = node.name()
        # Those at home run on another thread, now perhaps, and take nothing of the device.
        if name != "torch::autograd::AccumulateGrad":
            hook = step_aside if name in _CHOSEN_BY_MODE else put_in_place
            guard.handles.append(node.register_prehook(hook))
    _push_below(guard)


def _push_below(guard: _Guard) -> None:
    # Below the modes of others that were entered since: they leave in their own order.
    others = _pop_all()
    if guard not in others:
        _push_mode(guard)
    _push_all(others)


@contextlib.contextmanager
def unguarded() -> Iterator[list[_Guard]]:
    """Within it, nothing is guarded on this thread; the guards that would. Dispatch modes of others stay."""
    if not any(isinstance(mode, _Guard) for mode in _get_current_dispatch_mode_stack()):
        yield []
        return
    modes, guards = _leave()
    try:
        yield guards
    finally:
        _pop_all()
        _push_all(modes)


def _leave() -> tuple[list[TorchDispatchMode], list[_Guard]]:
    """Guards are no modes of this thread any more; which modes those were, from the innermost, and which guards."""
    modes = _pop_all()
    _push_all([mode for mode in modes if not isinstance(mode, _Guard)])
    return modes, [mode for mode in modes if isinstance(mode, _Guard)]


@contextlib.contextmanager
def formulas_kept(outputs: Sequence[Any]) -> Iterator[None]:
    """Around a backward from ``outputs`` (tensors or gradient edges): [Note: formulas]; it may be armed while it
    runs."""
    handles: list[RemovableHandle] = []
    waiting = None
    roots = [output.grad_fn if isinstance(output, torch.Tensor) else output.node for output in outputs]
    if any(isinstance(mode, _Guard) for mode in _get_current_dispatch_mode_stack()):
        nodes = [node for node in _reachable(roots) if node.name() in _CHOSEN_BY_MODE]
        handles = [node.register_prehook(_step_aside) for node in nodes]
    elif _here.guard is not None:
        waiting = _here.guard
        waiting.roots.append(roots)
    try:
        yield
    finally:
        if waiting is not None:
            waiting.roots.pop()
            handles, waiting.handles = waiting.handles, []
        for handle in handles:
            handle.remove()


def _step_aside(gradients: Any) -> None:
    # Autograd restores its threads' modes after every node: this lasts for one.
    guards = _leave()[1]
    for guard in guards:
        guard.make_room()


@functools.wraps(_cross_entropy)
def _cross_entropy_unguarded(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: int = _MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Any:
    """[Note: formulas]"""
    given = (input, target, weight, reduction, ignore_index, label_smoothing)
    if weight is None or reduction != _MEAN or label_smoothing <= 0:
        return _cross_entropy(*given)
    with unguarded() as guards:
        for guard in guards:
            guard.make_room()
            guard.note_values()  # its memory depends on how many targets are not ignored
        try:
            return _cross_entropy(*given)
        except torch.OutOfMemoryError as error:
            if not guards:
                raise
            raise guards[0].explain(_cross_entropy.__name__, error) from error


# TorchScript knows torch's functions by their identity. Here, so that it has all the original ones by then.
torch.jit._builtins._register_builtin(_cross_entropy_unguarded, "aten::cross_entropy_loss")

REPLACEMENTS = [(torch._C._nn, "cross_entropy_loss", _cross_entropy_unguarded)]
"""Functions of torch, as (where, name, what is put there) (`hetero.stm.patches`)."""


def _reachable(roots: Sequence[Any]) -> Iterator[Any]:
    waiting = [root for root in roots if root is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)


def _remove(guard: _Guard) -> None:
    others = _pop_all()
    _push_all([mode for mode in others if mode is not guard])


def _pop_all() -> list[TorchDispatchMode]:
    """From the innermost on."""
    return [_pop_mode() for _ in range(torch._C._len_torch_dispatch_stack())]


def _push_all(modes: list[TorchDispatchMode]) -> None:
    for mode in reversed(modes):
        _push_mode(mode)
