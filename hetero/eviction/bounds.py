"""What no schedule can go below: bytes per iteration, and seconds per iteration under given links.

Owns `lower_bound` and `lower_bound_seconds`. The first knows neither links nor prefetching; the second adds
what the order of uses and the capacity force into each stretch of time, and what `hetero.eviction.fluid` says.
"""

import numpy as np

from hetero.eviction.fluid import fluid
from hetero.eviction.intervals import Bools, Floats, Intervals, Ints, read_intervals
from hetero.eviction.model import Links, Trace
from hetero.eviction.reach import read_reachable
from hetero.eviction.relaxation import bound_from_prices, relax

__all__ = ["lower_bound", "lower_bound_seconds"]

_GRID = 200  # stretches of time begin and end at this many moments at most


def lower_bound(trace: Trace) -> int:
    """Bytes (fetched and written back) per iteration that no schedule of ``trace`` can go below.

    The interval LP (FOO, Berger et al. 2018) extended to cyclic traces, invalidation and write backs. Up to
    8,000 moments it is solved whole. Longer traces are solved in overlapping windows of time, whose prices of
    memory give a bound that is just as valid and, as a rule, slightly lower. Raises `CapacityError` as
    `plan`.
    """
    return _fewest_bytes(read_intervals(trace))


def lower_bound_seconds(trace: Trace, links: Links) -> float:
    """Seconds per iteration that no schedule of ``trace`` can go below, however well it overlaps.

    A stretch of moments takes at least the time of its operators, and at least the time of fetching what they
    use beyond what the device could hold when it began or what was invalidated within it. The bound is the
    best chain of disjoint stretches (longest path), tried from several starting moments of a cyclic
    iteration; or that of the step as a fluid (`fluid`), if it is better. Where updates begin in backward, so may
    the fetches of what they make (`read_reachable`).
    """
    problem = read_reachable(trace)
    if not problem.periods:
        return 0.0
    seconds = np.fromiter((moment.seconds for moment in trace.moments), dtype=np.float64)
    capacity = np.fromiter((moment.capacity for moment in trace.moments), dtype=np.int64)
    quarters = range(0, problem.periods, max(problem.periods // 4, 1)) if trace.cyclic else (0,)
    chain = max(_longest(problem, seconds, capacity, links, start) for start in quarters)
    bandwidth = links.h2d_bandwidth + (links.d2h_bandwidth if problem.groups else 0.0)
    return max(chain, _fewest_bytes(problem) / bandwidth, fluid(trace, links).step_seconds)


def _fewest_bytes(problem: Intervals) -> int:
    return bound_from_prices(problem, relax(problem, problem.room).price)


def _longest(problem: Intervals, seconds: Floats, capacity: Ints, links: Links, start: int) -> float:
    """The longest chain of stretches in ``[start, start + periods]``."""
    periods = problem.periods
    grid = np.unique(np.linspace(start, start + periods, min(periods, _GRID) + 1).astype(np.int64))
    use, before, release, nbytes, fresh = _refetches(problem, start)
    column = np.searchsorted(
        grid, use, side="right"
    )  # counts for stretches that end at grid[column] or later
    clock = np.concatenate([[0.0], np.cumsum(np.roll(seconds, -start))])[grid - start]
    longest = np.zeros(len(grid))
    for i, begin in enumerate(grid[:-1].tolist()):
        inside = use >= begin
        forced = inside & fresh & (release >= begin)
        other = inside & ~forced & (before < begin)
        held = int(capacity[(begin - 1) % periods]) if problem.cyclic or begin else 0
        forced_bytes = np.bincount(column[forced], nbytes[forced], minlength=len(grid)).cumsum()
        other_bytes = np.bincount(column[other], nbytes[other], minlength=len(grid)).cumsum()
        needed = forced_bytes + np.maximum(other_bytes - held, 0.0)
        stretch = np.maximum(clock - clock[i], needed / links.h2d_bandwidth)
        longest[i + 1 :] = np.maximum(longest[i + 1 :], longest[i] + stretch[i + 1 :])
    return float(longest[-1])


def _refetches(problem: Intervals, start: int) -> tuple[Ints, Ints, Ints, Ints, Bools]:
    """Every use that may need a fetch, in unrolled moments: the use lies in ``[start, start + T)``.

    Returns (use, use before, release, bytes, whether a fetch is certain).
    """
    follows = problem.next_use >= 0
    use = problem.next_use[follows]
    shift = (use - start) // problem.periods * problem.periods
    firsts = np.asarray(problem.first_fetches, dtype=np.int64).reshape(-1, 3)
    first_bytes = problem.nbytes[np.searchsorted(problem.tensor, firsts[:, 0])]
    return (
        np.append(use - shift, firsts[:, 1]),
        np.append(problem.use[follows] - shift, np.full(len(firsts), -1)),
        np.append(problem.release[follows] - shift, firsts[:, 2]),
        np.append(problem.nbytes[follows], first_bytes),
        np.append(~problem.reused[follows], np.ones(len(firsts), dtype=bool)),
    )
