"""Which tensors have a place of their own on the device, that is filled again when the host has updated them.

Owns the choice, and what it does to a trace. Where updates begin in backward, the link could carry what has been
updated while backward still runs; but memory is full then of what backward is yet to use. A tensor with a place of its
own keeps it from use to use, so that nobody waits for memory; what the others lose by it is time, not bytes only.
Several numbers of them, spread evenly over the order of first use, are tried, each with a schedule of its own, and the
best is improved by exchanges; the simulated iteration decides. A pure function.

[Note: why spread] Forward needs each tensor for less time than the next one's copy takes. With every second one there
already, the others come in time.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from hetero.eviction.model import CapacityError, Schedule, Trace

__all__ = ["choose_renewed", "spare_bytes", "without_places"]

_MOST_MOMENTS = 40_000  # of all schedules tried together
_MOST_TRIALS = 96
_COUNTS, _FEW_COUNTS = 24, 6
_WORTH = 0.005  # share of the step that places must save to be worth it

Planner = Callable[[tuple[int, ...]], tuple[Trace, Schedule]]


def choose_renewed(order: Sequence[int], plan: Planner, *, thorough: bool = True) -> tuple[int, ...]:
    """Those of ``order`` (tensors by first use) whose places make the iteration shortest.

    ``plan(renewed)``: trace and schedule with these; may raise `CapacityError`. ``thorough``: not only a few numbers
    of them. Raises `CapacityError` if that happens for none.
    """
    trace, schedule = plan(())
    best: tuple[int, ...] = ()
    seconds = none = schedule.predicted_seconds
    left = min(_MOST_TRIALS, _MOST_MOMENTS // max(1, len(trace.moments)))
    known = {best: seconds}

    def predicted(places: tuple[int, ...]) -> float:
        nonlocal left
        if places not in known:
            left -= 1
            try:
                known[places] = plan(places)[1].predicted_seconds
            except CapacityError:
                known[places] = float("inf")
        return known[places]

    step = max(1, len(order) // (_COUNTS if thorough else _FEW_COUNTS))
    for count in range(step, len(order), step):
        places = _spread(order, count)
        if left <= 0 or predicted(places) == float("inf"):
            break
        if known[places] < seconds:
            best, seconds = places, known[places]
    while thorough and left > 0:
        found = best
        for places in _neighbours(order, best):
            if left > 0 and predicted(places) < seconds:
                best, seconds = places, known[places]
        if found == best:
            break
    return best if seconds < none * (1.0 - _WORTH) else ()


def spare_bytes(trace: Trace, schedule: Schedule) -> tuple[int, ...]:
    """From each moment to the optimizer's step, bytes that no planned copy takes; 0 where nothing is known of it."""
    if trace.updates is None:
        return (0,) * len(trace.moments)
    free, resident = [], set(schedule.start)
    for moment, actions in zip(trace.moments, schedule.actions, strict=True):
        resident.difference_update(moment.invalidates)
        resident.difference_update(actions.evict)
        resident.update(actions.fetch, moment.produces)
        free.append(moment.capacity - sum(trace.sizes[x] for x in resident))
    queued = trace.updates.queued
    free[queued] = trace.moments[queued].capacity  # what is there by then is fetched no more
    for now in range(queued - 1, -1, -1):
        free[now] = min(free[now], free[now + 1])
    return tuple(free)


def without_places(trace: Trace) -> Trace:
    """The same, with tensors that have a place of their own like any others."""
    updates = trace.updates
    if updates is None or not updates.renewed:
        return trace
    nbytes = sum(trace.sizes[x] for x in updates.renewed)
    moments = [
        replace(
            moment,
            operands=(*moment.operands, *moment.awaits),
            capacity=moment.capacity + nbytes,
            invalidates=(*moment.invalidates, *(updates.renewed if now == updates.queued else ())),
            awaits=(),
        )
        for now, moment in enumerate(trace.moments)
    ]
    return replace(trace, moments=tuple(moments), updates=replace(updates, renewed=()))


def _spread(order: Sequence[int], count: int) -> tuple[int, ...]:
    return tuple(order[(2 * j + 1) * len(order) // (2 * count)] for j in range(count))


def _neighbours(order: Sequence[int], places: tuple[int, ...]) -> list[tuple[int, ...]]:
    """One of them exchanged for the one used before it, or after; or without one."""
    there, found = set(places), []
    for x in places:
        at = order.index(x)
        for near in (at - 1, at + 1):
            if 0 <= near < len(order) and order[near] not in there:
                found.append(tuple(order[near] if y == x else y for y in places))
    for x in order:
        if x not in there:
            found.append(tuple(y for y in order if y in there or y == x))
    return found
