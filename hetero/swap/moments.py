"""A step as the training planner takes it (`hetero.eviction`), and its plan judged like the others.

Owns the translation: operators become moments, variables of at least the threshold become tensors that are produced,
used and gone, and all else comes off the capacity. Under that planner transfers start where an operator begins, not in
the middle of one, as in training. ``clean``: what was not written since it was last copied down leaves for nothing;
AutoSwap copies every time.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from hetero.eviction import Links, Moment, Schedule, Trace, compete
from hetero.simulate import Machine, Timeline, lower_schedule, simulate_program
from hetero.swap.candidates import THRESHOLD
from hetero.swap.model import Step, SwapPlan, Variable

__all__ = ["OnePlan", "judged", "links_of", "one_plan", "to_trace"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OnePlan:
    """A schedule for a step under ``limit``; ``overhead`` as in `SwapPlan`.

    ``swaps``: the best plan in AutoSwap's form that was looked at on the way, from which others may begin.
    """

    limit: int
    trace: Trace
    schedule: Schedule
    timeline: Timeline = field(compare=False)
    overhead: float
    swaps: SwapPlan | None = field(default=None, compare=False, repr=False)


def one_plan(
    step: Step,
    limit: int,
    machine: Machine,
    *,
    threshold: int = THRESHOLD,
    clean: bool = False,
    planner: Callable[..., Schedule] = compete,
) -> OnePlan:
    """What training would plan for ``step`` under ``limit`` bytes, simulated by `hetero.simulate`.

    ``planner``: `hetero.eviction.compete`, or another with its arguments. Raises `CapacityError` if what one operator
    uses does not fit.
    """
    trace = to_trace(step, limit, threshold=threshold, clean=clean)
    links = links_of(machine)
    schedule = planner(trace, links=links)
    return judged(step, limit, trace, schedule, links)


def judged(
    step: Step, limit: int, trace: Trace, schedule: Schedule, links: Links, *, patient: bool = False
) -> OnePlan:
    """``schedule``, simulated. ``patient``: under AutoSwap's rules instead of training's (`lower_schedule`)."""
    program, most = lower_schedule(trace, schedule, links, patient=patient)
    timeline = simulate_program(program, limit=most)
    return OnePlan(
        limit=limit,
        trace=trace,
        schedule=replace(schedule, predicted_seconds=timeline.step_seconds),
        timeline=timeline,
        overhead=step.overhead(timeline.step_seconds),
    )


def links_of(machine: Machine) -> Links:
    """Both directions of the machine's link."""
    return Links(
        h2d_bandwidth=_bandwidth(machine.h2d.seconds_per_byte),
        d2h_bandwidth=_bandwidth(machine.d2h.seconds_per_byte),
        latency=machine.h2d.latency,
        d2h_latency=machine.d2h.latency,
    )


def to_trace(step: Step, limit: int, *, threshold: int = THRESHOLD, clean: bool = False) -> Trace:
    """``step`` under ``limit`` bytes in all, with variables of ``threshold`` bytes and more free to leave."""
    span = step.span
    fixed = step.load.copy()
    movable = [v for v in step.variables if v.nbytes >= threshold]
    moments = [Moment(operands=(), seconds=seconds, capacity=0) for seconds in step.seconds]
    operands: list[list[int]] = [[] for _ in range(span)]
    dirties: list[list[int]] = [[] for _ in range(span)]
    produces: list[list[int]] = [[] for _ in range(span)]
    invalidates: list[list[int]] = [[] for _ in range(span)]
    for index, variable in enumerate(movable):
        fixed[variable.begin : variable.end] -= variable.nbytes
        uses = _present(variable, span)
        written = variable.accesses if not clean or variable.writes is None else variable.writes
        for t in uses:
            operands[t].append(index)
        for t in {*written, *(() if variable.persistent else uses[:1])}:
            dirties[t].append(index)
        if not variable.persistent:
            produces[variable.begin].append(index)
            invalidates[variable.end % span].append(index)
    return Trace(
        sizes=tuple(v.nbytes for v in movable),
        moments=tuple(
            replace(
                moment,
                operands=tuple(operands[t]),
                capacity=int(limit - fixed[t]),
                dirties=tuple(dirties[t]),
                produces=tuple(produces[t]),
                invalidates=tuple(invalidates[t]),
            )
            for t, moment in enumerate(moments)
        ),
    )


def _present(variable: Variable, span: int) -> list[int]:
    """Operators during which it cannot be away: its uses, and what follows the last of one that is not persistent."""
    uses = list(variable.accesses)
    if variable.persistent:
        return uses or list(range(span))
    if variable.begin not in uses[:1]:
        uses.insert(0, variable.begin)
    return [*uses, *range(uses[-1] + 1, variable.end)]


def _bandwidth(seconds_per_byte: float) -> float:
    return 1.0 / seconds_per_byte if seconds_per_byte > 0.0 else float("inf")
