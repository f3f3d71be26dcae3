"""The one plan under AutoSwap's rules: never worse than any it is given to begin with.

Owns the competition of all ways to choose: the training planner, AutoSwap's scores, and a search that begins with the
best of them and of the plans that the caller has (of a Bayesian optimisation, say); and the translation of a `SwapPlan`
into a schedule. All are simulated by the same program. AutoSwap's rules differ from training's in one point: a swap-in
waits for its memory by itself, in the middle of an operator if need be, where training's would have to wait for the
next.
"""

from collections.abc import Sequence
from dataclasses import replace

from hetero.eviction import Actions, Schedule, Trace
from hetero.simulate import Machine
from hetero.swap.candidates import THRESHOLD, all_gaps
from hetero.swap.evaluation import Evaluation
from hetero.swap.model import Gap, Step, SwapPlan
from hetero.swap.moments import OnePlan, judged, links_of, one_plan
from hetero.swap.search import search

__all__ = ["best_plan", "to_schedule"]

_AFFORDABLE_OPERATORS = 200_000  # simulated in all by the search


def best_plan(
    step: Step,
    limit: int,
    machine: Machine,
    *,
    start: Sequence[SwapPlan] = (),
    trained: OnePlan | None = None,
    threshold: int = THRESHOLD,
    clean: bool = False,
    trials: int = 600,
) -> OnePlan:
    """The fastest plan found for ``step`` under ``limit`` bytes, as AutoSwap would run it.

    ``start``: plans for the same step, limit and threshold; ``trained``: `one_plan`'s with the same arguments, if it
    is known. The result is not slower than any of them (nor, if ``clean``, than what they are without copies that are
    not needed). ``trials``: of the search, fewer for a long step. Raises `CapacityError` if what one operator uses does
    not fit.
    """
    trained = trained or one_plan(step, limit, machine, threshold=threshold, clean=clean)
    if trained.overhead == 0.0 and trained.schedule.moved_bytes == 0:
        return trained
    trace, links = trained.trace, links_of(machine)
    plans = [trained, judged(step, limit, trace, trained.schedule, links, patient=True)]
    evaluation = Evaluation(step, machine, limit)
    gaps = all_gaps(step, threshold=threshold)
    begun = list(start)
    chosen = _gaps_of(step, trained.schedule, gaps, threshold)
    begun += [evaluation.plan(chosen, method="plan", eager=eager) for eager in (False, True)]
    trials = min(trials, _AFFORDABLE_OPERATORS // step.span)
    for seed in (0, 1):
        found = search(evaluation, gaps, start=begun, trials=trials // 2, seed=seed)
        begun.append(found)
    schedule = to_schedule(step, trace, begun[-1], threshold=threshold)
    swapped = judged(step, limit, trace, schedule, links, patient=True)
    plans.append(swapped)
    if not clean:
        # Which steady state iterations fall into can depend on how the first one begins: this is that of the other.
        found = begun[-1]
        timed = replace(schedule, predicted_seconds=found.timeline.step_seconds)
        plans.append(replace(swapped, schedule=timed, timeline=found.timeline, overhead=found.overhead))
    best = min(plans, key=lambda plan: (plan.overhead, plan.schedule.moved_bytes))
    return replace(best, swaps=begun[-1])


def to_schedule(step: Step, trace: Trace, plan: SwapPlan, *, threshold: int = THRESHOLD) -> Schedule:
    """``plan`` as moments of ``trace`` (`to_trace` of ``step``): outs after the use, ins where they may start.

    The order of the ins stays: one that could start before another that is ahead of it in line starts with that.
    """
    span = step.span
    places = _places(step, threshold)
    evict: list[list[int]] = [[] for _ in range(span)]
    fetch: list[list[int]] = [[] for _ in range(span)]
    for swap in sorted(plan.swaps, key=lambda swap: swap.gap.after):
        evict[(swap.gap.after + 1) % span].append(places[swap.gap.variable])
    starts = [swap.release - (span if swap.gap.before >= span else 0) for swap in plan.swaps]
    for _ in range(2):  # the first in of an iteration is in line behind the last of the one before
        earliest = starts[-1] - span if starts else 0
        for place, start in enumerate(starts):
            earliest = starts[place] = max(start, earliest)
    early = [start < 0 for start in starts]
    for wanted in (False, True):  # those for the next iteration last
        for swap, start, is_early in zip(plan.swaps, starts, early, strict=True):
            if is_early == wanted:
                fetch[start % span].append(places[swap.gap.variable])
    actions = tuple(
        Actions(evict=tuple(out), fetch=tuple(back)) for out, back in zip(evict, fetch, strict=True)
    )
    return _totalled(trace, actions, plan.method)


def _totalled(trace: Trace, actions: tuple[Actions, ...], policy: str) -> Schedule:
    """The schedule of ``actions`` that repeats, with its bytes."""
    born = {x for moment in trace.moments for x in moment.produces}
    present = set(range(len(trace.sizes))) - born
    dirty: set[int] = set()
    start: tuple[int, ...] = ()
    fetched = written = 0
    # What is there when an iteration begins has settled after one, what is dirty after two.
    for _ in range(3):
        start = tuple(sorted(present))
        fetched = written = 0
        for moment, action in zip(trace.moments, actions, strict=True):
            present.difference_update(moment.invalidates)
            dirty.difference_update(moment.invalidates)
            written += sum(trace.sizes[x] for x in action.evict if x in dirty)
            dirty.difference_update(action.evict)
            present.difference_update(action.evict)
            present.update(moment.produces, action.fetch)
            fetched += sum(trace.sizes[x] for x in action.fetch)
            dirty.update(moment.dirties)
    return Schedule(
        actions=actions,
        start=start,
        fetched_bytes=fetched,
        written_back_bytes=written,
        predicted_seconds=0.0,
        policy=policy,
    )


def _gaps_of(step: Step, schedule: Schedule, gaps: Sequence[Gap], threshold: int) -> list[Gap]:
    """Those of ``gaps`` in which ``schedule`` has the variable away."""
    places = _places(step, threshold)
    leaves = {(x, t) for t, actions in enumerate(schedule.actions) for x in actions.evict}
    return [gap for gap in gaps if (places[gap.variable], (gap.after + 1) % step.span) in leaves]


def _places(step: Step, threshold: int) -> dict[int, int]:
    """The trace's tensor of each variable that may leave."""
    movable = [index for index, variable in enumerate(step.variables) if variable.nbytes >= threshold]
    return {index: place for place, index in enumerate(movable)}
