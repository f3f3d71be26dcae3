"""When fetches start, found by following the clock: each as soon as its memory is there.

Owns a run of the step in which write backs take their time, and fetches in the order of use start where neither they
nor anything after them has to wait for memory because of it. `hetero.eviction.transfers` knows periods only, and
reserves for late write backs what they took at worst. What is found here are wishes: it is there that they are made
to fit. The rules of time are those of `hetero.eviction.simulation`.
"""

from collections import deque
from collections.abc import Sequence

import numpy as np

from hetero.eviction.intervals import Bools, Intervals
from hetero.eviction.model import Links, Trace
from hetero.eviction.transfers import Fetch

__all__ = ["timed_starts"]

_TURNS = 3  # iterations followed; where fetches start depends on what is late in the one before


def timed_starts(
    trace: Trace,
    problem: Intervals,
    keep: Bools,
    fetches: Sequence[Fetch],
    links: Links,
    *,
    wary: bool,
) -> list[int]:
    """The moment at which each of ``fetches`` (in their order) starts, negative in the iteration before.

    ``wary``: a fetch leaves room for what was late an iteration ago, too, in all periods until its use.
    """
    if not fetches:
        return []
    run = _Run(trace, problem, keep, fetches, links, wary=wary)
    for turn in range(_TURNS if trace.cyclic else 1):
        run.iteration(turn)
    return run.starts


class _Run:
    """``free[t]``: bytes of period t beside operands, what stays, and fetches on their way; what is late in leaving
    comes off. ``ahead[t]``: the same, less what was late there an iteration ago if that is to be expected again.
    ``next``: the fetch that starts next, counted on through the iterations; ``deadline``: its moment of use, counted
    likewise, -1 if there is none."""

    def __init__(
        self,
        trace: Trace,
        problem: Intervals,
        keep: Bools,
        fetches: Sequence[Fetch],
        links: Links,
        *,
        wary: bool,
    ) -> None:
        self.trace, self.links, self.fetches, self.wary = trace, links, fetches, wary
        self.periods = problem.periods
        planned = problem.room - problem.load(keep)
        self.planned: list[int] = planned.tolist()
        self.free = planned
        self.ahead = planned.copy() if wary else planned
        self.starts = [fetch.deadline for fetch in fetches]
        self.next, self.deadline = 0, fetches[0].deadline
        self.leaves: list[list[int]] = [[] for _ in range(self.periods)]
        for j in np.flatnonzero(~keep & problem.occupies).tolist():
            if problem.cyclic or problem.begin[j] < self.periods:
                self.leaves[int(problem.begin[j]) % self.periods].append(int(problem.tensor[j]))
        self.clock = self.up_free = self.down_free = 0.0
        self.arrival: dict[int, float] = {}
        self.saved: dict[int, float] = {}
        self.dirty: set[int] = set()
        self.leaving: deque[tuple[float, int]] = deque()
        self.late = 0

    def iteration(self, turn: int) -> None:
        arrival, dirty = self.arrival, self.dirty
        for t, moment in enumerate(self.trace.moments):
            now = turn * self.periods + t
            for x in moment.invalidates:
                dirty.discard(x)
                arrival.pop(x, None)
            for x in self.leaves[t]:
                self._evict(x)
            self._retire()
            while self.deadline == now:
                self._wait_for_room(t)
                self._start(now)
            self._wait_for_room(t)
            while self._may_start(now, t):
                self._start(now)
            if arrival:
                for x in moment.operands:
                    if x in arrival:
                        self.clock = max(self.clock, arrival.pop(x))
            self.clock += moment.seconds
            if moment.dirties:
                dirty.update(moment.dirties)
            self.free[t] = self.planned[t]
            if self.wary:
                self.ahead[t] = self.planned[t] - self.late

    def _may_start(self, now: int, t: int) -> bool:
        deadline = self.deadline
        fetch = self.fetches[self.next % len(self.fetches)]
        if deadline < 0 or now < deadline - fetch.deadline + fetch.release:
            return False
        if fetch.nbytes > self.free.item(t) - self.late:
            return False
        if now + 1 >= deadline:
            return True
        begin = (now + 1) % self.periods
        end = begin + deadline - now - 1
        least = int(np.minimum.reduce(self.ahead[begin:end]))
        if end > self.periods:
            least = min(least, int(np.minimum.reduce(self.ahead[: end - self.periods])))
        return least >= fetch.nbytes

    def _start(self, now: int) -> None:
        turn, place = divmod(self.next, len(self.fetches))
        fetch = self.fetches[place]
        start = self.starts[place] = now - turn * self.periods
        if start < 0:
            self._take(start + self.periods, self.periods, fetch.nbytes)
        self._take(max(start, 0), fetch.deadline, fetch.nbytes)
        self.up_free = max(self.up_free, self.clock, self.saved.pop(fetch.tensor, 0.0))
        self.up_free += self.links.h2d_seconds(fetch.nbytes)
        self.arrival[fetch.tensor] = self.up_free
        self.next += 1
        turn, place = divmod(self.next, len(self.fetches))
        more = turn == 0 or self.trace.cyclic
        self.deadline = turn * self.periods + self.fetches[place].deadline if more else -1

    def _take(self, begin: int, end: int, nbytes: int) -> None:
        if begin < end:
            self.free[begin:end] -= nbytes
            if self.wary:
                self.ahead[begin:end] -= nbytes

    def _evict(self, x: int) -> None:
        self.arrival.pop(x, None)
        if x not in self.dirty:
            return
        self.dirty.discard(x)
        nbytes = self.trace.sizes[x]
        self.down_free = max(self.down_free, self.clock) + self.links.d2h_seconds(nbytes)
        self.saved[x] = self.down_free
        self.leaving.append((self.down_free, nbytes))
        self.late += nbytes

    def _wait_for_room(self, t: int) -> None:
        while self.leaving and self.late > self.free.item(t):
            self.clock = max(self.clock, self.leaving[0][0])
            self._retire()

    def _retire(self) -> None:
        while self.leaving and self.leaving[0][0] <= self.clock:
            self.late -= self.leaving.popleft()[1]
