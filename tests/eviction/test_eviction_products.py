"""Tensors that an operator produces: saved for later, perhaps away in between, and gone after their last use."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from random_traces import LINKS, POLICIES, fewest_bytes, traces_with_products

from hetero.errors import PlanError
from hetero.eviction import Actions, Moment, Schedule, Trace, check, lower_bound, plan, simulate


@pytest.mark.parametrize("prefetch", [True, False])
@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=100, deadline=None)
@given(trace=traces_with_products())
def test_every_plan_is_valid_and_moves_no_less_than_the_bound(policy, prefetch, trace):
    schedule = plan(trace, links=LINKS, policy=policy, prefetch=prefetch)
    check(trace, schedule)
    assert schedule.moved_bytes >= lower_bound(trace)


@settings(max_examples=60, deadline=None)
@given(trace=traces_with_products(products=2, tensors=1, moments=5, clean=True))
def test_the_bound_is_at_most_the_fewest_bytes_that_any_schedule_moves(trace):
    assert lower_bound(trace) <= fewest_bytes(trace)


@settings(max_examples=60, deadline=None)
@given(trace=traces_with_products())
def test_simulated_memory_stays_within_the_capacities(trace):
    result = simulate(trace, plan(trace, links=LINKS), LINKS)
    assert all(held <= m.capacity for held, m in zip(result.model_bytes, trace.moments, strict=True))


@settings(max_examples=60, deadline=None)
@given(trace=traces_with_products(clean=True))
def test_what_fits_is_neither_written_nor_fetched(trace):
    room = sum(trace.sizes)
    roomy = replace(trace, moments=tuple(replace(moment, capacity=room) for moment in trace.moments))
    products = {x for moment in trace.moments for x in moment.produces}
    schedule = plan(roomy, links=LINKS)
    assert schedule.written_back_bytes == 0
    assert not products & {x for actions in schedule.actions for x in actions.fetch}


SAVED = Trace(
    sizes=(4, 6),
    moments=(
        Moment(operands=(0,), capacity=6, produces=(0,), dirties=(0,)),
        Moment(operands=(1,), capacity=6),
        Moment(operands=(0,), capacity=6),
        Moment(operands=(), capacity=6, invalidates=(0,)),
    ),
)


def test_by_hand():
    schedule = plan(SAVED, links=LINKS, prefetch=False)
    assert schedule.written_back_bytes == 4  # out, because 6 more do not fit beside it
    assert schedule.fetched_bytes == 4 + 6
    check(SAVED, schedule)


def test_to_fetch_what_is_produced_is_refused():
    schedule = plan(SAVED, links=LINKS, prefetch=False)
    actions = (Actions(evict=schedule.actions[0].evict, fetch=(0,)), *schedule.actions[1:])
    wrong = Schedule(
        actions=actions,
        start=schedule.start,
        fetched_bytes=schedule.fetched_bytes,
        written_back_bytes=schedule.written_back_bytes,
        predicted_seconds=0.0,
        policy="by hand",
    )
    with pytest.raises(PlanError, match="moment 0 fetches tensor 0, which is already resident"):
        check(SAVED, wrong)


def test_what_is_produced_must_be_an_operand():
    with pytest.raises(PlanError, match=r"moment 0 produces tensors \[0\], which are not among its operands"):
        Trace(sizes=(4,), moments=(Moment(operands=(), capacity=4, produces=(0,)),))
