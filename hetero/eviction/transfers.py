"""From kept intervals to a schedule: when copies leave, when fetches start.

Owns the placement of transfers in time. A copy that is not kept leaves at the first moment after its use.
Fetches are taken in the order of use and each starts at the first opportunity that does no harm (Cao et al.
1995): never before a fetch that is needed earlier, and only if its bytes fit in every period until the use.
It evicts nothing to that end; how much room there is was decided with the intervals.
"""

import numpy as np

from hetero.eviction.intervals import Bools, Intervals, Ints
from hetero.eviction.model import Actions, Schedule

__all__ = ["lay_out"]

_CHUNK = 256  # periods looked at together when searching backwards for the last one without room


def lay_out(
    problem: Intervals, keep: Bools, *, prefetch: bool, policy: str, leaving: Ints | None = None
) -> Schedule:
    """The schedule that keeps ``keep`` (and what a prefetch could hold all along), no time predicted yet.

    ``leaving[t]``: bytes expected to be still on their way out in period ``t``; prefetches leave them room.
    """
    keep = keep.copy()
    fetches = _fetches(problem, keep)
    if prefetch:
        starts = _Placement(problem, keep, fetches, leaving).starts()
    else:
        starts = [deadline for deadline, _, _, _ in fetches]
    return _schedule(problem, keep, fetches, starts, policy)


# deadline (in [0, T)), tensor, release (unrolled, <= deadline), interval or -1
_Fetch = tuple[int, int, int, int]


def _fetches(problem: Intervals, keep: Bools) -> list[_Fetch]:
    periods = problem.periods
    missing = np.flatnonzero((problem.next_use >= 0) & ~(keep & problem.reused))
    deadline = problem.next_use[missing]
    turn = deadline // max(periods, 1) * periods
    release = problem.release[missing] - turn
    columns = (deadline - turn, problem.tensor[missing], release, missing)
    found: list[_Fetch] = list(zip(*(column.tolist() for column in columns), strict=True))
    found += [(use, tensor, release, -1) for tensor, use, release in problem.first_fetches]
    return sorted(found)


class _Placement:
    """Finds a start for each fetch, in order of use, on a ring (cyclic) or a line of periods."""

    def __init__(self, problem: Intervals, keep: Bools, fetches: list[_Fetch], leaving: Ints | None) -> None:
        self.problem = problem
        self.keep = keep
        self.fetches = fetches
        self.free = problem.room - problem.load(keep)
        if leaving is not None:
            self.free -= leaving

    def starts(self) -> list[int]:
        """Unrolled start moments, negative where a fetch begins in the iteration before."""
        periods = self.problem.periods
        free, keep = self.free.copy(), self.keep.copy()
        starts, first, last = self._place(-periods)
        if last - periods > first:
            # The first fetches of the next iteration would overtake the last of this one: let them queue
            # behind.
            self.free[:] = free
            self.keep[:] = keep
            starts, _, _ = self._place(last - periods)
        return starts

    def _place(self, earliest: int) -> tuple[list[int], int, int]:
        """The starts, and the first and last of them that are really fetched."""
        problem = self.problem
        starts = []
        first: int | None = None
        for deadline, tensor, release, j in self.fetches:
            nbytes = self._nbytes(tensor, j)
            start = self._first_fit(max(earliest, release), deadline, nbytes)
            starts.append(start)
            self._occupy(start, deadline, nbytes)
            if start <= release and j >= 0 and problem.reused[j]:
                self.keep[j] = True  # there was room all along: it need not have left
                continue
            earliest = start
            first = start if first is None else first
        return starts, earliest if first is None else first, earliest

    def _nbytes(self, tensor: int, j: int) -> int:
        if j >= 0:
            return int(self.problem.nbytes[j])
        return int(self.problem.nbytes[np.searchsorted(self.problem.tensor, tensor)])

    def _first_fit(self, low: int, deadline: int, nbytes: int) -> int:
        """The least start >= low such that every period in ``[start, deadline)`` has ``nbytes`` free."""
        free, periods = self.free, self.problem.periods
        high = deadline
        while high > low:
            a = max(low, high - _CHUNK)
            if a < 0 < high:
                a = 0
            base = a % periods
            blocked = np.flatnonzero(free[base : base + high - a] < nbytes)
            if len(blocked):
                return a + int(blocked[-1]) + 1
            high = a
        return min(low, deadline)

    def _occupy(self, start: int, deadline: int, nbytes: int) -> None:
        if start < 0:
            periods = self.problem.periods
            self.free[start + periods : min(deadline, 0) + periods] -= nbytes
            start = 0
        self.free[start:deadline] -= nbytes


def _schedule(
    problem: Intervals, keep: Bools, fetches: list[_Fetch], starts: list[int], policy: str
) -> Schedule:
    periods = problem.periods
    evict: list[list[int]] = [[] for _ in range(periods)]
    fetch: list[list[int]] = [[] for _ in range(periods)]
    start_set: set[int] = set()
    fetched = 0
    # Copies that are invalidated as soon as their use is over, or that the trace's end finds, are not
    # evicted.
    stays = keep | (problem.end <= problem.begin)
    if not problem.cyclic:
        stays |= problem.begin >= periods
    for x, moment in zip(problem.tensor[~stays].tolist(), problem.begin[~stays].tolist(), strict=True):
        evict[moment % periods].append(x)
    for (_, x, _, j), at in zip(fetches, starts, strict=True):
        if j >= 0 and keep[j] and problem.reused[j]:
            continue
        fetch[at % periods].append(x)
        fetched += int(problem.nbytes[j]) if j >= 0 else 0
        if at < 0:
            start_set.add(x)
    if problem.cyclic:
        across = keep & (problem.end >= periods) | (problem.begin >= periods)
        start_set.update(problem.tensor[across].tolist())
    else:
        fetched += problem.compulsory_bytes - _non_first_compulsory(problem)
    return Schedule(
        actions=tuple(
            Actions(evict=tuple(gone), fetch=tuple(come)) for gone, come in zip(evict, fetch, strict=True)
        ),
        start=tuple(sorted(start_set)),
        fetched_bytes=fetched,
        written_back_bytes=problem.written_back_bytes(keep),
        predicted_seconds=0.0,
        policy=policy,
    )


def _non_first_compulsory(problem: Intervals) -> int:
    return int(problem.nbytes[(problem.next_use >= 0) & ~problem.reused].sum())
