"""Random traces under every policy, against the naive checker."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_traces import LINKS, POLICIES, traces

from hetero.eviction import (
    check,
    lower_bound,
    lower_bound_seconds,
    plan,
    relaxation,
    resolve_policy,
    simulate,
)


@pytest.mark.parametrize("prefetch", [True, False])
@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=120, deadline=None)
@given(trace=traces())
def test_every_plan_is_valid_and_moves_no_less_than_the_bound(policy, prefetch, trace):
    schedule = plan(trace, links=LINKS, policy=policy, prefetch=prefetch)
    check(trace, schedule)
    assert schedule.moved_bytes >= lower_bound(trace)


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=80, deadline=None)
@given(trace=traces())
def test_no_step_is_faster_than_its_operators_its_links_or_the_bound(policy, trace):
    schedule = plan(trace, links=LINKS, policy=policy)
    result = simulate(trace, schedule, LINKS)
    assert result.step_seconds == schedule.predicted_seconds
    slack = 1 - 1e-9  # sums of the same floats in another order
    assert result.step_seconds >= result.bound_seconds * slack
    assert result.step_seconds >= lower_bound_seconds(trace, LINKS) * slack
    assert math.isclose(result.compute_seconds, sum(m.seconds for m in trace.moments), abs_tol=1e-9)
    assert all(held <= m.capacity for held, m in zip(result.model_bytes, trace.moments, strict=True))
    assert all(stall >= 0.0 for stall in result.stall_seconds)


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=40, deadline=None)
@given(trace=traces())
def test_the_same_trace_gives_the_same_plan(policy, trace):
    assert plan(trace, links=LINKS, policy=policy) == plan(trace, links=LINKS, policy=policy)


@pytest.mark.parametrize("prefetch", [True, False])
@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=60, deadline=None)
@given(trace=traces())
def test_where_everything_fits_only_compulsory_fetches_happen(policy, prefetch, trace):
    roomy = replace(
        trace, moments=tuple(replace(moment, capacity=sum(trace.sizes)) for moment in trace.moments)
    )
    schedule = plan(roomy, links=LINKS, policy=policy, prefetch=prefetch)
    resident: set[int] = set()
    compulsory = 0
    for turn in range(2 if trace.cyclic else 1):
        compulsory = compulsory if turn == 0 else 0  # count the steady-state iteration
        for moment in trace.moments:
            resident -= set(moment.invalidates)
            missing = set(moment.operands) - resident
            compulsory += sum(trace.sizes[x] for x in missing)
            resident |= missing
    assert schedule.fetched_bytes == compulsory
    assert schedule.written_back_bytes == 0


class Stranger:
    """A built-in rule under another type, so that the planner has to ask it."""

    def __init__(self, rule):
        self.name = f"stranger-{rule}"
        self.rule = resolve_policy(rule)

    def victims(self, candidates, nbytes):
        return self.rule.victims(candidates, nbytes)


@pytest.mark.parametrize("rule", ["lru", "fifo"])
@settings(max_examples=80, deadline=None)
@given(trace=traces(sizes=st.integers(1, 9)))
def test_asking_a_policy_and_running_it_on_the_heap_give_the_same_plan(rule, trace):
    asked = plan(trace, links=LINKS, policy=Stranger(rule), prefetch=False)
    ranked = plan(trace, links=LINKS, policy=rule, prefetch=False)
    assert asked.actions == ranked.actions


class Silent:
    name = "silent"

    def victims(self, candidates, nbytes):
        return [12345]


@pytest.mark.parametrize("policy", [Silent(), Stranger("opt"), Stranger("cost-opt")], ids=lambda p: p.name)
@settings(max_examples=80, deadline=None)
@given(trace=traces())
def test_a_policy_of_ones_own_gives_valid_plans_even_if_it_names_nobody(policy, trace):
    schedule = plan(trace, links=LINKS, policy=policy)
    check(trace, schedule)
    assert schedule.policy == policy.name


@settings(max_examples=100, deadline=None)
@given(trace=traces(moments=20), overlap=st.integers(0, 2))
def test_rounding_a_relaxation_solved_in_windows_gives_valid_plans(trace, overlap):
    whole = relaxation._MOST_PERIODS, relaxation._WINDOW, relaxation._OVERLAP
    relaxation._MOST_PERIODS, relaxation._WINDOW, relaxation._OVERLAP = 6, 2, overlap
    try:
        check(trace, plan(trace, links=LINKS, policy="cost-opt"))
    finally:
        relaxation._MOST_PERIODS, relaxation._WINDOW, relaxation._OVERLAP = whole


@settings(max_examples=80, deadline=None)
@given(trace=traces(sizes=st.integers(0, 10**12)), share=st.floats(0.0, 1.0))
def test_no_byte_of_a_large_capacity_is_exceeded_by_rounding(trace, share):
    # The solver's tolerance on a fraction of 10^12 bytes is far more than one byte.
    spare = int(share * sum(trace.sizes))
    wide = replace(
        trace, moments=tuple(replace(moment, capacity=moment.capacity + spare) for moment in trace.moments)
    )
    schedule = plan(wide, links=LINKS, policy="cost-opt")
    check(wide, schedule)
    assert schedule.moved_bytes >= lower_bound(wide)
