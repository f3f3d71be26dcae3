"""What is fetched at an iteration's end: no more than the link carries until the caller's own copy comes."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_traces import LINKS, POLICIES, traces, traces_with_products

from hetero.eviction import Actions, Links, Moment, Schedule, Trace, check, leave_link_free, plan, simulate

SECOND = Links(h2d_bandwidth=1.0, d2h_bandwidth=1.0)  # a byte takes one


def step(*, fetched=(0, 1, 2), **changes):
    """Three tensors of a byte are used by turns, and fetched at the end of the iteration before."""
    moments = tuple(Moment(operands=(x,), seconds=2.0, capacity=3) for x in range(3))
    last = Moment(operands=(), seconds=1.0, capacity=3)
    trace = Trace(sizes=(1, 1, 1), moments=(replace(moments[0], **changes), *moments[1:], last))
    away = Actions(evict=(0, 1, 2))
    return trace, Schedule(
        actions=(Actions(), Actions(), Actions(), replace(away, fetch=fetched)),
        start=fetched,
        fetched_bytes=len(fetched),
        written_back_bytes=0,
        predicted_seconds=0.0,
        policy="by hand",
    )


@pytest.mark.parametrize(
    ("seconds", "now", "later"),
    [(0.0, (), (0, 1, 2)), (1.0, (0,), (1, 2)), (2.5, (0, 1), (2,)), (3.0, (0, 1, 2), ())],
)
def test_as_many_start_in_advance_as_the_link_carries(seconds, now, later):
    trace, schedule = step()
    moved = leave_link_free(trace, schedule, SECOND, seconds=seconds)
    assert moved.actions[-1].fetch == now
    assert moved.actions[0].fetch == later
    assert moved.start == now
    check(trace, moved)


def test_the_step_is_simulated_anew():
    trace, schedule = step()
    assert leave_link_free(trace, schedule, SECOND, seconds=1.0).predicted_seconds == 7.0  # nothing is late
    assert leave_link_free(trace, schedule, SECOND, seconds=0.0).predicted_seconds == 8.0  # the first operand


def test_the_first_operand_is_fetched_first():
    trace, schedule = step(fetched=(2, 1, 0))
    moved = leave_link_free(trace, schedule, SECOND, seconds=0.0)
    assert moved.actions[0].fetch == (0, 2, 1)
    check(trace, moved)


def test_what_the_next_iteration_begins_by_dropping_is_left_where_it_was():
    trace, schedule = step(operands=())
    schedule = replace(
        schedule,
        actions=(Actions(evict=(0,)), *schedule.actions[1:-1], Actions(evict=(1, 2), fetch=(0, 1, 2))),
    )
    moved = leave_link_free(trace, schedule, SECOND, seconds=0.0)
    assert moved.actions[-1].fetch == (0,)
    assert moved.actions[0].fetch == (1, 2)
    check(trace, moved)


@given(st.one_of(traces(), traces_with_products()), st.sampled_from(POLICIES), st.floats(0.0, 3.0))
def test_a_schedule_stays_one_and_fetches_the_same(trace, policy, seconds):
    schedule = plan(trace, links=LINKS, policy=policy)
    moved = leave_link_free(trace, schedule, LINKS, seconds=seconds)
    check(trace, moved)
    assert moved.moved_bytes == schedule.moved_bytes
    assert moved.predicted_seconds == pytest.approx(simulate(trace, moved, LINKS).step_seconds)
    assert sorted(x for a in moved.actions for x in a.fetch) == sorted(
        x for a in schedule.actions for x in a.fetch
    )
