"""From a trace to a schedule: choose what to keep, place the transfers, predict the time, keep the best.

Owns `plan` and its search. Bytes kept free of reused copies (headroom) cost traffic but let transfers start
early, so several amounts are tried on the simulated step. It is a pure function: the same arguments give the
same schedule.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from hetero.eviction.intervals import Bools, Intervals, Ints, read_intervals
from hetero.eviction.model import WORTH, Links, Policy, Schedule, Trace
from hetero.eviction.policies import CostAware, FarthestNextUse, resolve_policy
from hetero.eviction.predictions import ROUNDS, Predictions
from hetero.eviction.selection import farthest_next_use, fewest_bytes
from hetero.eviction.sweep import sweep
from hetero.eviction.transfers import lay_out

__all__ = ["plan"]

_HEADROOMS = (0.0, 0.5, 1.0, 2.0, 4.0)  # in units of the largest copy
_AFFORDABLE_ACCESSES = 60_000  # accesses planned in all before the search for a better headroom stops


def plan(trace: Trace, *, links: Links, policy: str | Policy = "opt", prefetch: bool = True) -> Schedule:
    """The schedule for one iteration of ``trace``: the fewest bytes among the nearly fastest found.

    ``policy``: ``"opt"`` (Belady 1966), ``"cost-opt"`` (chooses intervals by their bytes, sizes and write
    backs), ``"lru"``, ``"fifo"``, or any `Policy`. ``prefetch=False`` starts every fetch at the moment of its
    use. Raises `CapacityError` (a `BudgetError`) if the operands of one moment alone do not fit.
    """
    problem = read_intervals(trace)
    chosen = resolve_policy(policy)
    found = list(_found(trace, problem, links, chosen, prefetch=prefetch))
    soon = min(schedule.predicted_seconds for schedule in found) * (1.0 + WORTH)
    near = [schedule for schedule in found if schedule.predicted_seconds <= soon]
    return min(near, key=lambda schedule: (schedule.moved_bytes, schedule.predicted_seconds))


def _found(
    trace: Trace, problem: Intervals, links: Links, policy: Policy, *, prefetch: bool
) -> Iterator[Schedule]:
    """Timed schedules for each headroom, lent to copies that fit after all, or spared for transfers; none after one
    in which the links hold nobody up: with more headroom there is more to move."""
    enough = sum(moment.seconds for moment in trace.moments) * (1.0 + WORTH)
    small = len(problem.use) * ROUNDS * len(_HEADROOMS) <= _AFFORDABLE_ACCESSES
    predictions = Predictions(trace, links)
    timed: dict[object, list[Schedule]] = {}  # many choices are the same: each is laid out once
    for headroom in _headrooms(problem) if prefetch else [0]:
        keep = _choose(problem, np.maximum(problem.room - headroom, 0), policy)
        for spare in (False, True) if headroom and small else (False,):
            choice = (keep.tobytes(), spare)
            if choice not in timed:
                layout = partial(lay_out, problem, keep, prefetch=prefetch, policy=policy.name, spare=spare)
                timed[choice] = predictions.rounds(layout, most=ROUNDS if prefetch and small else 1)
            for schedule in timed[choice]:
                yield replace(schedule, headroom=headroom)
            if any(found.predicted_seconds - found.issue_seconds <= enough for found in timed[choice]):
                return


def _choose(problem: Intervals, room: Ints, policy: Policy) -> Bools:
    if isinstance(policy, CostAware):
        return fewest_bytes(problem, room)
    if isinstance(policy, FarthestNextUse):
        return farthest_next_use(problem, room)
    return sweep(problem, room, policy)


def _headrooms(problem: Intervals) -> list[int]:
    """The amounts to try, as many as the size of the trace allows; a trace where all fits needs none."""
    if problem.all_fits(problem.room):
        return [0]
    affordable = max(1, _AFFORDABLE_ACCESSES // max(len(problem.use), 1))
    largest = int(problem.nbytes.max(initial=0))
    return sorted({round(share * largest) for share in _HEADROOMS[:affordable]})
