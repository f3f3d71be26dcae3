"""Random traces under every policy, against the naive checker."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.eviction import Links, Moment, Trace, check, lower_bound, plan, simulate

LINKS = Links(h2d_bandwidth=10.0, d2h_bandwidth=5.0, latency=0.01)
POLICIES = ("opt", "cost-opt", "lru", "fifo")


@st.composite
def traces(draw, most_tensors=7, most_moments=14):
    count = draw(st.integers(1, most_tensors))
    sizes = tuple(draw(st.lists(st.integers(0, 9), min_size=count, max_size=count)))
    ids = st.integers(0, count - 1)
    moments = []
    for _ in range(draw(st.integers(1, most_moments))):
        operands = tuple(draw(st.lists(ids, max_size=3)))
        needed = sum(sizes[x] for x in set(operands))
        dirties = tuple(x for x in dict.fromkeys(operands) if draw(st.integers(0, 3)) == 0)
        lost = tuple(draw(st.lists(ids, max_size=2, unique=True))) if draw(st.integers(0, 4)) == 0 else ()
        moments.append(
            Moment(
                operands=operands,
                seconds=draw(st.sampled_from([0.0, 0.5, 1.0])),
                capacity=needed + draw(st.integers(0, 15)),
                dirties=dirties,
                invalidates=lost,
            )
        )
    return Trace(sizes=sizes, moments=tuple(moments), cyclic=draw(st.booleans()))


@pytest.mark.parametrize("prefetch", [True, False])
@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=150, deadline=None)
@given(trace=traces())
def test_every_plan_is_valid_and_moves_no_less_than_the_bound(policy, prefetch, trace):
    schedule = plan(trace, links=LINKS, policy=policy, prefetch=prefetch)
    check(trace, schedule)
    assert schedule.moved_bytes >= lower_bound(trace)


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=100, deadline=None)
@given(trace=traces())
def test_no_step_is_faster_than_its_operators_or_its_links(policy, trace):
    schedule = plan(trace, links=LINKS, policy=policy)
    result = simulate(trace, schedule, LINKS)
    assert result.step_seconds == schedule.predicted_seconds
    # Sums of the same floats in another order.
    assert result.step_seconds >= result.bound_seconds * (1 - 1e-9)
    assert math.isclose(result.compute_seconds, sum(m.seconds for m in trace.moments), abs_tol=1e-9)
    assert all(held <= m.capacity for held, m in zip(result.model_bytes, trace.moments, strict=True))
    assert all(stall >= 0.0 for stall in result.stall_seconds)
