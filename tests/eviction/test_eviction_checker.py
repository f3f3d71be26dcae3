"""The checker refuses what it should, and names it."""

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from random_traces import LINKS, schedule_of, traces

from hetero.errors import PlanError
from hetero.eviction import Actions, Moment, Trace, check, plan

TWO = Trace(
    sizes=(4, 6),
    moments=(Moment(operands=(0,), capacity=9, dirties=(0,)), Moment(operands=(1,), capacity=9)),
)
GOOD = schedule_of(((1,), (0,)), ((0,), (1,)), start=(1,), fetched=10, written_back=4)


def test_a_schedule_by_hand_passes():
    check(TWO, GOOD)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (schedule_of(((), (0,)), ((0,), (1,)), start=(1,)), "moment 0 holds 10 bytes of 9"),
        (schedule_of(((1,), ()), ((), (1,)), start=(1,)), r"moment 0 needs tensor 0 .*not resident"),
        (schedule_of(((0,), (0,)), ((0,), (1,)), start=(1,)), "moment 0 evicts tensor 0"),
        (schedule_of(((), (1,)), ((0,), (1,)), start=(1,)), "moment 0 fetches tensor 1.*already"),
        (schedule_of(((1,), (0, 7)), ((0,), (1,)), start=(1,)), "moment 0 fetches tensor 7"),
        (schedule_of(((), (0,)), ((0,), (1,)), start=()), r"tensors \[1\] are resident at one end"),
        (schedule_of(((), (0,)), start=()), "1 moments, the trace 2"),
        (replace(GOOD, start=(1, 1)), "repeats a tensor"),
        (replace(GOOD, fetched_bytes=9), "10 bytes are fetched, the schedule says 9"),
        (replace(GOOD, written_back_bytes=0), "4 bytes are written back, the schedule says 0"),
    ],
)
def test_each_kind_of_violation_is_named(schedule, message):
    with pytest.raises(PlanError, match=message):
        check(TWO, schedule)


def test_using_an_invalidated_copy_is_refused():
    trace = Trace(sizes=(4,), moments=(Moment(operands=(0,), capacity=4, invalidates=(0,)),))
    with pytest.raises(PlanError, match=r"moment 0 needs tensor 0 .*was invalidated"):
        check(trace, schedule_of(((), ()), start=(0,)))
    check(trace, schedule_of(((), (0,)), start=(0,), fetched=4))


def test_a_trace_that_does_not_repeat_starts_empty():
    with pytest.raises(PlanError, match="starts empty"):
        check(replace(TWO, cyclic=False), GOOD)


def ceases_first(trace, schedule, moment, tensor):
    """After ``moment`` an invalidation of ``tensor`` comes before a fetch."""
    count = len(trace.moments)
    for now in (t % count for t in range(moment + 1, moment + 1 + count)):
        if tensor in trace.moments[now].invalidates:
            return True
        if tensor in schedule.actions[now].fetch:
            return False
    return False


@settings(max_examples=150, deadline=None)
@given(trace=traces(sizes=st.integers(1, 9)), data=st.data())
def test_a_valid_schedule_less_one_transfer_is_refused(trace, data):
    schedule = plan(trace, links=LINKS)
    busy = [t for t, actions in enumerate(schedule.actions) if actions.fetch or actions.evict]
    assume(busy)
    moment = data.draw(st.sampled_from(busy))
    actions = schedule.actions[moment]
    fewer = Actions(evict=actions.evict, fetch=actions.fetch[:-1])
    if not actions.fetch:
        fewer = Actions(evict=actions.evict[1:])
    broken = (*schedule.actions[:moment], fewer, *schedule.actions[moment + 1 :])
    # Skipping the eviction of a clean copy in a trace that ends breaks nothing.
    assume(trace.cyclic or actions.fetch)
    # Nor of one that would cease to exist before it is fetched again, where there is room for it until then.
    assume(actions.fetch or not ceases_first(trace, schedule, moment, actions.evict[0]))
    with pytest.raises(PlanError):
        check(trace, replace(schedule, actions=broken))
