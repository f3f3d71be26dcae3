"""The promises of the plan on transformer-like iterations: bytes near the bound, transfers hidden."""

import pytest
from repository import load

from hetero.eviction import Links, check, lower_bound, lower_bound_seconds, plan, simulate

LINKS = Links(h2d_bandwidth=25e9, d2h_bandwidth=25e9, latency=10e-6)


bench = load("benchmarks/eviction_traces.py")
SHAPES = bench.SHAPES


@pytest.mark.parametrize("share", bench.SHARES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_belady_and_cost_aware_plans_move_at_most_two_percent_more_than_the_bound(shape, share):
    trace = bench.trace_of(shape, share)
    bound = lower_bound(trace)
    for policy in ("opt", "cost-opt"):
        schedule = plan(trace, links=LINKS, policy=policy, prefetch=False)
        check(trace, schedule)
        assert bound <= schedule.moved_bytes <= 1.02 * bound


@pytest.mark.parametrize("share", bench.SHARES)
@pytest.mark.parametrize("shape", [SHAPES["full"], SHAPES["half frozen"], SHAPES["lora"]], ids=str)
def test_prefetching_hides_what_can_be_hidden_without_moving_more(shape, share):
    trace = bench.trace_of(shape, share)
    schedule = plan(trace, links=LINKS)
    check(trace, schedule)
    assert schedule.predicted_seconds <= 1.05 * lower_bound_seconds(trace, LINKS)
    assert schedule.moved_bytes <= 1.02 * lower_bound(trace)
    late = plan(trace, links=LINKS, prefetch=False)
    assert schedule.predicted_seconds < 0.95 * late.predicted_seconds


def test_the_plan_never_holds_more_than_the_capacity_even_while_writing_back():
    trace = bench.trace_of(SHAPES["optimizer on device"], 0.3)
    schedule = plan(trace, links=LINKS)
    assert schedule.written_back_bytes > 0
    held = simulate(trace, schedule, LINKS).model_bytes
    assert all(nbytes <= moment.capacity for nbytes, moment in zip(held, trace.moments, strict=True))


def test_frozen_weights_that_fit_stay_across_iterations():
    trace = bench.trace_of(bench.Shape(training="lora", layers=4, activation_swing=0.0), 1.0)
    schedule = plan(trace, links=LINKS)
    adapters = set(trace.moments[0].invalidates)
    fetched = {x for actions in schedule.actions for x in actions.fetch}
    assert fetched == adapters
    assert set(range(len(trace.sizes))) - adapters <= set(schedule.start)
