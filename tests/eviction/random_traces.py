"""Random traces for the property tests, schedules by hand, and an exhaustive search for the fewest bytes."""

from dataclasses import replace
from itertools import chain, combinations

from hypothesis import strategies as st

from hetero.eviction import Actions, Links, Moment, Schedule, Send, Trace, Updates

LINKS = Links(h2d_bandwidth=10.0, d2h_bandwidth=5.0, latency=0.01)
SIZES = st.integers(0, 9)
POLICIES = ("opt", "cost-opt", "lru", "fifo")


@st.composite
def traces(draw, *, tensors=7, moments=14, sizes=SIZES, clean=False, cyclic=None):
    count = draw(st.integers(1, tensors))
    nbytes = tuple(draw(st.lists(sizes, min_size=count, max_size=count)))
    ids = st.integers(0, count - 1)
    steps = []
    for _ in range(draw(st.integers(1, moments))):
        operands = tuple(draw(st.lists(ids, max_size=3)))
        needed = sum(nbytes[x] for x in set(operands))
        written = () if clean else tuple(x for x in dict.fromkeys(operands) if draw(st.integers(0, 3)) == 0)
        loses = not clean and draw(st.integers(0, 4)) == 0
        steps.append(
            Moment(
                operands=operands,
                seconds=draw(st.sampled_from([0.0, 0.5, 1.0])),
                capacity=needed + draw(st.integers(0, 15)),
                dirties=written,
                invalidates=tuple(draw(st.lists(ids, max_size=2, unique=True))) if loses else (),
            )
        )
    repeats = draw(st.booleans()) if cyclic is None else cyclic
    return Trace(sizes=nbytes, moments=tuple(steps), cyclic=repeats)


@st.composite
def traces_with_products(draw, *, products=4, **keywords):
    """As `traces`, beside tensors that come into being, are used a few times, and are gone."""
    trace = draw(traces(**keywords))
    count = len(trace.moments)
    sizes, moments = list(trace.sizes), list(trace.moments)
    for _ in range(draw(st.integers(1, products))):
        index, nbytes = len(sizes), draw(SIZES)
        birth = draw(st.integers(0, count - 1))
        uses = sorted({birth, *draw(st.lists(st.integers(birth, count - 1), max_size=3))})
        sizes.append(nbytes)
        for t in uses:
            moments[t] = replace(
                moments[t], operands=(*moments[t].operands, index), capacity=moments[t].capacity + nbytes
            )
        moments[birth] = replace(
            moments[birth],
            produces=(*moments[birth].produces, index),
            dirties=(*moments[birth].dirties, index),
        )
        gone = (uses[-1] + 1) % count
        moments[gone] = replace(moments[gone], invalidates=(*moments[gone].invalidates, index))
    return replace(trace, sizes=tuple(sizes), moments=tuple(moments))


@st.composite
def traces_with_updates(draw, *, tensors=6, again=False):
    """A forward, a backward from which gradients go home, and a step, whose updates may begin in that backward.

    Some tensors have a place of their own. ``again``: they may be used after their gradient has left, too.
    """
    count = draw(st.integers(1, tensors))
    nbytes = tuple(draw(st.lists(st.integers(1, 4), min_size=count, max_size=count)))
    places = draw(st.sets(st.integers(0, count - 1)))
    room = draw(st.sampled_from([0, 12, 60]))  # beside operands, at most
    moments = [_layer(draw, nbytes, places, {x}, room) for x in range(count)]
    for x in reversed(range(count)):
        late = draw(st.sets(st.integers(x + 1, count - 1), max_size=1)) if again and x + 1 < count else set()
        moments.append(_layer(draw, nbytes, places, {x, *late}, room))
        if draw(st.integers(0, 5)):  # without, it is stepped by a gradient that was there
            when = draw(st.sampled_from([0.0, 0.5, 1.0])) * moments[-1].seconds
            moments[-1] = replace(moments[-1], sends=(Send(tensor=x, nbytes=nbytes[x], seconds=when),))
    gone = tuple(x for x in range(count) if x not in places)
    moments += [
        _layer(draw, nbytes, places, set(), room),
        replace(_layer(draw, nbytes, places, set(), room), invalidates=gone),
    ]
    return Trace(
        sizes=nbytes,
        moments=tuple(moments),
        sending_bytes=draw(st.integers(0, 20)),
        updates=Updates(
            tensors=tuple(range(count)),
            seconds=tuple(draw(st.lists(st.sampled_from([0.01, 0.1, 1.0]), min_size=count, max_size=count))),
            queued=len(moments) - 1,
            finished=len(moments) - 2,
            early=draw(st.integers(0, 3)) > 0,
            copies=tuple(draw(st.lists(st.sampled_from([0.0, 0.1]), min_size=count, max_size=count))),
            places=tuple(sorted(places)),
        ),
    )


def _layer(draw, nbytes, places, used, room):
    operands = tuple(sorted(used - places))
    return Moment(
        operands=operands,
        awaits=tuple(sorted(used & places)),
        seconds=draw(st.sampled_from([0.0, 1.0, 4.0])),
        capacity=sum(nbytes[x] for x in operands) + draw(st.integers(room // 2, room)),
    )


def schedule_of(*actions, start=(), fetched=0, written_back=0):
    """By hand: (evicted, fetched) at each moment."""
    return Schedule(
        actions=tuple(Actions(evict=evict, fetch=fetch) for evict, fetch in actions),
        start=start,
        fetched_bytes=fetched,
        written_back_bytes=written_back,
        predicted_seconds=0.0,
        policy="by hand",
    )


def fewest_bytes(trace: Trace) -> int:
    """The optimum by trying every set of evictions at every moment; for three tensors, six moments or so."""
    if not trace.cyclic:
        return min(_costs(trace, (frozenset(), frozenset())).values())
    states = [
        (frozenset(resident), frozenset(dirty))
        for resident in _subsets(range(len(trace.sizes)))
        for dirty in _subsets(resident)
    ]
    returns = [_costs(trace, state).get(state) for state in states]
    return min(cost for cost in returns if cost is not None)


def _costs(trace, start):
    """Cheapest way to each (resident, dirty) at the end of the iteration."""
    costs = {start: 0}
    for moment in trace.moments:
        reached = {}
        lost, operands = frozenset(moment.invalidates), frozenset(moment.operands)
        for (resident, dirty), cost in costs.items():
            present, unsaved = resident - lost, dirty - lost
            for leaving in _subsets(present - operands):
                stays = present - set(leaving)
                missing = operands - stays - set(moment.produces)
                holds = stays | operands
                if sum(trace.sizes[x] for x in holds) > moment.capacity:
                    continue
                moved = sum(trace.sizes[x] for x in chain(missing, set(leaving) & unsaved))
                state = (holds, (unsaved & stays) | set(moment.dirties))
                reached[state] = min(reached.get(state, cost + moved), cost + moved)
        costs = reached
    return costs


def _subsets(items):
    items = sorted(items)
    return chain.from_iterable(combinations(items, size) for size in range(len(items) + 1))
