"""Which tensors have a place of their own on the device, that is filled again when the host has updated them.

Owns the choice, and what it does to a trace. Where updates begin in backward, the link could carry what has been
updated while backward still runs; but memory is full then of what backward is yet to use. A tensor with a place of its
own keeps it from use to use, so that nobody waits for memory; what the others lose by it is time, not bytes only.
Several numbers of them, spread evenly over the order of first use, are tried, each with a schedule of its own; the
simulated iteration decides. It ends after some in a row that were no better: where activations hold the iteration up,
each further place only takes memory from them. A pure function.

[Note: why spread] Forward needs each tensor for less time than the next one's copy takes. With every second one there
already, the others come in time.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from hetero.eviction.host_updates import early_sends
from hetero.eviction.model import WORTH, CapacityError, Schedule, Trace

__all__ = ["choose_places", "renewable", "spare_bytes", "spread", "without_places"]

_MOST_MOMENTS = 40_000  # of all schedules tried together
_COUNTS, _FEW_COUNTS = 24, 6
_PATIENCE, _FEW_PATIENCE = 6, 3  # numbers in a row that were no better

Planner = Callable[[tuple[int, ...]], tuple[Trace, Schedule]]


def choose_places(order: Sequence[int], plan: Planner, *, thorough: bool = True) -> tuple[int, ...]:
    """Those of ``order`` (tensors by first use) whose places make the iteration shortest.

    ``plan(places)``: trace and schedule with these; may raise `CapacityError`. ``thorough``: not only a few numbers
    of them. Raises `CapacityError` if that happens for none.
    """
    trace, schedule = plan(())
    best: tuple[int, ...] = ()
    seconds = none = schedule.predicted_seconds
    trials = min(_COUNTS if thorough else _FEW_COUNTS, 1 + _MOST_MOMENTS // max(1, len(trace.moments)))
    in_vain = 0
    for count in sorted({len(order) * trial // trials for trial in range(1, trials)} - {0}):
        places = spread(order, count)
        try:
            _, schedule = plan(places)
        except CapacityError:
            break
        if schedule.predicted_seconds < seconds:
            best, seconds, in_vain = places, schedule.predicted_seconds, 0
            continue
        in_vain += 1
        if in_vain >= (_PATIENCE if thorough else _FEW_PATIENCE):
            break
    return best if seconds < none * (1.0 - WORTH) else ()


def spare_bytes(trace: Trace, schedule: Schedule) -> tuple[int, ...]:
    """From each moment to the optimizer's step, bytes that no planned copy takes; 0 where nothing is known of it."""
    if trace.updates is None:
        return (0,) * len(trace.moments)
    free, queued = _free_bytes(trace, schedule), trace.updates.queued
    free[queued] = trace.moments[queued].capacity  # what is there by then is fetched no more
    for now in range(queued - 1, -1, -1):
        free[now] = min(free[now], free[now + 1])
    return tuple(free)


def renewable(trace: Trace, schedule: Schedule) -> tuple[int, ...]:
    """The tensors whose copies are renewed between gradient and step, where there are `spare_bytes`; those whose
    gradients leave first, first.

    As many as there is room for before the step, and such that each leaves room for every planned copy from the step to
    where the schedule would fetch its own. More would overfill the next forward, or drive out what it uses later.
    """
    updates, sends = trace.updates, early_sends(trace)
    if updates is None or not sends:
        return ()
    count, queued = len(trace.moments), updates.queued
    lost = frozenset(trace.moments[queued].invalidates)
    begins: dict[int, int] = {}  # counted from the step on
    for turn in range(count):
        for x in schedule.actions[(queued + turn) % count].fetch:
            begins.setdefault(x, turn)
    free = _free_bytes(trace, schedule)
    free = [*free[queued:], *free[:queued]]
    room = spare_bytes(trace, schedule)[max(sends.values()) + 1]
    found = []
    for x in sorted(sends, key=sends.__getitem__):
        nbytes = trace.sizes[x]
        if nbytes > room or x in updates.places or x not in lost or x not in begins:
            continue
        if any(nbytes > left for left in free[: begins[x]]):
            continue
        for turn in range(begins[x]):
            free[turn] -= nbytes
        room -= nbytes
        found.append(x)
    return tuple(found)


def _free_bytes(trace: Trace, schedule: Schedule) -> list[int]:
    """What planned copies leave in each moment."""
    free, resident, sizes = [], set(schedule.start), trace.sizes
    held = sum(sizes[x] for x in resident)
    for moment, actions in zip(trace.moments, schedule.actions, strict=True):
        for x in (*moment.invalidates, *actions.evict):
            if x in resident:
                resident.remove(x)
                held -= sizes[x]
        for x in (*actions.fetch, *moment.produces):
            if x not in resident:
                resident.add(x)
                held += sizes[x]
        free.append(moment.capacity - held)
    return free


def without_places(trace: Trace) -> Trace:
    """The same, with tensors that have a place of their own like any others."""
    updates = trace.updates
    if updates is None or not updates.places:
        return trace
    nbytes = sum(trace.sizes[x] for x in updates.places)
    moments = [
        replace(
            moment,
            operands=(*moment.operands, *moment.awaits),
            capacity=moment.capacity + nbytes,
            invalidates=(*moment.invalidates, *(updates.places if now == updates.queued else ())),
            awaits=(),
        )
        for now, moment in enumerate(trace.moments)
    ]
    return replace(trace, moments=tuple(moments), updates=replace(updates, places=()))


def spread(order: Sequence[int], count: int) -> tuple[int, ...]:
    """So many of ``order``, evenly, [Note: why spread]."""
    return tuple(order[(2 * j + 1) * len(order) // (2 * count)] for j in range(count))
