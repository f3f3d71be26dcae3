"""The interval problem as a linear program: fractions of copies kept, prices of memory, and a bound in bytes.

Owns the LP (FOO, Berger, Beckmann, Harchol-Balter 2018, with cyclic time, write backs and varying room) and
the bound. Its claim is that ``bound`` is valid whatever the solver did: it is evaluated from the prices alone
by Lagrangian duality, so an inexact or windowed solution makes it weaker, never wrong. It chooses no
intervals.

[Note: state form] Listing every interval in every period that it covers would need intervals x periods
entries. Instead ``held[t] - held[t-1] = entering[t] - leaving[t]`` and ``held[t] <= room[t]``: two entries
per interval.

[Note: solved in windows] Solving time grows faster than the trace. Above ``_MOST_PERIODS`` periods the LP is solved in
overlapping windows; each contributes the prices and fractions of its middle, where what lies beyond its edges
hardly matters.
"""

from dataclasses import dataclass
from math import ceil

import numpy as np
from scipy import sparse
from scipy.optimize import linprog

from hetero.eviction.intervals import Bools, Floats, Intervals, Ints

__all__ = ["Relaxation", "bound_from_prices", "relax"]


_MOST_PERIODS = 8_000
_WINDOW = 2_500
_OVERLAP = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Relaxation:
    """``kept[j]`` in [0, 1] per interval; ``price[t]`` >= 0: bytes saved by a byte of room in ``t``."""

    kept: Floats
    price: Floats


def relax(problem: Intervals, room: Ints, *, prefer_short: float = 0.0) -> Relaxation:
    """Solve the relaxation with ``room[t]`` bytes beside the operands.

    ``prefer_short``: relative weight that breaks ties between equal savings in favour of the shorter
    interval, whose memory is free again sooner.
    """
    if problem.all_fits(room):
        return Relaxation(kept=np.ones(len(problem.use)), price=np.zeros(problem.periods))
    keepable = _keepable(problem, room)
    if problem.periods <= _MOST_PERIODS:
        return _solve(problem, room, keepable, 0, problem.periods, prefer_short)
    kept = np.zeros(len(problem.use))
    price = np.zeros(problem.periods)
    for begin in range(0, problem.periods, _WINDOW):
        end = min(begin + _WINDOW, problem.periods)
        part = _solve(problem, room, keepable, begin - _OVERLAP, end + _OVERLAP, prefer_short)
        price[begin:end] = part.price[begin:end]
        inside = (problem.use >= begin) & (problem.use < end)
        kept[inside] = part.kept[inside]
    return Relaxation(kept=kept, price=price)


def bound_from_prices(problem: Intervals, price: Floats) -> int:
    """Bytes per iteration that no choice of intervals can go below, given any prices >= 0.

    Each interval (or group that shares a write back) pays for the memory it occupies or for its transfers,
    whichever is less; the value of all room, which is at most what was paid for it, comes off.
    """
    keepable = _keepable(problem, problem.room)
    rent = problem.nbytes * problem.sums(price)
    rent[~keepable] = np.inf
    refetch = problem.nbytes * problem.reused
    cheaper = np.minimum(rent, refetch)
    clean = problem.group < 0
    total = problem.compulsory_bytes + float(cheaper[clean].sum()) - float(price @ problem.room)
    if problem.groups:
        group = problem.group[~clean]
        all_kept = np.zeros(problem.groups)
        lost = np.zeros(problem.groups)
        np.add.at(all_kept, group, rent[~clean])
        np.add.at(lost, group, cheaper[~clean])
        save = np.zeros(problem.groups)
        save[group] = problem.nbytes[~clean]
        total += float(np.minimum(all_kept, save + lost).sum())
    # Sums of up to 10^5 doubles: relative rounding stays far below 1e-9.
    return max(problem.compulsory_bytes, ceil(total - 1e-9 * abs(total) - 1e-6))


def _keepable(problem: Intervals, room: Ints) -> Bools:
    """Intervals that fit in every period they would occupy, were they alone."""
    length = problem.end - problem.begin
    level = np.frexp(np.maximum(length, 1).astype(np.float64))[1] - 1
    lowest = np.concatenate([room, room])
    fits = np.ones(len(length), dtype=bool)
    for exponent in range(int(level.max(initial=0)) + 1):
        at = np.flatnonzero((level == exponent) & (length > 0))
        span = 1 << exponent
        least = np.minimum(lowest[problem.begin[at]], lowest[problem.end[at] - span])
        fits[at] = problem.nbytes[at] <= least
        lowest = np.minimum(lowest[:-span], lowest[span:]) if len(lowest) > span else lowest
    return fits


def _solve(
    problem: Intervals, room: Ints, keepable: Bools, low: int, high: int, prefer_short: float
) -> Relaxation:
    """The LP over periods ``[low, high)``, taken modulo the iteration if it is cyclic."""
    kept = (problem.end <= problem.begin).astype(np.float64)
    price = np.zeros(problem.periods)
    if not problem.cyclic:
        low, high = max(low, 0), min(high, problem.periods)
    chosen, piece, begin, end = _pieces(problem, keepable, low, high)
    if not len(chosen):
        return Relaxation(kept=kept, price=price)
    width = high - low
    periods = np.arange(low, high) % problem.periods
    scale = float(problem.nbytes[chosen].max())
    size = problem.nbytes[chosen] / scale
    grouped = np.flatnonzero(problem.group[chosen] >= 0)
    _, member = np.unique(problem.group[chosen][grouped], return_inverse=True)
    groups = int(member.max(initial=-1)) + 1
    count = len(chosen)

    row = np.arange(width)
    one, many = np.ones(width), np.ones(len(piece))
    last = end < width
    balance = sparse.csc_matrix(
        (
            np.concatenate([one, -one[1:], -many, many[last]]),
            (
                np.concatenate([row, row[1:], begin, end[last]]),
                np.concatenate([count + row, count + row[:-1], piece, piece[last]]),
            ),
        ),
        shape=(width, count + width + groups),
    )
    length = (problem.end - problem.begin)[chosen]
    saving = problem.reused[chosen] - prefer_short * length / problem.periods
    cost = np.concatenate([-saving, np.zeros(width), np.ones(groups)])
    bounds = np.zeros((count + width + groups, 2))
    bounds[:count, 1] = size
    bounds[count : count + width, 1] = room[periods] / scale
    bounds[count + width :, 1] = np.inf
    saved = None
    if groups:  # written_back[g] >= size - kept, for every interval of the group
        line = np.arange(len(grouped))
        saved = sparse.csc_matrix(
            (
                -np.ones(2 * len(grouped)),
                (np.tile(line, 2), np.concatenate([grouped, count + width + member])),
            ),
            shape=(len(grouped), count + width + groups),
        )
    result = linprog(
        cost,
        A_ub=saved,
        b_ub=None if saved is None else -size[grouped],
        A_eq=balance,
        b_eq=np.zeros(width),
        bounds=bounds,
        method="highs",
    )
    if result.x is None:  # without a solution the prices stay zero: a weak bound, and nothing kept
        return Relaxation(kept=kept, price=price)
    kept[chosen] = np.clip(result.x[:count] / size, 0.0, 1.0)
    price[periods] = np.maximum(-result.upper.marginals[count : count + width], 0.0)
    return Relaxation(kept=kept, price=price)


def _pieces(problem: Intervals, keepable: Bools, low: int, high: int) -> tuple[Ints, Ints, Ints, Ints]:
    """Intervals with a choice inside the window, and their parts there: (ids, position, begin, end)."""
    worth = keepable & problem.saves
    worth &= (problem.nbytes > 0) & problem.occupies
    ids, begins, ends = [], [], []
    for shift in (-problem.periods, 0, problem.periods) if problem.cyclic else (0,):
        begin = np.maximum(problem.begin + shift, low)
        end = np.minimum(problem.end + shift, high)
        part = np.flatnonzero(worth & (begin < end))
        ids.append(part)
        begins.append(begin[part] - low)
        ends.append(end[part] - low)
    parts = np.concatenate(ids)
    chosen, piece = np.unique(parts, return_inverse=True)
    return chosen, piece, np.concatenate(begins), np.concatenate(ends)
