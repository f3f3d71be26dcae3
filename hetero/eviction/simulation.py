"""How long a step takes under a schedule, and what it holds in memory: a small event simulation.

Owns the timing model. Operators run one after another. Each direction of the link serves one transfer at a
time, first come first served. A fetch may start once its moment is reached and, if the same tensor is being
written back, once that has ended. An operator waits for its operands. A written-back copy occupies memory
until the transfer has ended; a moment waits for the oldest write backs only as long as its capacity demands
it. It assumes a valid schedule.
"""

from collections import deque
from dataclasses import dataclass

from hetero.eviction.model import Links, Schedule, Trace

__all__ = ["Simulation", "simulate"]

_MOST_ITERATIONS = 8  # a cyclic schedule settles in two or three; a link that lags behind may take longer


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """One steady-state iteration (the first, if the trace is not cyclic).

    ``stall_seconds[t]``: time that the operator of moment ``t`` waited for transfers. ``model_bytes[t]``:
    copies resident, on their way, or not yet written back when it ran.
    """

    step_seconds: float
    compute_seconds: float
    h2d_seconds: float
    d2h_seconds: float
    stall_seconds: tuple[float, ...]
    model_bytes: tuple[int, ...]
    leaving_bytes: tuple[int, ...]

    @property
    def peak_bytes(self) -> int:
        return max(self.model_bytes, default=0)

    @property
    def bound_seconds(self) -> float:
        """No overlap, however perfect, makes these bytes and operators faster than this."""
        return max(self.compute_seconds, self.h2d_seconds, self.d2h_seconds)


def simulate(trace: Trace, schedule: Schedule, links: Links) -> Simulation:
    """Run ``schedule`` until its step time repeats, and report the last iteration."""
    run = _Run(trace, schedule, links)
    result = run.iteration()
    if not trace.cyclic:
        return result
    for _ in range(_MOST_ITERATIONS):
        previous, result = result, run.iteration()
        if abs(result.step_seconds - previous.step_seconds) <= 1e-9 * previous.step_seconds:
            break
    return result


class _Run:
    """The state that crosses from one iteration to the next."""

    def __init__(self, trace: Trace, schedule: Schedule, links: Links) -> None:
        self.trace, self.schedule, self.links = trace, schedule, links
        self.clock = self.down_free = self.up_free = 0.0
        self.resident = sum(trace.sizes[x] for x in schedule.start)
        self.present = set(schedule.start)
        self.arrival: dict[int, float] = {}
        self.saved: dict[int, float] = {}
        self.dirty: set[int] = set()
        self.leaving: deque[tuple[float, int]] = deque()
        self.leaving_bytes = 0

    def iteration(self) -> Simulation:
        began = self.clock
        down = up = compute = 0.0
        stalls: list[float] = []
        held: list[int] = []
        leaving: list[int] = []
        arrival = self.arrival
        for moment, actions in zip(self.trace.moments, self.schedule.actions, strict=True):
            reached = self.clock
            if moment.invalidates:
                self._invalidate(moment.invalidates)
            if actions.evict:
                up += self._evict(actions.evict)
            if moment.produces:
                self.present.update(moment.produces)
                self.resident += sum(map(self.trace.sizes.__getitem__, moment.produces))
            if actions.fetch:
                self.resident += sum(map(self.trace.sizes.__getitem__, actions.fetch))
            if self.leaving:
                self._retire(reached)
                leaving.append(self.leaving_bytes)
                self._make_room(moment.capacity)
            else:
                leaving.append(0)
            if actions.fetch:
                down += self._fetch(actions.fetch)
            start = self.clock
            if arrival:
                for x in moment.operands:
                    if x in arrival:
                        arrived = arrival.pop(x)
                        start = arrived if arrived > start else start
            stalls.append(start - reached)
            held.append(self.resident + self.leaving_bytes)
            self.clock = start + moment.seconds
            compute += moment.seconds
            if moment.dirties:
                self.dirty.update(moment.dirties)
        # While a backlog is still growing or draining, one iteration alone may be shorter than the steady
        # state.
        step = max(self.clock - began, compute, down, up) if self.trace.cyclic else self.clock - began
        return Simulation(
            step_seconds=step,
            compute_seconds=compute,
            h2d_seconds=down,
            d2h_seconds=up,
            stall_seconds=tuple(stalls),
            model_bytes=tuple(held),
            leaving_bytes=tuple(leaving),
        )

    def _invalidate(self, tensors: tuple[int, ...]) -> None:
        for x in tensors:
            self.dirty.discard(x)
            if x in self.present:
                self.present.discard(x)
                self.resident -= self.trace.sizes[x]
                self.arrival.pop(x, None)

    def _evict(self, tensors: tuple[int, ...]) -> float:
        busy = 0.0
        for x in tensors:
            nbytes = self.trace.sizes[x]
            self.present.discard(x)
            self.resident -= nbytes
            self.arrival.pop(x, None)
            if x not in self.dirty:
                continue
            self.dirty.discard(x)
            seconds = self.links.d2h_seconds(nbytes)
            self.up_free = max(self.up_free, self.clock) + seconds
            self.saved[x] = self.up_free
            self.leaving.append((self.up_free, nbytes))
            self.leaving_bytes += nbytes
            busy += seconds
        return busy

    def _retire(self, now: float) -> None:
        """Let go of the write backs that have ended."""
        while self.leaving and self.leaving[0][0] <= now:
            self.leaving_bytes -= self.leaving.popleft()[1]

    def _make_room(self, capacity: int) -> None:
        """Wait for the oldest write backs, as many as the capacity demands."""
        while self.leaving and self.resident + self.leaving_bytes > capacity:
            self.clock = max(self.clock, self.leaving[0][0])
            self._retire(self.clock)

    def _fetch(self, tensors: tuple[int, ...]) -> float:
        busy = 0.0
        latency, bandwidth = self.links.latency, self.links.h2d_bandwidth
        sizes, saved = self.trace.sizes, self.saved
        free = max(self.down_free, self.clock)
        for x in tensors:
            seconds = latency + sizes[x] / bandwidth
            if x in saved:  # home is current only once the write back has ended
                free = max(free, saved.pop(x))
            free += seconds
            self.arrival[x] = free
            busy += seconds
        self.present.update(tensors)
        self.down_free = free
        return busy
