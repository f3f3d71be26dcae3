"""Models of one shape, whose parameters the loop may combine with each other.

Owns who they are, and that they settle together, and leave together. A follower (a target network, a teacher that is an
average, a momentum encoder without the head) is brought up to date with ``p.data.lerp_(q.data, 0.1)`` now and then,
between plain tensors, of which nobody of ours is told: they have to be on one device. As long as nobody has been given
anything of theirs, those that cannot settle, or not in the same moment, are waited for a few times only.

[Note: kin] Two managers of a device are, if each shape of the one's parameters is among the other's, as often, and the
one has three quarters of the other's at least. One that has never run, and whose parameters nobody has looked at, is
nobody's kin yet: models may be trained one after another. Those of one optimizer get it back one after another. And
what runs on another thread is left alone: nobody knows what that does at the moment.
"""

import contextlib
import functools
import threading
from collections import Counter
from collections.abc import Iterator, Sequence

import torch

from hetero.autograd import in_backward
from hetero.stm.living import Living
from hetero.stm.plans.fits import ForwardKind, Needs
from hetero.stm.settled.transition import Transition
from hetero.stm.tensors.managed import ManagedTensor

__all__ = ["Kin"]

_everyone: "Living[Kin]" = Living()
# Forwards, for those that are not ready: a generator and its judge are always in the middle of an iteration.
_MOST_WAITS = 4


class Kin:
    """Of one manager: those that have to be where it is."""

    def __init__(self, transition: Transition) -> None:
        self._transition = transition
        self._onlookers = transition.fitting.onlookers
        self._waits = 0
        self._is_bound = False  # had settled while kin had not, and was sent home for it
        self._was_looked_at = False  # in the iteration before the last attempt of our own
        _everyone.add(self)

    def close(self) -> None:
        """Management ends."""
        _everyone.discard(self)

    def settle(self, kind: ForwardKind) -> bool:
        """Enter for a forward of such a kind, and with it all that have to be there too; all of them or none."""
        self._was_looked_at, self._onlookers.have_looked = self._onlookers.have_looked > 0, 0
        needs = None if self._was_looked_at else self._transition.needs(kind)
        return needs is not None and self._enter(kind, needs)

    def take_along(self, *, amid: bool = False) -> None:
        """This one has left: they do, now or else at their next forward. ``amid``: as in `Transition.leave`."""
        for one in self._others():
            transition = one._transition
            if transition.is_on:
                with one._locked_now() as is_locked:
                    has_left = is_locked and not in_backward() and transition.leave(amid=amid)
                if not has_left:
                    transition.check.must_leave = True

    def send_home(self) -> None:
        """Somebody is given our parameters at home, perhaps only to copy them, over and over."""
        if not self._transition.is_on:
            for one in self._others():
                one._is_bound = one._is_bound or one._transition.is_on
            self.take_along()

    # -- all of them, or none -------------------------------------------------------------------------

    def _enter(self, kind: ForwardKind, needs: Needs) -> bool:
        transition = self._transition
        others = [one for one in self._others() if not one._transition.is_on]
        ready = [one for one in others if one._is_ready()]
        if len(ready) < len(others):
            self._waits += 1
            # Who was given nothing of them has not combined them so far.
            may_be_combined = any(one._onlookers.have_values for one in (self, *others))
            if self._is_bound or may_be_combined or self._waits <= _MOST_WAITS:
                return False
        if ready and transition.needs(kind, with_kin=True) is None:
            return False
        together = [tensor for one in (self, *ready) for tensor in one._transition.stm.tensors]
        if not all(one._is_private(together) for one in ready) or not transition.enter(kind, needs, together):
            transition.attempts.note_failure()
            return False
        self._waits = 0
        if not all(one._enter_beside(together) for one in ready):
            if transition.leave():
                self.take_along()
            transition.attempts.note_failure()
            return False
        return True

    def _is_ready(self) -> bool:
        """Between two iterations, with nothing that stands against it."""
        transition = self._transition
        with self._locked_now() as is_locked:
            if not is_locked or self._was_looked_at or self._onlookers.have_looked:
                return False
            return (
                transition.stm.segments.is_idle
                and transition.is_between()
                and transition.needs(None, with_kin=True) is not None
            )

    def _is_private(self, together: Sequence[ManagedTensor]) -> bool:
        with self._locked_now() as is_locked:
            return is_locked and self._transition.fitting.is_private(together)

    def _enter_beside(self, together: Sequence[ManagedTensor]) -> bool:
        """Kin of ours has."""
        transition = self._transition
        with self._locked_now() as is_locked:
            needs = transition.needs(None) if is_locked and transition.is_between() else None
            return needs is not None and transition.enter(None, needs, together)

    @contextlib.contextmanager
    def _locked_now(self) -> Iterator[bool]:
        """Whether the lock could be had at once: it may be at work on another thread, and wait for us."""
        lock = self._transition.stm.lock
        is_locked = lock.acquire(blocking=False)
        try:
            yield is_locked
        finally:
            if is_locked:
                lock.release()

    # -- who they are ---------------------------------------------------------------------------------

    @functools.cached_property
    def _shapes(self) -> Counter[torch.Size]:
        """Of our parameters."""
        return Counter(tensor.home.shape for tensor in self._transition.stm.tensors)

    def _others(self) -> "list[Kin]":
        """[Note: kin]."""
        transition = self._transition
        return [
            other
            for other in _everyone
            if other is not self
            and other._transition.stm.device == transition.stm.device
            and other._takes_part()
            and (transition.optimizer is None or other._transition.optimizer is not transition.optimizer)
            and _are_alike(self._shapes, other._shapes)
        ]

    def _takes_part(self) -> bool:
        """It has run, or somebody has looked at its parameters, and they may settle in this process; on this thread."""
        transition = self._transition
        standing = transition.stm.standing
        if standing.is_closed or standing.is_in_child or standing.thread != threading.get_ident():
            return False
        return transition.is_on or transition.stm.plans.last is not None or self._onlookers.have_been_there


def _are_alike(one: Counter[torch.Size], other: Counter[torch.Size]) -> bool:
    fewer, more = sorted((one, other), key=Counter.total)
    return fewer <= more and 4 * fewer.total() >= 3 * more.total()
