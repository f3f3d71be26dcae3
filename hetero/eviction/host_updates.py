"""When the host updates what: the one server of a simulated iteration that is neither compute nor link.

Owns its clock and its queue. Two ways: what is queued together is updated in that order, each tensor when its gradient
is there; or, ``early``, each from the moment its gradient is there. Of several, in backward, one that has a place on
the device goes first, and then the one that is needed first.

[Note: what begins early] A copy is worthless from the gradient on, and whoever used the tensor again before the step
would find neither the old value nor the right new one: the executor takes such an update back. So one that is used
again, or has more than one gradient in an iteration, is updated in the step.
"""

import heapq
from collections.abc import Iterator

from hetero.eviction.model import Trace

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
        done: when each tensor was, or will be, updated last; those are missing of which nobody can say yet.
    """

    def __init__(self, trace: Trace) -> None:
        assert trace.updates is not None
        self._updates = updates = trace.updates
        self._early = frozenset(early_sends(trace))
        self._ranks = {x: rank for rank, x in enumerate(updates.tensors)}
        self._first = frozenset(updates.renewed)  # in backward
        self._has_stepped = True
        self._free = 0.0
        self._landed: list[tuple[float, int]] = []  # what is not begun, by when its gradient is there
        self._begins_later: set[int] = set()
        self._last_landing: dict[int, float] = {}
        self.done: dict[int, float] = {}

    def land(self, x: int, time: float) -> bool:
        """Its gradient will be at home. True: it will be updated from then on, whenever its turn comes."""
        if x not in self._ranks:
            return False
        self._last_landing[x] = time
        if x not in self._early:
            return False
        self._has_stepped = False
        self._begin_later(time, x)
        return True

    def queue(self, clock: float) -> None:
        """The optimizer has stepped."""
        updates = self._updates
        if updates.early:
            for x in updates.tensors:
                if x not in self._early:
                    self._begin_later(max(clock, self._last_landing.get(x, clock)), x)
            self._has_stepped = True
            return
        self._free = max(self._free, clock)
        for x, seconds in zip(updates.tensors, updates.seconds, strict=True):
            self._free = self.done[x] = max(self._free, self._last_landing.get(x, 0.0)) + seconds

    def is_late(self, x: int, clock: float) -> bool:
        """It is to be updated, and has not been by ``clock``."""
        return x in self._begins_later or self.done.get(x, 0.0) > clock

    def finish(self, clock: float) -> float:
        """When everything is done that has been queued, if that is later than ``clock``; early, nobody waits."""
        return clock if self._updates.early else max(clock, self._free)

    def begin_until(self, clock: float) -> Iterator[tuple[float, int]]:
        """What the host begins up to ``clock``: when it will have been done, and which."""
        while self._landed and max(self._free, self._landed[0][0]) <= clock:
            yield self._begin_next()

    def begin(self, x: int) -> Iterator[tuple[float, int]]:
        """As `begin_until`, up to ``x``."""
        while x not in self.done and self._landed:
            yield self._begin_next()

    def _begin_later(self, time: float, x: int) -> None:
        self.done.pop(x, None)
        self._begins_later.add(x)
        heapq.heappush(self._landed, (time, x))

    def _begin_next(self) -> tuple[float, int]:
        now = max(self._free, self._landed[0][0])
        there = []
        while self._landed and self._landed[0][0] <= now:
            there.append(heapq.heappop(self._landed))
        chosen = min(there, key=lambda item: self._rank(item[1]))
        for item in there:
            if item is not chosen:
                heapq.heappush(self._landed, item)
        x = chosen[1]
        self._begins_later.discard(x)
        self._free = self.done[x] = now + self._updates.seconds[self._ranks[x]]
        return self._free, x

    def _rank(self, x: int) -> tuple[bool, int]:
        return not self._has_stepped and x not in self._first, self._ranks[x]
