"""How low a limit can be at which swapping costs no time: a bound that holds for every planner.

Owns the argument. If no operator is late, all of them run when they do without swaps. What is away at an instant had to
leave before: of the gaps around it, those whose use ended at u or later went through the link between u and the instant,
one after another; and those needed at v or earlier come back between the instant and v. So much may be away then,
as a fractional linear program for the instant by itself; a whole plan can only do worse. Looked at are the begin and
the end of each operator: in between, transfers under way change what is away.
"""

import numpy as np
from scipy.optimize import linprog

from hetero.simulate import Machine
from hetero.swap.candidates import THRESHOLD, all_gaps
from hetero.swap.model import Floats, Gap, Step

__all__ = ["lower_bound_limit"]


def lower_bound_limit(step: Step, machine: Machine, *, threshold: int = THRESHOLD) -> int:
    """Bytes below which no plan over variables of ``threshold`` bytes and more has zero overhead."""
    gaps = all_gaps(step, threshold=threshold)
    bound = 0
    for t in np.argsort(-step.load, kind="stable").tolist():
        load = int(step.load[t])
        if load <= bound:
            break
        covering = [gap for gap in gaps if gap.covers(t, step.span)]
        # The solver's tolerance is relative 1e-7 of the bytes away; a byte more keeps the bound valid.
        away = min(
            _most_away(step, machine, covering, t, instant) for instant in (step.begin_of(t), step.end_of(t))
        )
        bound = max(bound, load - int(away * (1 + 1e-7)) - 1)
    return bound


def _most_away(step: Step, machine: Machine, gaps: list[Gap], t: int, instant: float) -> float:
    left: list[float] = []  # seconds from the use's end to the instant, and from there to the next use
    right: list[float] = []
    fits: list[Gap] = []
    for gap in gaps:
        turn = step.total_seconds if t <= gap.after else 0.0  # t lies in the part behind the iteration's end
        before = instant + turn - step.end_of(gap.after)
        after = step.begin_of(gap.before) - instant - turn
        if before >= machine.d2h.seconds(gap.nbytes) and after >= machine.h2d.seconds(gap.nbytes):
            fits.append(gap)
            left.append(before)
            right.append(after)
    if not fits:
        return 0.0
    nbytes = np.array([gap.nbytes for gap in fits], dtype=np.float64)
    rows = [
        *_capacity(np.array(left), np.array([machine.d2h.seconds(gap.nbytes) for gap in fits])),
        *_capacity(np.array(right), np.array([machine.h2d.seconds(gap.nbytes) for gap in fits])),
    ]
    if not rows:
        return float(nbytes.sum())
    matrix = np.array([row for row, _ in rows])
    room = np.array([seconds for _, seconds in rows])
    scale = nbytes.max()
    result = linprog(-nbytes / scale, A_ub=matrix, b_ub=room, bounds=(0.0, 1.0), method="highs")
    return float(-result.fun * scale) if result.status == 0 else float(nbytes.sum())


def _capacity(distance: Floats, seconds: Floats) -> list[tuple[Floats, float]]:
    """All gaps at most so far away share that time of the link: a row for each distance that can bind."""
    order = np.argsort(distance, kind="stable")
    total = np.cumsum(seconds[order])
    rows = []
    for place, index in enumerate(order.tolist()):
        last = place + 1 == len(order) or distance[order[place + 1]] > distance[index]
        if last and total[place] > distance[index]:
            rows.append((np.where(distance <= distance[index], seconds, 0.0), float(distance[index])))
    return rows
