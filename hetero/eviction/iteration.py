"""One plan for an iteration: parameters, and activations that may leave as far as the host has room for them.

Owns `plan_iteration` and the host's side: what activations that leave take there, and which of them have to stay so
that it fits. A pure function. What lives on the host anyway is not its concern: ``host_room`` is what is left.

[Note: slots] An activation's slot on the host is its own from the first time it leaves until it is gone; a slot is used
again by one of the same size, and kept from iteration to iteration (`hetero.stm.activations.slots`). So the host needs,
for each size, as many slots as are taken at once.
"""

import bisect
import functools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace

from hetero.eviction.bounds import lower_bound
from hetero.eviction.competition import compete
from hetero.eviction.model import WORTH, CapacityError, Links, Policy, Schedule, Trace
from hetero.eviction.planner import plan
from hetero.eviction.policies import CostAware, FarthestNextUse, resolve_policy
from hetero.eviction.simulation import simulate

__all__ = ["host_bytes", "plan_iteration", "with_alive"]

_FEW = 0.01  # share of the bytes that have to move in any case: as many more are not worth looking for others
_ROUNDS = 6  # of letting more of them stay

Planner = Callable[[Trace], Schedule]


def plan_iteration(
    trace: Trace,
    *,
    links: Links,
    policy: str | Policy = "opt",
    prefetch: bool = True,
    host_room: int | None = None,
    thorough: bool = True,
) -> Schedule:
    """The better of two schedules: with activations (what moments produce) that may leave, and without.

    ``host_room``: bytes that activations away may take on the host; None: any number. ``thorough``: let many choices
    compete under ``"opt"`` and ``"cost-opt"`` (`compete`); without, it is a matter of milliseconds. Raises
    `CapacityError` if the operands of one moment alone do not fit. If the device needs more to leave
    than ``host_room`` holds, the schedule takes more of the host than there is.
    """
    chosen = resolve_policy(policy)

    def quickly(some: Trace) -> Schedule:
        return plan(some, links=links, policy=chosen, prefetch=prefetch)

    def at_once(some: Trace, schedule: Schedule) -> float:
        """Seconds of the step if it took no time to issue transfers: what links and the host's updates make it."""
        if not links.issue:
            return schedule.predicted_seconds
        return simulate(some, schedule, replace(links, issue=0.0)).step_seconds

    def thoroughly(some: Trace) -> Schedule:
        first = quickly(some)
        if at_once(some, first) > goal * (1.0 + WORTH):
            return compete(some, links=links, goal=soonest, worth=WORTH)
        return frugally(some, first)

    def frugally(some: Trace, first: Schedule | None = None) -> Schedule:
        """There is no time to be won, perhaps bytes."""
        first = first or quickly(some)
        if first.moved_bytes <= least(some) * (1.0 + _FEW):
            return first
        other = plan(some, links=links, policy=CostAware())
        slower = other.predicted_seconds > first.predicted_seconds * (1.0 + WORTH)
        return first if slower or first.moved_bytes <= other.moved_bytes else other

    if not any(moment.produces for moment in trace.moments):
        return quickly(trace)
    competes = thorough and prefetch and isinstance(chosen, FarthestNextUse | CostAware)
    planner = thoroughly if competes else quickly
    unhindered = _unhindered(trace, links) if competes else None
    # Without what it takes to issue transfers, and with it.
    goal = at_once(trace, unhindered) if unhindered else 0.0
    soonest = unhindered.predicted_seconds if unhindered else 0.0
    least = functools.cache(lower_bound)
    try:
        without = quickly(with_alive(trace))
    except CapacityError:
        return _within(trace, planner, host_room)
    if competes and at_once(with_alive(trace), without) <= goal * (1.0 + WORTH):
        is_quick = without.predicted_seconds <= soonest * (1.0 + WORTH)
        if is_quick and without.moved_bytes <= least(trace) * (1.0 + _FEW):
            return without
        planner = frugally
    schedule = _within(trace, planner, host_room)
    if host_room is not None and host_bytes(trace, schedule) > host_room:
        return without
    if without.predicted_seconds > schedule.predicted_seconds * (1.0 + WORTH):
        return schedule
    is_as_quick = schedule.predicted_seconds <= without.predicted_seconds * (1.0 + WORTH)
    return schedule if is_as_quick and schedule.moved_bytes < without.moved_bytes else without


def _unhindered(trace: Trace, links: Links) -> Schedule:
    """With room for everything: operators, and what they wait for whatever the plan, such as the host's updates and the
    copies that these make worthless."""
    room = 2 * sum(trace.sizes)
    moments = tuple(replace(moment, capacity=max(moment.capacity, room)) for moment in trace.moments)
    return plan(replace(trace, moments=moments), links=links)


def host_bytes(trace: Trace, schedule: Schedule) -> int:
    """What the activations that leave under ``schedule`` take on the host, [Note: slots]."""
    return _slot_bytes(trace, _slots(trace, schedule))


def with_alive(trace: Trace, staying: Collection[int] | None = None) -> Trace:
    """The same, except that ``staying`` (None: all) of what moments produce cannot leave until it is worthless.

    While it is there, it is no tensor of the trace, but room that is taken: naming all of it at each moment takes time
    by the square of its number. What a next iteration starts with is named.
    """
    start = _left_at_end(trace)
    unnamed, named, taken = set[int](), dict[int, None](), 0
    moments = []
    for moment in trace.moments:
        for tensor in moment.invalidates:
            named.pop(tensor, None)
            if tensor in unnamed:
                unnamed.remove(tensor)
                taken -= trace.sizes[tensor]
        for tensor in moment.produces:
            if staying is not None and tensor not in staying:
                continue
            if tensor in start:
                named[tensor] = None
            elif tensor not in unnamed:
                unnamed.add(tensor)
                taken += trace.sizes[tensor]
        moments.append(
            replace(
                moment,
                capacity=moment.capacity - taken,
                operands=_without(unnamed, dict.fromkeys((*moment.operands, *named))),
                dirties=_without(unnamed, moment.dirties),
                produces=_without(unnamed, moment.produces),
            )
        )
    return replace(trace, moments=tuple(moments))


def _left_at_end(trace: Trace) -> set[int]:
    """Of what moments produce, what is there at the end of the iteration."""
    left = set[int]()
    for moment in trace.moments:
        left.difference_update(moment.invalidates)
        left.update(moment.produces)
    return left


def _without(unnamed: Collection[int], tensors: Iterable[int]) -> tuple[int, ...]:
    return tuple(tensor for tensor in tensors if tensor not in unnamed)


def _within(trace: Trace, planner: Planner, host_room: int | None) -> Schedule:
    """``planner``'s schedule, with as many activations staying as the host needs."""
    schedule = best = planner(trace)
    stays: set[int] = set()
    for _ in range(_ROUNDS if host_room is not None else 0):
        assert host_room is not None
        slots = _slots(trace, schedule)
        if _slot_bytes(trace, slots) <= host_room:
            return schedule
        stays.update(_too_many(trace, schedule, slots, host_room))
        try:
            schedule = planner(with_alive(trace, stays))
        except CapacityError:
            return best
        if host_bytes(trace, schedule) < host_bytes(trace, best):
            best = schedule
    return best


def _too_many(trace: Trace, schedule: Schedule, slots: "_Slots", host_room: int) -> list[int]:
    """Those of ``slots`` that have to stay: the ones that are away for the shortest time go first."""
    away = _seconds_away(trace, schedule)
    order = sorted(slots, key=lambda x: (away[x], x))

    def fits(count: int) -> bool:
        return _slot_bytes(trace, {x: slots[x] for x in order[count:]}) <= host_room

    return order[: bisect.bisect_left(range(len(order)), True, key=fits)]


_Slots = dict[int, tuple[int, int]]
"""Of each activation that leaves, the moments from its first leaving to its end, perhaps in the next iteration."""


def _slots(trace: Trace, schedule: Schedule) -> _Slots:
    produced = {x for moment in trace.moments for x in moment.produces}
    count = len(trace.moments)
    born: set[int] = set()
    first: dict[int, int] = {}
    slots: _Slots = {}
    for now in range(
        2 * count if trace.cyclic else count
    ):  # one may be born late and leave in the next iteration
        moment, actions = trace.moments[now % count], schedule.actions[now % count]
        for x in moment.invalidates:
            born.discard(x)
            if x in first:
                slots.setdefault(x, (first.pop(x), now))
        for x in actions.evict:
            if x in produced and x in born:
                first.setdefault(x, now)
        if now < count:
            born.update(moment.produces)
    for x, since in first.items():
        slots.setdefault(x, (since, since + count if trace.cyclic else count))
    return slots


def _slot_bytes(trace: Trace, slots: _Slots) -> int:
    """The sum over sizes of the most slots taken at once."""
    count = len(trace.moments)
    changes: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for x, (begin, end) in slots.items():
        for turn in (0, count) if trace.cyclic else (0,):  # an iteration later, the same again
            changes[trace.sizes[x]] += [(begin + turn, 1), (end + turn, -1)]
    total = 0
    for size, steps in changes.items():
        taken = most = 0
        for _, change in sorted(steps):  # what is given back at a moment can be taken there
            taken += change
            most = max(most, taken)
        total += size * most
    return total


def _seconds_away(trace: Trace, schedule: Schedule) -> dict[int, float]:
    """Operators' time in an iteration between each tensor's leaving and the start of its way back."""
    away: dict[int, float] = defaultdict(float)
    absent: dict[int, float] = {}
    clock = 0.0
    for moment, actions in zip(trace.moments, schedule.actions, strict=True):
        absent.update(dict.fromkeys(actions.evict, clock))
        for x in (*actions.fetch, *moment.invalidates):
            if x in absent:
                away[x] += clock - absent.pop(x)
        clock += moment.seconds
    return away
