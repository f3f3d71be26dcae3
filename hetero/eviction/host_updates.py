"""When the host updates what: the one server of a simulated iteration that is neither compute nor link.

Owns its clock and its queue. Two ways: what is queued together is updated in that order, each tensor when its gradient
is there; or, ``early``, each from the moment its gradient is there. Of several, in backward, one that has a place on
the device goes first, and then the one that is needed first. Until the step, each begins with copying what it
overwrites.

[Note: whose turn it is] What was updated early is confirmed after the step in its turn, behind updates that are needed
sooner and have yet to be made. Copies need not wait for that; but one that is ordered behind others that have yet to
begin does, so that it does not go before them.

[Note: what begins early] A copy is worthless from the gradient on, and whoever used the tensor again before the step
would find neither the old value nor the right new one: the executor takes such an update back. So one that is used
again, or has more than one gradient in an iteration, is updated in the step.
"""

import heapq
from collections import deque
from collections.abc import Collection, Iterator
from itertools import takewhile
from math import inf

from hetero.eviction.model import Trace, Updates

__all__ = ["HostUpdates", "early_sends"]


def early_sends(trace: Trace) -> dict[int, int]:
    """The moments at which the gradients leave of those that are updated early, [Note: what begins early]."""
    updates = trace.updates
    if updates is None or not updates.early:
        return {}
    found: dict[int, int] = {}
    known, again = frozenset(updates.tensors), set[int]()
    for now, moment in enumerate(trace.moments[: updates.queued]):
        again.update(x for x in (*moment.operands, *moment.awaits) if x in found)
        for send in moment.sends:
            if send.tensor in found:
                again.add(send.tensor)
            if send.tensor in known:
                found[send.tensor] = now
    # Those of the step itself or behind it are not there when it is queued.
    again.update(send.tensor for moment in trace.moments[updates.queued :] for send in moment.sends)
    return {x: now for x, now in found.items() if x not in again}


class HostUpdates:
    """Of one simulation.

    Attributes:
        ranks: of each tensor, its place in the order of first use.
        done: when each tensor was, or will be, updated last, or later confirmed; those are missing of which nobody can
            say yet.
        due: when the next begins, of those whose gradients will be there; inf without any.
    """

    def __init__(self, updates: Updates, early: Collection[int], renewed: Collection[int] = ()) -> None:
        """``early``: of `early_sends`. ``renewed``: without places, whose copies are to be there before the step."""
        self._updates = updates
        self._early = early
        self.ranks = {x: rank for rank, x in enumerate(updates.tensors)}
        self._in_time = frozenset((*updates.places, *renewed))  # these go first in backward
        self._has_stepped = True
        self._free = 0.0
        self.due = inf
        # What is not begun: by when its gradient is there; those whose gradient is there, in time or not, by rank.
        self._landing: list[tuple[float, int]] = []
        self._first: list[tuple[int, int]] = []
        self._other: list[tuple[int, int]] = []
        self._begins_later: set[int] = set()
        self._last_landing: dict[int, float] = {}
        self.done: dict[int, float] = {}
        # Since the step, by rank, [Note: whose turn it is]: what is updated and not confirmed; what had not begun then.
        self._unconfirmed: dict[int, None] = {}
        self._unbegun: deque[int] = deque()

    def land(self, x: int, time: float) -> bool:
        """Its gradient will be at home. True: it will be updated from then on, whenever its turn comes."""
        if x not in self.ranks:
            return False
        if x not in self._early:
            self._last_landing[x] = time
            return False
        self._has_stepped = False
        self._begin_later(time, x)
        return True

    def queue(self, clock: float) -> None:
        """The optimizer has stepped."""
        updates, landing = self._updates, self._last_landing
        if updates.early:
            for x in updates.tensors:
                if x not in self._early:
                    self._begin_later(max(clock, landing.get(x, clock)), x)
            self._has_stepped = True
            self._unbegun = deque(x for x in updates.tensors if x in self._begins_later)
            self._unconfirmed = {x: None for x in updates.tensors if self.done.get(x, inf) <= clock}
            self._confirm(max(clock, self._free))
            return
        free = max(self._free, clock)
        for x, seconds in zip(updates.tensors, updates.seconds, strict=True):
            free = self.done[x] = max(free, landing.get(x, 0.0)) + seconds
        self._free = free

    def is_late(self, x: int, clock: float) -> bool:
        """It is to be updated, and has not been by ``clock``."""
        return x in self._begins_later or self.done.get(x, 0.0) > clock

    def is_to_come(self, x: int, clock: float) -> bool:
        """Before `queue`: its update will not have been made by ``clock``."""
        return x not in self._early or x in self._begins_later or self.done.get(x, 0.0) > clock

    def is_unconfirmed(self, x: int) -> bool:
        """[Note: whose turn it is]"""
        return x in self._unconfirmed

    def turn(self, x: int) -> float | None:
        """When it is updated, and confirmed; None: nobody can say yet."""
        return None if x in self._unconfirmed else self.done.get(x)

    def finish(self, clock: float) -> float:
        """When everything is done that has been queued, if that is later than ``clock``; early, nobody waits."""
        return clock if self._updates.early else max(clock, self._free)

    def begin_until(self, clock: float) -> Iterator[tuple[float, int]]:
        """What the host begins up to ``clock``, and what is confirmed behind that: when it will be done, and which."""
        while self.due <= clock:
            yield from self._begin_next()

    def begin(self, x: int) -> Iterator[tuple[float, int]]:
        """As `begin_until`, up to ``x``."""
        while self.turn(x) is None and self.due < inf:
            yield from self._begin_next()

    def _begin_later(self, time: float, x: int) -> None:
        self.done.pop(x, None)
        self._unconfirmed.pop(x, None)
        self._begins_later.add(x)
        heapq.heappush(self._landing, (time, x))
        if not (self._first or self._other):
            self.due = max(self._free, self._landing[0][0])

    def _confirm(self, time: float) -> list[tuple[float, int]]:
        """What has begun will have been done by ``time``: what has its turn then, as `begin_until`."""
        unbegun = self._unbegun
        while unbegun and unbegun[0] not in self._begins_later:
            unbegun.popleft()
        first = self.ranks[unbegun[0]] if unbegun else len(self.ranks)
        confirmed = list(takewhile(lambda x: self.ranks[x] < first, self._unconfirmed))
        for x in confirmed:
            del self._unconfirmed[x]
            self.done[x] = time
        return [(time, x) for x in confirmed]

    def _begin_next(self) -> list[tuple[float, int]]:
        now, landing, first, other = self.due, self._landing, self._first, self._other
        while landing and landing[0][0] <= now:
            x = heapq.heappop(landing)[1]
            heapq.heappush(first if x in self._in_time else other, (self.ranks[x], x))
        is_first = first and (not self._has_stepped or not other or first[0] < other[0])
        rank, x = heapq.heappop(first if is_first else other)
        self._begins_later.discard(x)
        seconds = self._updates.seconds[rank]
        if self._updates.copies and not self._has_stepped:
            seconds += self._updates.copies[rank]
        self._free = self.done[x] = now + seconds
        if first or other:
            self.due = self._free
        else:
            self.due = max(self._free, landing[0][0]) if landing else inf
        return [(self._free, x), *self._confirm(self._free)]
