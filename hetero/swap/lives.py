"""Where the load of a swapped step is: when each variable is in memory, so that it can be placed.

Owns the translation of a `SwapPlan` into lives that `hetero.pool` places (the paper's section VI-C, SmartPool and
AutoSwap together). What comes back may come to another place; what is there when an iteration ends keeps its own.
"""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from hetero.pool.cycle import CyclicLife, plan_cycle
from hetero.pool.planner import Planner
from hetero.swap.model import Floats, Gap, Step, SwapPlan

__all__ = ["footprint", "resident_lives"]

_GRANULARITY = 512  # bytes, as of device allocators


def footprint(step: Step, plan: SwapPlan, planner: Planner) -> int:
    """Bytes of one memory in which ``planner`` places what ``plan`` leaves resident, iteration after iteration."""
    return plan_cycle(resident_lives(step, plan), planner, granularity=_GRANULARITY).nbytes


def resident_lives(step: Step, plan: SwapPlan) -> tuple[CyclicLife, ...]:
    """The stays in memory of all variables, by their begin in the simulated iteration of ``plan``, which repeats.

    A variable is there from the start of the operator that makes it, or of its transfer in, to the end of its last
    operator, or of its transfer out. A transfer out that never ended gains nothing.
    """
    period = float(plan.timeline.ends[step.span - 1])
    absences = _absences(step, plan, period)
    stays: list[tuple[float, float, int]] = []  # seconds, not before the iteration's begin; bytes
    for index, variable in enumerate(step.variables):
        begin = float(plan.timeline.starts[variable.begin])
        end = float(plan.timeline.ends[variable.end - 1])
        if variable.persistent and not absences[index]:
            begin, end = 0.0, period
        elif variable.persistent:  # one iteration, from the first return to the absence that it ends with
            (left, begin), *absences[index] = absences[index]
            end = left + period
        for left, returned in absences[index]:
            stays.append((begin, left, variable.nbytes))
            begin = returned
        stays.append((begin, end, variable.nbytes))
    return _counted(stays, period)


def _absences(step: Step, plan: SwapPlan, period: float) -> dict[int, list[tuple[float, float]]]:
    """From the end of each out to the start of its in, by variable, in order."""
    count, span, line = len(plan.swaps), step.span, plan.timeline
    after = np.array([swap.gap.after for swap in plan.swaps], dtype=np.int64)
    order = np.argsort(after, kind="stable").tolist()  # of the outs: `hetero.swap.schedule.Lowering`
    gaps: list[tuple[Gap, float, float]] = []
    for place, k in enumerate(order):
        gap = plan.swaps[k].gap
        out, back = span + place, span + count + k
        if line.ends[out] < 0:
            continue
        later = period if gap.before >= span else 0.0
        gaps.append((gap, float(line.ends[out]), float(line.starts[back]) + later))
    found: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for gap, left, returned in sorted(gaps, key=lambda each: each[0].after):
        found[gap.variable].append((left, max(left, returned)))
    return found


def _counted(stays: Sequence[tuple[float, float, int]], period: float) -> tuple[CyclicLife, ...]:
    """Their lengths in begins of others, as `hetero.pool.cycle` counts: what ends when another begins has ended."""
    # Moved by whole periods, so that what is equal stays equal.
    wrapped = sorted((begin % period, end - (begin - begin % period), nbytes) for begin, end, nbytes in stays)
    begins: Floats = np.array([begin for begin, _, _ in wrapped])
    lives = []
    for place, (_, end, nbytes) in enumerate(wrapped):
        until = int(np.searchsorted(begins, end, side="left"))
        if end > period:
            until = len(wrapped) + int(np.searchsorted(begins, end - period, side="left"))
        lives.append(CyclicLife(nbytes=nbytes, length=min(max(until - place, 1), len(wrapped))))
    return tuple(lives)
