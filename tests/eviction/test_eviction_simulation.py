"""The timing model, on cases small enough to work out by hand. Links: 10 bytes/s each way."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_traces import POLICIES, schedule_of, traces

from hetero.eviction import Links, Moment, Send, Trace, check, lower_bound_seconds, plan, simulate

LINKS = Links(h2d_bandwidth=10.0, d2h_bandwidth=10.0)


def run(trace, *actions, start=(), fetched=0, written_back=0, links=LINKS):
    schedule = schedule_of(*actions, start=start, fetched=fetched, written_back=written_back)
    check(trace, schedule)
    return simulate(trace, schedule, links)


def test_an_operator_waits_for_its_own_fetch():
    trace = Trace(sizes=(20,), moments=(Moment(operands=(0,), seconds=1.0, capacity=20),), cyclic=False)
    result = run(trace, ((), (0,)), fetched=20)
    assert result.step_seconds == 3.0
    assert result.stall_seconds == (2.0,)


def test_a_prefetch_hides_behind_the_operator_before():
    moments = (
        Moment(operands=(), seconds=1.5, capacity=20),
        Moment(operands=(0,), seconds=1.0, capacity=20),
    )
    trace = Trace(sizes=(20,), moments=moments, cyclic=False)
    result = run(trace, ((), (0,)), ((), ()), fetched=20)
    assert result.stall_seconds == (0.0, 0.5)
    assert result.model_bytes == (20, 20)


def test_fetches_are_served_in_order_and_each_pays_the_latency():
    trace = Trace(sizes=(10, 10), moments=(Moment(operands=(0, 1), capacity=20),), cyclic=False)
    links = Links(h2d_bandwidth=10.0, d2h_bandwidth=10.0, latency=0.25)
    result = run(trace, ((), (0, 1)), fetched=20, links=links)
    assert result.step_seconds == result.h2d_seconds == 2.5


def test_operators_wait_while_the_host_issues_transfers():
    moments = (
        Moment(operands=(0,), seconds=1.0, capacity=30, dirties=(0,)),
        Moment(operands=(1,), seconds=1.0, capacity=30),
        Moment(operands=(1,), seconds=1.0, capacity=30),
    )
    trace = Trace(sizes=(20, 10), moments=moments, cyclic=False)
    links = replace(LINKS, issue=0.25)
    # Fetch one and wait for it; drop it, which is written back, and fetch the other; drop that, which is not.
    actions = (((), (0,)), ((0,), (1,)), ((), ()))
    result = run(trace, *actions, fetched=30, written_back=20, links=links)
    assert result.stall_seconds == (0.25 + 2.0, 0.5 + 1.0, 0.0)
    assert result.issue_seconds == 0.75
    assert result.compute_seconds == 3.0


@settings(max_examples=80, deadline=None)
@given(trace=traces(sizes=st.just(1)), policy=st.sampled_from(POLICIES))
def test_a_transfer_that_takes_no_time_takes_that_of_its_issue(trace, policy):
    links = Links(h2d_bandwidth=1e30, d2h_bandwidth=1e30, issue=0.25)
    schedule = plan(trace, links=links, policy=policy)
    check(trace, schedule)  # its bytes are as many as it moves, and each tensor has one
    operators = sum(moment.seconds for moment in trace.moments)
    assert schedule.issue_seconds == 0.25 * schedule.moved_bytes
    # The copies' 1e-30 s, and sums in another order.
    assert math.isclose(schedule.predicted_seconds, operators + schedule.issue_seconds, abs_tol=1e-9)
    assert math.isclose(schedule.predicted_seconds - schedule.issue_seconds, operators, abs_tol=1e-9)


def test_gradients_pay_the_latency_of_their_own_direction():
    sends = tuple(Send(tensor=0, nbytes=10, seconds=0.5 * number) for number in range(2))
    moments = (Moment(operands=(0,), seconds=1.0, capacity=10, sends=sends),)
    trace = Trace(sizes=(10,), moments=moments, sending_bytes=20)
    links = Links(h2d_bandwidth=10.0, d2h_bandwidth=10.0, latency=4.0, d2h_latency=0.25)
    result = run(trace, ((), ()), start=(0,), links=links)
    assert result.step_seconds == result.d2h_seconds == lower_bound_seconds(trace, links) == 2.5


@pytest.mark.parametrize(("still", "seconds"), [(None, 3.0), (10, 3.0), (9, 4.0), (0, 4.0)])
def test_an_operator_waits_for_gradients_that_may_not_be_on_their_way_any_more(still, seconds):
    moments = (
        Moment(operands=(), seconds=1.0, capacity=0, sends=(Send(tensor=0, nbytes=10, seconds=0.0),)),
        Moment(operands=(), seconds=2.0, capacity=0, still_sending=still),
    )
    trace = Trace(sizes=(10,), moments=moments, sending_bytes=20, cyclic=False)
    links = Links(h2d_bandwidth=1.0, d2h_bandwidth=5.0)
    assert run(trace, ((), ()), ((), ()), links=links).step_seconds == seconds


def test_a_write_back_delays_whoever_needs_its_memory_and_nobody_else():
    def trace(capacity):
        moments = (
            Moment(operands=(0,), seconds=1.0, capacity=20, dirties=(0,)),
            Moment(operands=(1,), seconds=1.0, capacity=capacity),
        )
        return Trace(sizes=(20, 10), moments=moments, cyclic=False)

    actions = (((), (0,)), ((0,), (1,)))
    tight = run(trace(20), *actions, fetched=30, written_back=20)
    roomy = run(trace(30), *actions, fetched=30, written_back=20)
    assert tight.stall_seconds == (2.0, 2.0 + 1.0)  # the write back, then the fetch
    assert roomy.stall_seconds == (2.0, 1.0)
    assert tight.model_bytes == (20, 10)
    assert roomy.model_bytes == (20, 30)


def test_a_fetch_waits_until_home_is_current():
    moments = (
        Moment(operands=(0,), seconds=1.0, capacity=50, dirties=(0,)),
        Moment(operands=(), seconds=0.5, capacity=50),
        Moment(operands=(0,), seconds=1.0, capacity=50),
    )
    trace = Trace(sizes=(20,), moments=moments, cyclic=False)
    result = run(trace, ((), (0,)), ((0,), ()), ((), (0,)), fetched=40, written_back=20)
    # Written back from 3.0 to 5.0; the fetch, asked for at 3.5, runs from 5.0 to 7.0.
    assert result.stall_seconds == (2.0, 0.0, 3.5)


def test_a_steady_state_counts_what_the_iteration_before_started():
    moments = (
        Moment(operands=(0,), seconds=1.0, capacity=20),
        Moment(operands=(1,), seconds=1.0, capacity=20),
        Moment(operands=(2,), seconds=1.0, capacity=20),
    )
    trace = Trace(sizes=(10, 10, 10), moments=moments)
    # One of three is always being fetched while another computes: 3 s of compute beside 3 s of link.
    result = run(trace, ((2,), (1,)), ((0,), (2,)), ((1,), (0,)), start=(0, 2), fetched=30)
    assert result.step_seconds == 3.0
    assert plan(trace, links=LINKS).predicted_seconds == 3.0


def test_planning_without_prefetch_starts_every_fetch_at_its_use():
    moments = tuple(Moment(operands=(x,), seconds=1.0, capacity=15) for x in range(3))
    trace = Trace(sizes=(10, 10, 10), moments=moments)
    schedule = plan(trace, links=LINKS, prefetch=False)
    assert [actions.fetch for actions in schedule.actions] == [(0,), (1,), (2,)]
    assert schedule.predicted_seconds == 6.0
