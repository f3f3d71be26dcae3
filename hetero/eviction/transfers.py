"""From kept intervals to a schedule: when copies leave, when fetches start.

Owns the placement of transfers in time. A copy that is not kept leaves at the first moment after its use.
Fetches are taken in the order of use and each starts at the first opportunity that does no harm (Cao et al.
1995): never before a fetch that is needed earlier, and only if its bytes fit in every period until the use.
It evicts nothing to that end; how much room there is was decided with the intervals.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from hetero.eviction.intervals import Bools, Intervals, Ints
from hetero.eviction.model import Actions, Schedule

__all__ = ["Fetch", "lay_out", "read_fetches"]

_NOTHING = Actions()
_CHUNK = 256  # periods looked at together when searching backwards for the last one without room


def lay_out(
    problem: Intervals,
    keep: Bools,
    *,
    prefetch: bool,
    policy: str,
    spare: bool = False,
    leaving: Ints | None = None,
    wanted: Sequence[int] | None = None,
) -> Schedule:
    """The schedule that keeps ``keep``, no time predicted yet.

    A copy that a prefetch could hold all along is kept as well, unless ``spare`` asks to leave the room to
    transfers. ``leaving[t]``: bytes expected to be on their way out in period ``t``; prefetches leave them
    room. ``wanted``: of each of `read_fetches`, in their order, a moment before which it is not to start.
    """
    keep = keep.copy()
    fetches = read_fetches(problem, keep, spare=spare)
    if wanted is not None:
        fetches = [f._replace(release=max(f.release, w)) for f, w in zip(fetches, wanted, strict=True)]
    if prefetch:
        starts = _Placement(problem, keep, fetches, leaving).starts()
    else:
        starts = [fetch.deadline for fetch in fetches]
    return _schedule(problem, keep, fetches, starts, policy)


class Fetch(NamedTuple):
    """A transfer that may start in ``[release, deadline]``; the release is unrolled, negative before the
    wrap.
    """

    deadline: int
    tensor: int
    release: int
    interval: int  # -1 for a first use
    nbytes: int
    may_stay: bool  # the copy is there until the release and could simply be kept


def read_fetches(problem: Intervals, keep: Bools, *, spare: bool) -> list[Fetch]:
    """What the intervals that are not kept cost in fetches, in the order of use."""
    missing = np.flatnonzero((problem.next_use >= 0) & ~(keep & problem.reused))
    deadline = problem.next_use[missing]
    turn = deadline // max(problem.periods, 1) * problem.periods
    reused = problem.reused[missing]
    columns = (
        deadline - turn,
        problem.tensor[missing],
        problem.release[missing] - turn + (reused if spare else 0),
        missing,
        problem.nbytes[missing],
        reused & (not spare),
    )
    found = list(map(Fetch._make, zip(*(column.tolist() for column in columns), strict=True)))
    for tensor, use, release in problem.first_fetches:
        nbytes = int(problem.nbytes[np.searchsorted(problem.tensor, tensor)])
        found.append(Fetch(use, tensor, release, -1, nbytes, may_stay=False))
    found.sort()
    return found


class _Placement:
    """Finds a start for each fetch, in order of use, on a ring (cyclic) or a line of periods."""

    def __init__(self, problem: Intervals, keep: Bools, fetches: list[Fetch], leaving: Ints | None) -> None:
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
        starts = []
        first: int | None = None
        for deadline, _, release, j, nbytes, may_stay in self.fetches:
            start = self._first_fit(max(earliest, release), deadline, nbytes)
            starts.append(start)
            if start < deadline:
                self._occupy(start, deadline, nbytes)
            if start <= release and may_stay:
                self.keep[j] = True  # there was room all along: it need not have left
                continue
            earliest = start
            first = start if first is None else first
        return starts, earliest if first is None else first, earliest

    def _first_fit(self, low: int, deadline: int, nbytes: int) -> int:
        """The least start >= low such that every period in ``[start, deadline)`` has ``nbytes`` free."""
        free, periods = self.free, self.problem.periods
        if free[deadline - 1] < nbytes:  # index -1 is the last period of the iteration before
            return deadline
        high = deadline
        while high > low:
            a = max(low, high - _CHUNK)
            if a < 0 < high:
                a = 0
            base = a % periods
            blocked = (free[base : base + high - a] < nbytes).nonzero()[0]
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
    problem: Intervals, keep: Bools, fetches: list[Fetch], starts: list[int], policy: str
) -> Schedule:
    periods = problem.periods
    # Copies that are invalidated as soon as their use is over, or that the trace's end finds, do not leave.
    leaves = ~keep & problem.occupies
    if not problem.cyclic:
        leaves &= problem.begin < periods
    evict = _by_moment(problem.tensor[leaves], problem.begin[leaves], periods)
    real = [(fetch, at) for fetch, at in zip(fetches, starts, strict=True) if not _stays(fetch, keep)]
    tensors = np.fromiter((fetch.tensor for fetch, _ in real), dtype=np.int64, count=len(real))
    moments = np.fromiter((at for _, at in real), dtype=np.int64, count=len(real))
    fetch = _by_moment(tensors, moments, periods)
    start_set: set[int] = set()
    if problem.cyclic:
        across = keep & (problem.end >= periods) | (problem.begin >= periods)
        start_set.update(problem.tensor[across].tolist(), tensors[moments < 0].tolist())
    return Schedule(
        actions=tuple(
            Actions(evict=gone, fetch=come) if gone or come else _NOTHING
            for gone, come in zip(evict, fetch, strict=True)
        ),
        start=tuple(sorted(start_set)),
        fetched_bytes=sum(fetch.nbytes for fetch, _ in real),
        written_back_bytes=problem.written_back_bytes(keep),
        predicted_seconds=0.0,
        policy=policy,
    )


def _stays(fetch: Fetch, keep: Bools) -> bool:
    """Placement found that the copy never has to leave."""
    return fetch.may_stay and bool(keep[fetch.interval])


def _by_moment(tensors: Ints, moments: Ints, periods: int) -> list[tuple[int, ...]]:
    """Tensor ids per moment of the iteration, in the given order."""
    moments = moments % max(periods, 1)
    order = np.argsort(moments, kind="stable")
    ordered = tensors[order].tolist()
    bounds = np.searchsorted(moments[order], np.arange(periods + 1)).tolist()
    return [tuple(ordered[a:b]) if a < b else () for a, b in pairwise(bounds)]
