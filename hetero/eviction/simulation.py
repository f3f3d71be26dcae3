"""How long a step takes under a schedule, and what it holds in memory: a small event simulation.

Owns the timing model. Operators run one after another, and wait while the host issues transfers, as long as each of
these takes (`Links.issue`). Each direction of the link serves one transfer at a time, first come first served. A
fetch may start once its moment is reached and, if the same tensor is being written back, once that has ended. An
operator waits for its operands. A written-back copy occupies memory until the transfer has ended; a moment waits for
the oldest write backs only as long as its capacity demands it. Gradients go home by the same link, in the middle of a
period, and are waited for when too many are on their way. The host updates one tensor after another, each when its
gradient is there; a tensor that waits for its update is fetched when that is done, and fetches that could start
meanwhile go first (but `hetero.eviction.host_updates`, [Note: whose turn it is]). Copies that are renewed before the
step (`hetero.eviction.places`) displace no planned ones, so that no moment holds more than its capacity. It assumes a
valid schedule.
"""

import heapq
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from hetero.eviction.host_updates import HostUpdates, early_sends
from hetero.eviction.model import Links, Schedule, Trace
from hetero.eviction.places import renewable, spare_bytes

__all__ = ["Simulation", "Simulator", "simulate"]

_MOST_ITERATIONS = 8  # a cyclic schedule settles in two or three; a link that lags behind may take longer


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """One steady-state iteration (the first, if the trace is not cyclic).

    ``host_seconds``: of the host's updates; ``issue_seconds``: of the host, to issue transfers, while operators
    waited. ``stall_seconds[t]``: time that the operator of moment ``t`` waited, or the host for its sake.
    ``model_bytes[t]``: copies resident, on their way, or not yet written back when it ran.
    """

    step_seconds: float
    compute_seconds: float
    h2d_seconds: float
    d2h_seconds: float
    host_seconds: float
    issue_seconds: float
    stall_seconds: tuple[float, ...]
    model_bytes: tuple[int, ...]
    leaving_bytes: tuple[int, ...]

    @property
    def peak_bytes(self) -> int:
        """Of model data on the device, at most."""
        return max(self.model_bytes, default=0)

    @property
    def bound_seconds(self) -> float:
        """No overlap, however perfect, makes these bytes and operators faster than this."""
        return max(self.compute_seconds, self.h2d_seconds, self.d2h_seconds, self.host_seconds)


def simulate(trace: Trace, schedule: Schedule, links: Links) -> Simulation:
    """Run ``schedule`` until its step time repeats, and report the last iteration."""
    return Simulator(trace, links).run(schedule)


class Simulator:
    """`simulate`, for many schedules of one trace."""

    def __init__(self, trace: Trace, links: Links) -> None:
        self.trace, self.links = trace, links
        self.up_seconds = [links.h2d_seconds(nbytes) for nbytes in trace.sizes]
        self.early = frozenset(early_sends(trace))
        # Of each moment: what it waits for; what it sends, each with the time since the one before and on the link; the
        # time after the last of them.
        self.wanted = [(*m.operands, *m.awaits) if m.awaits else m.operands for m in trace.moments]
        self.sends: list[tuple[tuple[float, float, int, int], ...]] = []
        self.rest: list[float] = []
        for moment in trace.moments:
            run, sends = 0.0, []
            for send in moment.sends:
                seconds = links.d2h_seconds(send.nbytes)
                sends.append((send.seconds - run, seconds, send.tensor, send.nbytes))
                run = send.seconds
            self.sends.append(tuple(sends))
            self.rest.append(moment.seconds - run)

    def run(self, schedule: Schedule) -> Simulation:
        """As `simulate`."""
        run = _Run(self, schedule)
        result = run.iteration()
        if not self.trace.cyclic:
            return result
        for _ in range(_MOST_ITERATIONS):
            previous, result = result, run.iteration()
            if abs(result.step_seconds - previous.step_seconds) <= 1e-9 * previous.step_seconds:
                break
        return result


class _Run:
    """The state that crosses from one iteration to the next."""

    def __init__(self, simulator: Simulator, schedule: Schedule) -> None:
        trace = simulator.trace
        self.of, self.trace, self.links, self.schedule = simulator, trace, simulator.links, schedule
        self.sizes = trace.sizes
        self.clock = self.up_free = self.down_free = 0.0
        self.issued = 0  # transfers, in this iteration
        self.resident = sum(trace.sizes[x] for x in schedule.start)
        self.present = set(schedule.start)
        self.arrival: dict[int, float] = {}
        self.saved: dict[int, float] = {}
        self.dirty: set[int] = set()
        self.leaving: deque[tuple[float, int]] = deque()
        self.leaving_bytes = 0
        self.sending: deque[tuple[float, int]] = deque()
        self.sending_bytes = 0
        updates = trace.updates
        self.places = frozenset(() if updates is None else updates.places)
        self.ordered: list[tuple[float, int, int]] = []  # fetches of what is not updated yet: when it will be
        self.on_order: dict[int, int] = {}  # which of these it is, once that is known
        self.orders = 0
        # What is updated early and has no place: whose copies are renewed before the step; wait for room; have been.
        early = updates is not None and updates.early
        self.spare = spare_bytes(trace, schedule) if early else ()
        self.renewable = frozenset(renewable(trace, schedule))
        self.to_renew: deque[int] = deque()
        self.fresh: set[int] = set()
        self.fresh_bytes = 0
        self.host = None if updates is None else HostUpdates(updates, simulator.early, self.renewable)

    def iteration(self) -> Simulation:
        began, self.issued = self.clock, 0
        up = sum(map(self.of.up_seconds.__getitem__, self.places))
        down = compute = 0.0
        updates, queue = self.trace.updates, self.host
        host = 0.0 if updates is None else sum(updates.seconds)
        finished, queued = (-1, -1) if updates is None else (updates.finished, updates.queued)
        stalls: list[float] = []
        held: list[int] = []
        leaving: list[int] = []
        arrival, on_order, size = self.arrival, self.on_order, self.sizes.__getitem__
        steps = zip(
            self.trace.moments,
            self.schedule.actions,
            self.of.wanted,
            self.of.sends,
            self.of.rest,
            strict=True,
        )
        for now, (moment, actions, wanted, sends, rest) in enumerate(steps):
            reached = self.clock
            if queue is not None:
                if queue.due <= reached:
                    self._order(queue.begin_until(reached))
                if now == finished:
                    self.clock = queue.finish(reached)
                    self.to_renew.clear()  # the step fetches what it has room for
                if now == queued:
                    self._update(queue)
            if self.sending and moment.still_sending is not None:
                self._let_land(moment.still_sending)
            if moment.invalidates:
                self._invalidate(moment.invalidates)
            if now == queued:
                self.fresh.clear()
                self.fresh_bytes = 0
                self.to_renew.clear()
            if actions.evict:
                down += self._evict(actions.evict)
            if moment.produces:
                self.present.update(moment.produces)
                self.resident += sum(map(size, moment.produces))
            fetch = actions.fetch
            if fetch:
                if self.spare:
                    fetch = tuple([x for x in fetch if x not in self.present])
                self.resident += sum(map(size, fetch))
            if self.leaving:
                self._retire(reached)
                leaving.append(self.leaving_bytes)
                self._make_room(moment.capacity)
            else:
                leaving.append(0)
            if fetch:
                up += self._fetch(fetch)
            if self.to_renew:
                up += self._renew(self.spare[now], moment.capacity)
            start = self.clock
            if on_order:
                self._release_for(wanted)
            if arrival:
                for x in wanted:
                    if x in arrival:
                        arrived = arrival.pop(x)
                        if arrived > start:
                            start = arrived
            stalls.append(start - reached)
            held.append(self.resident + self.leaving_bytes)
            if sends:
                down += self._send(sends, start, rest)
                stalls[-1] += self.clock - start - moment.seconds
            else:
                self.clock = start + moment.seconds
            compute += moment.seconds
            if moment.dirties:
                self.dirty.update(moment.dirties)
        # While a backlog is still growing or draining, one iteration alone may be shorter than the steady
        # state.
        step = max(self.clock - began, compute, up, down, host) if self.trace.cyclic else self.clock - began
        return Simulation(
            step_seconds=step,
            compute_seconds=compute,
            h2d_seconds=up,
            d2h_seconds=down,
            host_seconds=host,
            issue_seconds=self.issued * self.links.issue,
            stall_seconds=tuple(stalls),
            model_bytes=tuple(held),
            leaving_bytes=tuple(leaving),
        )

    def _update(self, queue: HostUpdates) -> None:
        """The optimizer has stepped."""
        waiting = [x for x in self.places if x not in self.on_order and queue.is_to_come(x, self.clock)]
        queue.queue(self.clock)
        self._issue(len(self.places))  # all of which are filled anew
        for x in waiting:
            self._expect(x)

    def _expect(self, x: int) -> None:
        """A copy of what its update makes of it."""
        self.on_order[x] = 0
        assert self.host is not None
        if (ready := self.host.turn(x)) is not None:
            self._order([(ready, x)])

    def _order(self, updated: Iterable[tuple[float, int]]) -> None:
        """It is known when they are."""
        for ready, x in updated:
            if self.on_order.get(x) == 0:
                self.orders += 1
                self.on_order[x] = self.orders
                heapq.heappush(self.ordered, (ready, self.orders, x))

    def _lose(self, x: int) -> None:
        """Its gradient has been made, and its update begins early: the copy is worthless."""
        self.arrival.pop(x, None)
        self.on_order.pop(x, None)
        if x in self.places:
            self._expect(x)
        elif x in self.present:
            self.present.discard(x)
            self.resident -= self.sizes[x]
        if x in self.renewable:
            self.to_renew.append(x)

    def _renew(self, spare: int, capacity: int) -> float:
        """Order copies of what is being updated, as far as no planned one needs the memory before the step."""
        busy = 0.0
        while self.to_renew:
            x = self.to_renew[0]
            nbytes = self.sizes[x]
            if nbytes > spare - self.fresh_bytes or self.resident + self.leaving_bytes + nbytes > capacity:
                break
            self.to_renew.popleft()
            self.fresh.add(x)
            self.fresh_bytes += nbytes
            self.present.add(x)
            self.resident += nbytes
            self._expect(x)
            self._issue(1)
            busy += self.of.up_seconds[x]
        return busy

    def _send(self, sends: tuple[tuple[float, float, int, int], ...], start: float, rest: float) -> float:
        """Run the operator, sending gradients home on the way; returns how long these keep the link busy."""
        busy = 0.0
        clock, free, sending, most = start, self.down_free, self.sending, self.trace.sending_bytes
        for after, seconds, tensor, nbytes in sends:
            clock += after
            if clock > free:
                free = clock
            free += seconds
            if self.host is not None and self.host.land(tensor, free):
                self._lose(tensor)
            busy += seconds
            sending.append((free, nbytes))
            self.sending_bytes += nbytes
            self.clock = clock
            self._let_land(most)
            clock = self.clock
        self.down_free = free
        self.clock = clock + rest
        return busy

    def _let_land(self, most: int) -> None:
        """Wait until no more than ``most`` bytes of gradients are on their way."""
        sending = self.sending
        while sending and (sending[0][0] <= self.clock or self.sending_bytes > most):
            landed, gone = sending.popleft()
            if landed > self.clock:
                self.clock = landed
            self.sending_bytes -= gone

    def _release_for(self, operands: tuple[int, ...]) -> None:
        """Place the fetches on the link that could start by now, and those of ``operands``."""
        on_order, ordered, clock = self.on_order, self.ordered, self.clock
        wanted = {x for x in operands if x in on_order}
        assert self.host is not None
        for x in wanted:
            self._order(self.host.begin(x))
        while ordered and (wanted or ordered[0][0] <= clock):
            ready, number, x = heapq.heappop(ordered)
            if on_order.get(x) != number:
                continue
            on_order.pop(x, None)
            wanted.discard(x)
            self.up_free = self.arrival[x] = max(self.up_free, ready) + self.of.up_seconds[x]

    def _issue(self, transfers: int) -> None:
        self.issued += transfers
        self.clock += transfers * self.links.issue

    def _invalidate(self, tensors: tuple[int, ...]) -> None:
        for x in tensors:
            self.dirty.discard(x)
            if x in self.present and x not in self.fresh:
                self.present.discard(x)
                self.resident -= self.trace.sizes[x]
                self.arrival.pop(x, None)
                self.on_order.pop(x, None)

    def _evict(self, tensors: tuple[int, ...]) -> float:
        busy = 0.0
        for x in tensors:
            nbytes = self.trace.sizes[x]
            if x not in self.present:
                continue  # lost to an early update
            self.present.discard(x)
            self.resident -= nbytes
            self.arrival.pop(x, None)
            self.on_order.pop(x, None)
            if x not in self.dirty:
                continue
            self.dirty.discard(x)
            self._issue(1)
            seconds = self.links.d2h_seconds(nbytes)
            self.down_free = max(self.down_free, self.clock) + seconds
            self.saved[x] = self.down_free
            self.leaving.append((self.down_free, nbytes))
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
        seconds_of, saved, arrival, host, clock = (
            self.of.up_seconds,
            self.saved,
            self.arrival,
            self.host,
            self.clock,
        )
        if self.on_order:
            self._release_for(())
        free, issued, issue = self.up_free, clock, self.links.issue
        for x in tensors:
            seconds = seconds_of[x]
            busy += seconds
            issued += issue
            if issued > free:
                free = issued
            if host is not None and (host.is_late(x, clock) or (self.on_order and host.is_unconfirmed(x))):
                self._expect(x)
                continue
            if x in saved:  # home is current only once the write back has ended
                free = max(free, saved.pop(x))
            free += seconds
            arrival[x] = free
        self.present.update(tensors)
        self.up_free = free
        self._issue(len(tensors))
        return busy
