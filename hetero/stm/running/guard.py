"""Out-of-memory errors, answered by making room.

Owns where operators are tried again (`hetero.stm.running.retry`). An iteration that follows no plan may need more than
is left beside the copies that are resident; the device's allocator is then capped at the budget (`Accelerator.cap`), so
that an operator that would pass it fails, and the guard evicts what no operator uses and runs that operator again.

It costs a few microseconds an operator: iterations that follow their plan run without it.

[Note: formulas]
ATen chooses the backward formula of a few operators by whether any dispatch mode is active, and another formula
gives other bits. For those nodes the guard steps aside, after making room for many times what they return. All there
is would be more than enough, but to leave for that has lasting effects: it counts as memory that has run short. What
one of them finds too little for ends the backward, and is explained there. Which they are was found by running
PyTorch's operator database, and losses of mixed types, with and without a mode; what they take, by measuring it.
Forward formulas: `hetero.stm.interception.formulas`.
"""

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from hetero.errors import BudgetError
from hetero.stm.running import modes
from hetero.stm.running.retry import Relieve, Retry

__all__ = ["arm", "formulas_kept", "guarded", "lifted", "unguarded"]

_CHOSEN_BY_MODE = frozenset(
    {
        "ProdBackward0",
        "ProdBackward1",
        "CumprodBackward0",
        "MaskedFillBackward1",
        # Where the gradient is infinite: elsewhere it is zero, or, under a mode, not a number.
        "MaxBackward1",
        "MinBackward1",
        "MedianBackward0",
        "NanmedianBackward0",
        # Differentiated twice, its first derivatives are of another formula.
        "LinalgDetBackward0",
        # Complex, of a loss that depends on a phase that is arbitrary: an error, or, under a mode, some number.
        "LinalgEigBackward0",
        "LinalgEighBackward0",
        # Only where types are mixed: in place, or not.
        "BinaryCrossEntropyBackward0",
        "BinaryCrossEntropyWithLogitsBackward0",
    }
)
# Bytes that they take for each that they return: up to 12 were measured (cumprod's, in half precision).
_FOR_EACH_RETURNED = 16


class _Backward:
    """One that runs, from ``roots``."""

    def __init__(self, roots: Sequence[Any]) -> None:
        self.roots = roots
        self.handles: list[RemovableHandle] = []
        # [Note: formulas]: the node that was let by last, and who would have tried it again.
        self._aside: tuple[str, Retry] | None = None

    def step_aside(self, node: Any, retries: Callable[[], Sequence[Retry]]) -> None:
        """Before ``node``, ``retries`` do."""
        name, nbytes = node.name(), _room_for(node)

        def before(gradients: Any) -> None:
            for retry in retries():
                retry.make_room(nbytes)
                self._aside = name, retry

        self.handles.append(node.register_prehook(before))

    def explained(self, error: torch.OutOfMemoryError) -> Exception:
        """``error``, with which it ended, or what to say of the node that was not tried again."""
        if self._aside is None or isinstance(error, BudgetError):
            return error
        name, retry = self._aside
        return retry.explain(name, error)


def _room_for(node: Any) -> int:
    """Bytes that ``node`` takes at most: what it returns, as those say that it is returned to, several times."""
    returned = [following._input_metadata[place] for following, place in node.next_functions if following]
    nbytes: int = sum(math.prod(each.shape) * each.dtype.itemsize for each in returned)
    return _FOR_EACH_RETURNED * nbytes


class _Guard:
    """What is to be tried again by ``retry``: from when it is armed, and in ``backwards`` that run within and began
    before."""

    def __init__(self, retry: Retry) -> None:
        self.retry = retry
        self.thread = threading.get_ident()
        self.is_armed = False
        self.backwards: list[_Backward] = []


class _Here(threading.local):
    guard: _Guard | None = None


_here = _Here()
_guards: list[_Guard] = []  # of all threads
_waiting: set[int] = set()  # threads


class _Others:
    """`hetero.stm.running.retry.Others`, than ``thread``."""

    def __init__(self, thread: int) -> None:
        self._thread = thread

    def run(self) -> bool:
        return any(guard.thread not in {self._thread, *_waiting} for guard in list(_guards))

    @contextlib.contextmanager
    def awaited(self) -> Iterator[None]:
        _waiting.add(self._thread)
        try:
            yield
        finally:
            _waiting.discard(self._thread)


@contextlib.contextmanager
def guarded(retry: Retry, *, at_once: bool) -> Iterator[None]:
    """Within it, operators of this thread, and of a backward that begins here, are tried again by ``retry``:
    ``at_once``, or from `arm` on."""
    guard = _Guard(retry)
    outer, _here.guard = _here.guard, guard
    _guards.append(guard)
    retry.others = _Others(guard.thread)
    if at_once:
        arm(retry.relieve)
    try:
        yield
    finally:
        _here.guard = outer
        _guards.remove(guard)
        if guard.is_armed:
            modes.remove(retry)


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


def arm(relieve: Relieve) -> bool:
    """What runs now on this thread needs guarding after all, by the guard that has ``relieve``. False if nothing does
    that has one.

    In a backward, which runs on threads of autograd's, it is every node that is still to come."""
    guard = _here.guard
    if guard is None:
        theirs = next((guard for guard in reversed(_guards) if guard.retry.relieve == relieve), None)
        if theirs is None:
            return False
        for backward in theirs.backwards:
            if not backward.handles:  # else it is armed, if by another model's guard
                _arm_nodes(theirs.retry, backward)
    elif not guard.is_armed:
        guard.is_armed = True
        guard.retry.begin()
        modes.put_below(guard.retry)
    return True


def _arm_nodes(retry: Retry, backward: _Backward) -> None:
    retry.begin()

    def put_in_place(gradients: Any) -> None:
        modes.put_below(retry)  # for this node: autograd restores its threads' modes afterwards

    for node in _reachable(backward.roots):
        name = node.name()
        if name in _CHOSEN_BY_MODE:
            backward.step_aside(node, lambda: [retry])
        # Those at home run on another thread, now perhaps, and take nothing of the device.
        elif name != "torch::autograd::AccumulateGrad":
            backward.handles.append(node.register_prehook(put_in_place))
    modes.put_below(retry)


def unguarded() -> contextlib.AbstractContextManager[list[Retry]]:
    """Within it, nothing is tried again on this thread; what would try. Dispatch modes of others stay."""
    return modes.without(Retry)


@contextlib.contextmanager
def formulas_kept(outputs: Sequence[Any]) -> Iterator[None]:
    """Around a backward from ``outputs`` (tensors or gradient edges): [Note: formulas]; it may be armed while it
    runs."""
    backward = _Backward(
        [output.grad_fn if isinstance(output, torch.Tensor) else output.node for output in outputs]
    )
    is_guarded = modes.active(Retry)
    waiting = [] if is_guarded else _around()
    for guard in waiting:
        guard.backwards.append(backward)
    if is_guarded:
        for node in _reachable(backward.roots):
            if node.name() in _CHOSEN_BY_MODE:
                # Autograd restores its threads' modes after every node: this lasts for one.
                backward.step_aside(node, lambda: modes.take_away(Retry))
    try:
        yield
    except torch.OutOfMemoryError as error:
        explained = backward.explained(error)
        if explained is error:
            raise
        raise explained from error
    finally:
        for guard in waiting:
            guard.backwards.remove(backward)
        for handle in backward.handles:
            handle.remove()


def _around() -> list[_Guard]:
    """Guards that a backward is within which begins on this thread. On one of autograd's, where it is within another
    backward, nothing tells whose that is: all there are, whichever of them comes to be armed."""
    here = threading.get_ident()
    return [guard for guard in _guards if guard.thread == here] or list(_guards)


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
