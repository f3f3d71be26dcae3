"""Updates that begin in backward: what a moment holds, which of them begin early, and what no schedule can beat."""

from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest
from chains import chain, links
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st
from random_traces import LINKS, POLICIES, traces_with_updates

from hetero.errors import PlanError
from hetero.eviction import (
    Actions,
    Links,
    Moment,
    Schedule,
    Send,
    Trace,
    Updates,
    check,
    leave_link_free,
    lower_bound,
    lower_bound_seconds,
    plan,
    renewable,
    simulate,
    spare_bytes,
    without_places,
)
from hetero.eviction.fluid import fluid
from hetero.eviction.host_updates import HostUpdates, early_sends
from hetero.eviction.intervals import read_intervals
from hetero.eviction.reach import read_reachable
from hetero.eviction.sweep import repair
from hetero.eviction.transfers import lay_out

SLOW = Links(h2d_bandwidth=1.0, d2h_bandwidth=2.0, latency=0.25)
BOTH = st.sampled_from([LINKS, SLOW])
TRACES = st.one_of(traces_with_updates(), traces_with_updates(again=True))


def any_schedule(data, trace):
    """One that the planner need not like."""
    problem = read_intervals(trace)
    stays = np.array(
        data.draw(st.lists(st.booleans(), min_size=len(problem.use), max_size=len(problem.use))), dtype=bool
    )
    # Nothing is to be decided between a use and the next moment's.
    keep = repair(problem, problem.room, problem.reused & (stays | (problem.end == problem.begin)))
    schedule = lay_out(problem, keep, prefetch=data.draw(st.booleans()), policy="random")
    check(trace, schedule)
    return schedule


@settings(max_examples=300, deadline=None)
@given(trace=TRACES, links=BOTH, policy=st.sampled_from(POLICIES), data=st.data())
def test_no_moment_holds_more_than_its_capacity(trace, links, policy, data):
    for schedule in (plan(trace, links=links, policy=policy), any_schedule(data, trace)):
        result = simulate(trace, schedule, links)
        for moment, nbytes in zip(trace.moments, result.model_bytes, strict=True):
            assert nbytes <= moment.capacity


def residents(trace, schedule):
    """What is planned to be there in each moment, by replaying two iterations."""
    found, there = [], set()
    for now in range(2 * len(trace.moments)):
        now %= len(trace.moments)
        there -= {*trace.moments[now].invalidates, *schedule.actions[now].evict}
        there |= {*schedule.actions[now].fetch}
        found.append(set(there))
    return found[len(trace.moments) :]


@settings(max_examples=200, deadline=None)
@given(trace=TRACES, policy=st.sampled_from(POLICIES))
def test_what_may_be_renewed_early_fits_beside_everything_planned_until_it_would_be_fetched(trace, policy):
    schedule = plan(trace, links=SLOW, policy=policy)
    planned, early = residents(trace, schedule), set(renewable(trace, schedule))
    event(f"renewable: {bool(early)}")
    count, queued = len(trace.moments), trace.updates.queued
    assert early <= {*trace.moments[queued].invalidates} - {*trace.updates.places}
    for turn in range(count):
        now = (queued + turn) % count
        early -= planned[now]
        held = sum(trace.sizes[x] for x in planned[now] | early)
        assert held <= trace.moments[now].capacity
    assert not early
    spare = spare_bytes(trace, schedule)
    assert all(more >= less for less, more in pairwise(spare[: queued + 1]))


def test_what_fits_the_step_and_not_the_next_forward_is_not_renewed_early():
    """Two layers of 4 bytes; 10 at the step, 6 in the first forward."""

    def layer(x, capacity, sends=()):
        return Moment(operands=(x,), seconds=9.0, capacity=capacity, sends=sends)

    def ends(x):
        return (Send(tensor=x, nbytes=4, seconds=0.0),)

    def trace(capacity):
        return Trace(
            sizes=(4, 4),
            moments=(
                layer(0, capacity),
                layer(1, 10),
                layer(1, 10, ends(1)),
                layer(0, 10, ends(0)),
                Moment(operands=(), capacity=10, seconds=9.0),
                Moment(operands=(), capacity=10, invalidates=(0, 1)),
            ),
            sending_bytes=8,
            updates=Updates(tensors=(0, 1), seconds=(0.1, 0.1), queued=5, finished=4, early=True),
        )

    for capacity, expected in ((6, {0}), (8, {0, 1})):
        some = trace(capacity)
        schedule = plan(some, links=LINKS)
        assert set(renewable(some, schedule)) == expected
        assert simulate(some, schedule, LINKS).model_bytes[0] == 4 * len(expected)


def test_of_what_is_fetched_first_that_is_renewed_early_whose_gradient_leaves_first():
    """Eight layers, of which the device holds five, and two behind backward: gradients take the room of three."""
    whole = chain(8, 5)
    narrow = 2 * whole.sizes[0]
    moments = [
        replace(m, capacity=narrow if now >= 16 else m.capacity) for now, m in enumerate(whole.moments)
    ]
    trace = replace(whole, moments=tuple(moments))
    copies = links(1.5)  # longer than a layer's forward
    schedule = leave_link_free(trace, plan(trace, links=copies), copies, seconds=0.0)
    assert set(schedule.actions[0].fetch) == {0, 1, 2, 3, 4}
    assert renewable(trace, schedule) == (4, 3)
    late = replace(trace, updates=replace(trace.updates, early=False))
    assert renewable(late, schedule) == ()
    # The next forward has two fewer to fetch.
    seconds = simulate(trace, schedule, copies).step_seconds
    moments[16] = replace(moments[16], capacity=0)
    nobody = replace(trace, moments=tuple(moments))
    assert renewable(nobody, schedule) == ()
    assert seconds < simulate(nobody, schedule, copies).step_seconds


@settings(max_examples=200, deadline=None)
@given(trace=TRACES)
def test_a_tensor_that_is_used_again_or_has_two_gradients_is_not_updated_early(trace):
    sends = early_sends(trace)
    if not trace.updates.early:
        assert not sends
        return
    for x in trace.updates.tensors:
        at = [now for now, moment in enumerate(trace.moments) for send in moment.sends if send.tensor == x]
        uses = [now for now, moment in enumerate(trace.moments) if x in (*moment.operands, *moment.awaits)]
        alone = len(at) == 1 and at[0] < trace.updates.queued
        assert (x in sends) == (alone and not any(at[0] < use < trace.updates.queued for use in uses))
        assert x not in sends or sends[x] == at[0]


# -- bounds ---------------------------------------------------------------------------------------------


@settings(max_examples=250, deadline=None)
@given(trace=TRACES, links=BOTH, checkpoints=st.sampled_from([1, 2, 5, 64]), data=st.data())
def test_no_schedule_is_faster_than_the_bounds_with_places_and_without(trace, links, checkpoints, data):
    schedules = (
        plan(trace, links=links, policy=data.draw(st.sampled_from(POLICIES))),
        any_schedule(data, trace),
    )
    fastest = min(simulate(trace, schedule, links).step_seconds for schedule in schedules)
    for some in (trace, without_places(trace)):
        assert fastest >= fluid(some, links, checkpoints=checkpoints).step_seconds * (1 - 1e-9)
        assert fastest >= lower_bound_seconds(some, links) * (1 - 1e-9)


def every_schedule(trace):
    """Each choice of what stays, and of the moment at which each fetch starts."""
    problem = read_intervals(trace)
    count = len(trace.moments)
    free = problem.reused & (problem.end > problem.begin)
    for stays in product((False, True), repeat=int(free.sum())):
        keep = problem.reused.copy()
        keep[free] = stays
        starts = [
            range(int(problem.release[j]), int(problem.next_use[j]) + 1)
            for j in np.flatnonzero(~keep & (problem.next_use >= 0))
        ]
        if (problem.load(keep) > problem.room).any() or np.prod([len(each) for each in starts]) > 400:
            continue
        for chosen in product(*starts):
            evict, fetch = [[] for _ in range(count)], [[] for _ in range(count)]
            start = {int(problem.tensor[j]) for j in np.flatnonzero(keep & (problem.next_use >= count))}
            fetched = 0
            for j, at in zip(np.flatnonzero(~keep & (problem.next_use >= 0)).tolist(), chosen, strict=True):
                x = int(problem.tensor[j])
                if problem.reused[j] or problem.end[j] > problem.begin[j]:
                    evict[int(problem.begin[j]) % count].append(x)
                fetch[at % count].append((int(problem.next_use[j]), x))
                if at < count <= problem.next_use[j]:
                    start.add(x)
                fetched += trace.sizes[x]
            schedule = Schedule(
                actions=tuple(
                    Actions(evict=tuple(gone), fetch=tuple(x for _, x in sorted(come)))
                    for gone, come in zip(evict, fetch, strict=True)
                ),
                start=tuple(sorted(start)),
                fetched_bytes=fetched,
                written_back_bytes=0,
                predicted_seconds=0.0,
                policy="exhaustive",
            )
            try:
                check(trace, schedule)
            except PlanError:  # it fits no memory, or leaves in the moment in which it comes
                continue
            yield schedule


@settings(max_examples=60, deadline=None)
@given(
    trace=st.one_of(traces_with_updates(tensors=3), traces_with_updates(tensors=3, again=True)), links=BOTH
)
def test_the_best_of_all_schedules_of_a_tiny_iteration_is_not_below_the_bounds(trace, links):
    found = [simulate(trace, schedule, links).step_seconds for schedule in every_schedule(trace)]
    assume(found)
    event(f"schedules: {len(found) // 10 * 10}")
    assert min(found) >= lower_bound_seconds(trace, links) * (1 - 1e-9)
    assert min(found) >= fluid(trace, links).step_seconds * (1 - 1e-9)


def test_the_bound_is_reached_where_the_link_carries_what_backward_has_updated():
    """One tensor of 10 bytes goes down, is updated in 2 s and comes up again, all before the step."""
    use = Moment(operands=(0,), seconds=1.0, capacity=10)
    backward = replace(use, sends=(Send(tensor=0, nbytes=10, seconds=1.0),))
    rest = Moment(operands=(), seconds=30.0, capacity=10)
    step = replace(rest, seconds=0.0, invalidates=(0,))
    updates = Updates(tensors=(0,), seconds=(2.0,), queued=4, finished=3, early=True)
    trace = Trace(sizes=(10,), moments=(use, backward, rest, step, step), sending_bytes=10, updates=updates)
    links = Links(h2d_bandwidth=1.0, d2h_bandwidth=1.0)
    schedule = plan(trace, links=links)
    assert simulate(trace, schedule, links).step_seconds == lower_bound_seconds(trace, links) == 32.0
    late = replace(trace, updates=replace(updates, early=False))
    assert lower_bound_seconds(late, links) == pytest.approx(42.0)  # all of the copy lies behind the step


def naive_ends(updates, renewed, landings, stepped):
    """When each is done: whoever is there and comes first, again and again, until all are."""
    left, free, done = dict(landings), 0.0, {}
    while left:
        now = max(free, min(left.values()))
        there = [x for x, time in left.items() if time <= now]

        def turn(x, now=now):
            return (now < stepped and x not in (*updates.places, *renewed), updates.tensors.index(x))

        x = min(there, key=turn)
        rank = updates.tensors.index(x)
        free = (
            now + updates.seconds[rank] + (updates.copies[rank] if updates.copies and now < stepped else 0.0)
        )
        done[x] = free
        del left[x]
    return done


def naive_turns(updates, ends, *, begun, stepped):
    """When each has its turn: what was updated before the step, of those that had ``begun``, behind whoever was being
    updated when it came, and behind the others that come first; the rest once they are done."""
    running = max([stepped, *(ends[x] for x in begun)])
    turns = {}
    for rank, x in enumerate(updates.tensors):
        before = [ends[y] for y in updates.tensors[:rank] if y not in begun]
        turns[x] = max([running, *before]) if x in begun and ends[x] <= stepped else ends[x]
    return turns


@given(data=st.data(), count=st.integers(1, 6), stepped=st.integers(8, 20), copies=st.booleans())
def test_the_host_against_a_naive_one(data, count, stepped, copies):
    """Gradients land while backward runs; copying what is overwritten takes time until the step, and none after it."""

    def numbers(least, most):
        return tuple(data.draw(st.lists(st.integers(least, most), min_size=count, max_size=count)))

    updates = Updates(
        tensors=tuple(data.draw(st.permutations(range(count)))),
        seconds=tuple(map(float, numbers(1, 6))),
        queued=1,
        finished=0,
        early=True,
        copies=tuple(map(float, numbers(0, 6))) if copies else (),
        places=tuple(sorted(data.draw(st.sets(st.integers(0, count - 1))))),
    )
    landings = {x: time + 0.5 for x, time in enumerate(numbers(0, 7))}  # none just as the step comes
    renewed = data.draw(st.sets(st.integers(0, count - 1)))
    host = HostUpdates(updates, landings, renewed)
    for x, time in sorted(landings.items(), key=lambda item: item[1]):
        assert host.land(x, time)
    ended = {x: end for end, x in host.begin_until(stepped - 0.25)}
    host.queue(float(stepped))
    later = {x: end for end, x in host.begin_until(1e9)}
    ends = naive_ends(updates, renewed, landings, stepped)
    assert ended == {x: ends[x] for x in ended}
    turns = naive_turns(updates, ends, begun=ended, stepped=stepped)
    assert later == {x: turns[x] for x in later}
    assert host.done == turns


def test_copies_of_what_is_overwritten_lengthen_a_step_whose_host_is_the_slowest():
    use = Moment(operands=(0,), seconds=1.0, capacity=10)
    backward = replace(use, sends=(Send(tensor=0, nbytes=10, seconds=1.0),))
    step = Moment(operands=(), seconds=0.0, capacity=10, invalidates=(0,))
    trace = Trace(sizes=(10,), moments=(use, backward, replace(step, seconds=30.0), step), sending_bytes=10)
    links = Links(h2d_bandwidth=10.0, d2h_bandwidth=10.0)

    def seconds(**given):
        updates = Updates(tensors=(0,), seconds=(40.0,), queued=3, finished=2, **given)
        one = replace(trace, updates=updates)
        return simulate(one, plan(one, links=links), links).step_seconds

    assert seconds(early=True, copies=(5.0,)) == seconds(early=True) + 5.0
    assert seconds(copies=(5.0,)) == seconds()


@settings(max_examples=100, deadline=None)
@given(trace=TRACES)
def test_bytes_are_bounded_as_if_updates_began_in_the_step(trace):
    problem, reached = read_intervals(trace), read_reachable(trace)
    assert (reached.release <= problem.release).all()
    assert (reached.release[problem.next_use >= 0] >= problem.use[problem.next_use >= 0]).all()
    assert (reached.end <= problem.end).all()
    assert lower_bound(trace) == lower_bound(replace(trace, updates=replace(trace.updates, early=False)))
