"""An eviction schedule of parameters as a program: sampling moments, operators, fetches and write backs.

Owns the translation of `hetero.eviction`'s nouns. Each moment becomes a compute task without time, which takes the
memory of what is produced and of the fetches that start there, and the operator, which waits for its operands; or the
latter alone, by AutoSwap's rules.
Memory that a moment may not use for model data is taken by its operator, so that one limit serves all. It plans
nothing.
"""

from collections import defaultdict
from dataclasses import dataclass, field

from hetero.errors import PlanError
from hetero.eviction.model import Links, Schedule, Trace
from hetero.simulate.program import Program, ProgramBuilder

__all__ = ["lower_schedule"]


def lower_schedule(
    trace: Trace, schedule: Schedule, links: Links, *, patient: bool = False
) -> tuple[Program, int]:
    """The program that follows a valid ``schedule`` of a cyclic ``trace``, and the memory limit in bytes to run
    it with.

    ``patient``: as AutoSwap's, a fetch waits for its memory by itself, in the middle of an operator if need be, and an
    operator takes its memory when its operands are there; otherwise moments take and wait for both, as in training. The
    limit is the largest capacity of any moment. The compute tasks are, for each moment in turn, the moment itself
    (unless ``patient``) and its operator. Raises `PlanError` for a trace without moments.
    """
    if not trace.moments:
        raise PlanError("a trace without moments has no step to time")
    lowering = _Lowering(trace, schedule, links, patient=patient)
    # Who is dirty, and in whose care a copy is, crosses from one iteration to the next: go round twice.
    lowering.walk(_Recorder())
    recorder = _Recorder()
    lowering.walk(recorder)
    return lowering.program(recorder), lowering.limit


@dataclass(slots=True)
class _Recorder:
    """What one walk around the cycle found."""

    write_backs: list[tuple[int, int]] = field(default_factory=list)  # (moment, tensor)
    freed: dict[int, int] = field(default_factory=lambda: defaultdict(int))  # bytes given up at a moment
    fetches: list[tuple[int, int]] = field(default_factory=list)


class _Lowering:
    def __init__(self, trace: Trace, schedule: Schedule, links: Links, *, patient: bool) -> None:
        self.trace, self.schedule, self.links, self.patient = trace, schedule, links, patient
        self.limit = max(moment.capacity for moment in trace.moments)
        self.present = set(schedule.start)
        self.dirty: set[int] = set()

    def walk(self, recorder: _Recorder) -> None:
        sizes = self.trace.sizes
        for t, (moment, actions) in enumerate(zip(self.trace.moments, self.schedule.actions, strict=True)):
            for x in moment.invalidates:
                self.dirty.discard(x)
                if x in self.present:
                    self.present.discard(x)
                    recorder.freed[t] += sizes[x]
            for x in actions.evict:
                self.present.discard(x)
                if x in self.dirty:
                    self.dirty.discard(x)
                    recorder.write_backs.append((t, x))
                else:
                    recorder.freed[t] += sizes[x]
            self.present.update(moment.produces)
            for x in actions.fetch:
                self.present.add(x)
                recorder.fetches.append((t, x))
            self.dirty.update(moment.dirties)

    def program(self, found: _Recorder) -> Program:
        trace, links = self.trace, self.links
        last = len(trace.moments) - 1
        taken = [self.limit - moment.capacity for moment in trace.moments]
        arriving: dict[int, int] = defaultdict(int)
        for t, moment in enumerate(trace.moments):
            arriving[t] += sum(trace.sizes[x] for x in moment.produces)
        for t, x in found.fetches if not self.patient else ():
            arriving[t] += trace.sizes[x]
        # What moment 0 gives up without a transfer is freed by the operator before it, in the iteration before.
        resident = sum(trace.sizes[x] for x in self.schedule.start) - found.freed[0]
        builder = ProgramBuilder(initial=resident + min(taken[last], taken[0]))
        moments, operators = [], []
        for t, moment in enumerate(trace.moments):
            coming = taken[(t + 1) % len(taken)]
            takes = arriving[t] + max(0, taken[t] - taken[t - 1])
            left = found.freed[(t + 1) % len(taken)] + max(0, taken[t] - coming)
            if not self.patient:
                moments.append(builder.add("compute", 0.0, allocates=takes))
                takes = 0
            operators.append(builder.add("compute", moment.seconds, allocates=takes, frees=left))
        writes: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for t, x in found.write_backs:
            nbytes = trace.sizes[x]
            task = builder.add("d2h", links.d2h_seconds(nbytes), frees=nbytes)
            builder.wait(task, operators[t - 1], lag=int(t == 0))
            writes[x].append((t, task))
        for t, x in found.fetches:
            seconds = links.h2d_seconds(trace.sizes[x])
            if self.patient:
                task = builder.add("h2d", seconds, allocates=trace.sizes[x])
                builder.wait(task, operators[t - 1], lag=int(t == 0))
            else:
                task = builder.add("h2d", seconds, after=[moments[t]])
            for lag, since in ((0, writes[x]), (1, writes[x])):
                before = [other for u, other in since if lag or u <= t]
                if before:
                    builder.wait(task, before[-1], lag=lag)
                    break
            use = self._next_use(x, t)
            if use is not None:
                builder.wait(operators[use % len(operators)], task, lag=int(use > last))
        return builder.build()

    def _next_use(self, x: int, t: int) -> int | None:
        """The first moment at or after ``t`` that needs ``x``, unrolled."""
        count = len(self.trace.moments)
        for u in range(t, t + count):
            if x in self.trace.moments[u % count].operands:
                return u
        return None
