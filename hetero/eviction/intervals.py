"""The problem behind a trace: which copies to keep between two uses.

Owns the translation of a `Trace` into `Intervals`. Residency at the uses themselves is mandatory; what
remains to be chosen is, for each use and the next, whether the copy stays in between. Keeping it occupies its
bytes in every period strictly between; not keeping it costs a fetch, and a write back if the copy is dirty
(Berger et al. 2018, FOO, extended to cyclic traces, invalidation and write backs). It chooses nothing.

[Note: unrolled time] An interval ``[begin, end)`` starts in ``[1, T]`` and may run past ``T = len(moments)``
in a cyclic trace; period ``t`` then means period ``t % T`` of the next iteration.
"""

from dataclasses import dataclass
from itertools import chain, pairwise

import numpy as np
from numpy.typing import NDArray

from hetero.eviction.model import CapacityError, Trace

__all__ = ["Bools", "Floats", "Intervals", "Ints", "covering", "read_intervals"]

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Intervals:
    """One entry per use (tensor, moment), ordered by tensor, then moment. All arrays have that length but
    ``room``.

    ``tensor``, ``use``: whose use, and when. ``nbytes``: size of the copy. ``begin``, ``end``: periods the
    copy occupies if kept after the use: until the next use, or, when ``reused`` is false, until it is
    invalidated or the trace ends (worth keeping only to save a write back). ``written``: the use writes to
    the copy. ``next_use``: unrolled moment of the next use, -1 if there is none. ``release``: the earliest
    moment at which its fetch may start if the copy is not kept. ``group``: intervals over which one write to
    the copy stays unsaved; -1 if clean. The group's write back costs ``nbytes`` once if any of its intervals
    is not kept. ``room[t]``: bytes of period ``t`` left beside its operands. ``first_fetches``: tensors
    fetched once however one chooses (non-cyclic: first uses): ``(tensor, use, release)``.
    """

    periods: int
    cyclic: bool
    tensor: Ints
    use: Ints
    nbytes: Ints
    begin: Ints
    end: Ints
    reused: Bools
    written: Bools
    next_use: Ints
    release: Ints
    group: Ints
    groups: int
    room: Ints
    first_fetches: tuple[tuple[int, int, int], ...]
    compulsory_bytes: int

    @property
    def saves(self) -> Bools:
        """Intervals that save something if they are kept: a fetch, a write back, or both."""
        found: Bools = self.reused | (self.group >= 0)
        return found

    @property
    def occupies(self) -> Bools:
        """Intervals that take memory in some period if they are kept; the others end where they begin."""
        found: Bools = self.end > self.begin
        return found

    def sums(self, values: Floats, ids: Ints | slice = slice(None)) -> Floats:
        """Of intervals ``ids``: the sum of ``values``, one for each period, over those that it occupies if kept."""
        until = np.concatenate([[0.0], np.cumsum(np.tile(values, 2))])
        found: Floats = until[self.end[ids]] - until[self.begin[ids]]
        return found

    def all_fits(self, room: Ints) -> bool:
        """Whether ``room[t]`` bytes beside the operands are enough for all that `saves`."""
        return bool((self.load(self.saves) <= room).all())

    def moved_bytes(self, keep: Bools) -> int:
        """Bytes fetched and written back per iteration if exactly the intervals in ``keep`` are kept."""
        fetched = int(self.nbytes[self.reused & ~keep].sum())
        return self.compulsory_bytes + fetched + self.written_back_bytes(keep)

    def written_back_bytes(self, keep: Bools) -> int:
        """Of `moved_bytes`, those that go from the device to the host because a written copy is not kept."""
        lost = ~keep & (self.group >= 0)
        _, first = np.unique(self.group[lost], return_index=True)
        return int(self.nbytes[lost][first].sum())

    def load(self, keep: Bools) -> Ints:
        """Bytes per period occupied by the kept intervals (operands not counted)."""
        chosen = np.flatnonzero(keep & self.occupies)
        steps = np.zeros(2 * self.periods + 1, dtype=np.int64)
        np.add.at(steps, self.begin[chosen], self.nbytes[chosen])
        np.subtract.at(steps, self.end[chosen], self.nbytes[chosen])
        load = np.cumsum(steps)
        return load[: self.periods] + load[self.periods : 2 * self.periods]


def covering(begin: Ints, end: Ints, period: int, periods: int) -> Bools:
    """Which intervals ``[begin, end)`` occupy ``period``, below ``periods``, in its first or its second turn."""
    again = period + periods
    return (begin <= period) & (period < end) | (begin <= again) & (again < end)


def read_intervals(trace: Trace) -> Intervals:
    """The interval problem of ``trace``. Raises `CapacityError` where one moment's operands do not fit."""
    periods = len(trace.moments)
    sizes = np.asarray(trace.sizes, dtype=np.int64)
    used = _keys([moment.operands for moment in trace.moments], periods)
    tensor, use = (used // periods, used % periods) if periods else (used, used)
    nbytes = sizes[tensor]
    room = np.fromiter((moment.capacity for moment in trace.moments), dtype=np.int64, count=periods)
    needed = np.zeros(periods, dtype=np.int64)
    np.add.at(needed, use, nbytes)
    _refuse_overfull(room, needed)

    next_use = _next_uses(tensor, use, periods, cyclic=trace.cyclic)
    horizon = np.where(next_use >= 0, next_use, periods)
    lost = _keys([moment.invalidates for moment in trace.moments], periods)
    first_lost, last_lost = _invalidations(lost, tensor, use, horizon, periods, cyclic=trace.cyclic)
    intact = first_lost < 0
    reused = (next_use >= 0) & intact  # what is produced again was invalidated before
    end = np.where(intact, horizon, first_lost)
    written = _among(used, _keys([moment.dirties for moment in trace.moments], periods))
    group, groups = _write_groups(tensor, written, intact, cyclic=trace.cyclic)
    produced = _keys([moment.produces for moment in trace.moments], periods)
    next_use = _without_production(next_use, tensor, periods, produced)
    first_fetches = () if trace.cyclic else _first_fetches(tensor, use, lost, produced, periods)
    compulsory = int(nbytes[(next_use >= 0) & ~intact].sum()) + sum(
        int(sizes[x]) for x, _, _ in first_fetches
    )
    return Intervals(
        periods=periods,
        cyclic=trace.cyclic,
        tensor=tensor,
        use=use,
        nbytes=nbytes,
        begin=use + 1,
        end=np.maximum(end, use + 1),
        reused=reused,
        written=written,
        next_use=next_use,
        release=np.where(intact, use + 1, last_lost),
        group=group,
        groups=groups,
        room=room - needed,
        first_fetches=first_fetches,
        compulsory_bytes=compulsory,
    )


def _keys(per_moment: list[tuple[int, ...]], periods: int) -> Ints:
    """Sorted, distinct ``tensor * periods + moment``."""
    counts = np.fromiter(map(len, per_moment), dtype=np.int64, count=periods)
    total = int(counts.sum())
    ids = np.fromiter(chain.from_iterable(per_moment), dtype=np.int64, count=total)
    if not total:
        return ids
    # As np.unique and np.isin do it, which spend more than this on finding out how: traces are short, and many.
    keys: Ints = ids * periods + np.repeat(np.arange(periods, dtype=np.int64), counts)
    keys.sort()
    return keys[_changes(keys)]


def _among(values: Ints, keys: Ints) -> Bools:
    """Which of ``values`` are among ``keys``, sorted."""
    if not len(keys):
        return np.zeros(len(values), dtype=bool)
    found: Bools = keys[np.minimum(np.searchsorted(keys, values), len(keys) - 1)] == values
    return found


def _refuse_overfull(capacity: Ints, needed: Ints) -> None:
    over = np.flatnonzero(needed > capacity)
    if len(over):
        moment = int(over[0])
        raise CapacityError(moment=moment, needed=int(needed[moment]), capacity=int(capacity[moment]))


def _next_uses(tensor: Ints, use: Ints, periods: int, *, cyclic: bool) -> Ints:
    count = len(tensor)
    if not count:
        return np.zeros(0, dtype=np.int64)
    following = np.append(use[1:], -1)
    first = _changes(tensor)
    last = np.append(first[1:], True)
    firsts = use[first]  # one per tensor, in the order of the lasts
    following[last] = firsts + periods if cyclic else -1
    return following


def _changes(ordered: Ints) -> Bools:
    """True at the first of equal entries: of each tensor."""
    changes = np.ones(len(ordered), dtype=bool)
    changes[1:] = ordered[1:] != ordered[:-1]
    return changes


def _invalidations(
    lost: Ints, tensor: Ints, use: Ints, horizon: Ints, periods: int, *, cyclic: bool
) -> tuple[Ints, Ints]:
    """Per use, the first and last invalidation in ``(use, horizon]``, unrolled; -1 where there is none."""
    if not len(lost):
        return np.full(len(use), -1, dtype=np.int64), np.full(len(use), -1, dtype=np.int64)
    span = 2 * periods + 1
    owner, moment = lost // periods, lost % periods
    unrolled = owner * span + moment
    if cyclic:
        unrolled = np.sort(np.concatenate([unrolled, unrolled + periods]))
    low = np.searchsorted(unrolled, tensor * span + use, side="right")
    high = np.searchsorted(unrolled, tensor * span + horizon, side="right")
    some = high > low
    first = np.where(some, unrolled[np.minimum(low, len(unrolled) - 1)] - tensor * span, -1)
    last = np.where(some, unrolled[high - 1] - tensor * span, -1)
    return first, last


def _write_groups(tensor: Ints, written: Bools, intact: Bools, *, cyclic: bool) -> tuple[Ints, int]:
    """The write that each interval's copy still carries, as a dense group number; -1 for a clean copy."""
    group = [-1] * len(tensor)
    groups = 0
    bounds = [*np.flatnonzero(_changes(tensor)).tolist(), len(tensor)]
    is_written, is_intact = written.tolist(), intact.tolist()  # looked at one by one
    for begin, end in pairwise(bounds):
        if True not in is_written[begin:end]:
            continue
        current = -1
        # A cyclic tensor enters its first use with the last write of the iteration before: go round twice.
        for turn in range(2 if cyclic else 1):
            for j in range(begin, end):
                if is_written[j]:
                    if turn == 0:
                        group[j], groups = groups, groups + 1
                    current = group[j]
                group[j] = current
                if not is_intact[j]:
                    current = -1
    return np.array(group, dtype=np.int64), groups


def _without_production(next_use: Ints, tensor: Ints, periods: int, produced: Ints) -> Ints:
    """A tensor that comes into being at its next use is fetched by nobody: there is no such use."""
    if not len(produced):
        return next_use
    fresh = _among(tensor * periods + next_use % periods, produced) & (next_use >= 0)
    return np.where(fresh, -1, next_use)


def _first_fetches(
    tensor: Ints, use: Ints, lost: Ints, produced: Ints, periods: int
) -> tuple[tuple[int, int, int], ...]:
    found = []
    first = _changes(tensor)
    for x, u in zip(tensor[first].tolist(), use[first].tolist(), strict=True):
        if x * periods + u in produced:
            continue
        position = int(np.searchsorted(lost, x * periods + u, side="right")) - 1
        stale = position >= 0 and lost[position] >= x * periods
        found.append((x, u, int(lost[position]) - x * periods if stale else 0))
    return tuple(found)
