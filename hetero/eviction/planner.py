"""From a trace to a schedule: choose what to keep, place the transfers, predict the time, keep the best.

Owns `plan` and the search over headrooms. Bytes kept free of reused copies cost traffic but let transfers
start early; several amounts are tried and the fastest simulated step wins, fewer bytes deciding between
equals. It is a pure function: the same arguments give the same schedule.
"""

from dataclasses import replace

import numpy as np

from hetero.eviction.intervals import Bools, Intervals, Ints, read_intervals
from hetero.eviction.model import Links, Policy, Schedule, Trace
from hetero.eviction.policies import CostAware, FarthestNextUse, resolve_policy
from hetero.eviction.selection import farthest_next_use, fewest_bytes
from hetero.eviction.simulation import simulate
from hetero.eviction.sweep import sweep
from hetero.eviction.transfers import lay_out

__all__ = ["plan"]


def plan(trace: Trace, *, links: Links, policy: str | Policy = "opt", prefetch: bool = True) -> Schedule:
    """The schedule for one iteration of ``trace``.

    ``policy``: ``"opt"`` (Belady 1966), ``"cost-opt"`` (chooses intervals by their bytes, sizes and write
    backs), ``"lru"``, ``"fifo"``, or any `Policy`. ``prefetch=False`` starts every fetch at the moment of its
    use. Raises `CapacityError` (a `BudgetError`) if the operands of one moment alone do not fit.
    """
    problem = read_intervals(trace)
    chosen = resolve_policy(policy)
    best: Schedule | None = None
    for headroom in _headrooms(problem) if prefetch else [0]:
        room = np.maximum(problem.room - headroom, 0)
        keep = _choose(problem, room, chosen)
        schedule = lay_out(problem, keep, prefetch=prefetch, policy=chosen.name)
        seconds = simulate(trace, schedule, links).step_seconds
        schedule = replace(schedule, predicted_seconds=seconds, headroom=headroom)
        if best is None or (seconds, schedule.moved_bytes) < (best.predicted_seconds, best.moved_bytes):
            best = schedule
    assert best is not None
    return best


def _choose(problem: Intervals, room: Ints, policy: Policy) -> Bools:
    if isinstance(policy, CostAware):
        return fewest_bytes(problem, room)
    if isinstance(policy, FarthestNextUse):
        return farthest_next_use(problem, room)
    return sweep(problem, room, policy)


def _headrooms(problem: Intervals) -> list[int]:
    largest = int(problem.nbytes.max(initial=0))
    return sorted({0, largest, 2 * largest, 4 * largest})
