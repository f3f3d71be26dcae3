"""The competition of plans, its scores, its search and its clock, against the naive checker and the simulation."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_traces import LINKS, traces, traces_with_products

from hetero.eviction import (
    CapacityError,
    Links,
    Moment,
    Trace,
    check,
    compete,
    lower_bound,
    lower_bound_seconds,
    plan,
    simulate,
)
from hetero.eviction.intervals import read_intervals
from hetero.eviction.scores import by_score, choose
from hetero.eviction.timing import timed_starts
from hetero.eviction.transfers import lay_out, read_fetches

SLOW = Links(h2d_bandwidth=1.0, d2h_bandwidth=1.0)
TRACES = st.one_of(traces(), traces_with_products())


@settings(max_examples=80, deadline=None)
@given(trace=TRACES, links=st.sampled_from([LINKS, SLOW, replace(LINKS, issue=0.05)]))
def test_the_winner_is_valid_and_its_time_and_bytes_lie_between_the_bounds_and_the_plan_by_next_use(
    trace, links
):
    winner = compete(trace, links=links, trials=20)
    check(trace, winner)
    result = simulate(trace, winner, links)
    assert winner.predicted_seconds == result.step_seconds
    assert winner.predicted_seconds <= plan(trace, links=links).predicted_seconds
    # Sums of the same times in another order.
    assert winner.predicted_seconds >= lower_bound_seconds(trace, links) * (1 - 1e-9)
    assert winner.moved_bytes >= lower_bound(trace)
    assert all(held <= m.capacity for held, m in zip(result.model_bytes, trace.moments, strict=True))


@settings(max_examples=30, deadline=None)
@given(trace=TRACES)
def test_the_same_trace_gives_the_same_winner(trace):
    assert compete(trace, links=SLOW, trials=20) == compete(trace, links=SLOW, trials=20)


@settings(max_examples=60, deadline=None)
@given(trace=TRACES, name=st.sampled_from(["doa", "aoa", "wdoa", "swdoa"]), wary=st.booleans())
def test_what_a_score_chooses_fits_and_starts_by_the_clock_are_valid(trace, name, wary):
    problem = read_intervals(trace)
    keep = choose(problem, problem.room, by_score(trace, problem, SLOW)[name])
    assert (problem.load(keep) <= problem.room).all()
    fetches = read_fetches(problem, keep, spare=True)
    wanted = timed_starts(trace, problem, keep, fetches, SLOW, wary=wary)
    check(trace, lay_out(problem, keep, prefetch=True, policy=name, spare=True, wanted=wanted))


@settings(max_examples=60, deadline=None)
@given(trace=TRACES, name=st.sampled_from(["doa", "aoa", "wdoa", "swdoa"]))
def test_the_winner_is_no_slower_than_what_any_score_chooses(trace, name):
    problem = read_intervals(trace)
    keep = choose(problem, problem.room, by_score(trace, problem, SLOW)[name])
    alone = simulate(trace, lay_out(problem, keep, prefetch=True, policy=name), SLOW).step_seconds
    # Within the tolerance that counts sums of the same times as equal.
    assert compete(trace, links=SLOW, trials=5).predicted_seconds <= alone * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(trace=traces_with_products(cyclic=True))
def test_the_area_scores_are_those_counted_moment_by_moment(trace):
    problem = read_intervals(trace)
    values = by_score(trace, problem, SLOW)
    keep = problem.reused | (problem.group >= 0)
    count = len(trace.moments)
    most = max(moment.capacity for moment in trace.moments)
    for j in range(len(problem.use)):
        away = 0.0
        area = 0.0
        for unrolled in range(int(problem.begin[j]), int(problem.end[j])):
            t = unrolled % count
            there = sum(trace.sizes[x] for x in set(trace.moments[t].operands))
            for k in np.flatnonzero(keep).tolist():
                covers = any(problem.begin[k] <= u < problem.end[k] for u in (t, t + count))
                there += trace.sizes[int(problem.tensor[k])] if covers else 0
            load = there + most - trace.moments[t].capacity
            away += trace.moments[t].seconds
            area += load * trace.moments[t].seconds
        nbytes = int(problem.nbytes[j])
        moved = nbytes * (int(problem.reused[j]) + int(problem.group[j] >= 0))  # a byte a second
        assert values["doa"][j] == pytest.approx(away - moved)
        assert values["wdoa"][j] == pytest.approx(area)


def test_late_write_backs_decide_which_of_two_leaves():
    """Both free the same bytes. The first is used up early and has time to leave; the second is farther from its next
    use, so that Belady's rule takes it, and an operator waits for its copy."""
    quick = Links(h2d_bandwidth=1.0, d2h_bandwidth=1.0)
    moments = (
        Moment(operands=(0,), seconds=0.0, capacity=8, produces=(0,), dirties=(0,)),
        Moment(operands=(), seconds=8.0, capacity=8),
        Moment(operands=(1,), seconds=0.0, capacity=8, produces=(1,), dirties=(1,)),
        Moment(operands=(), seconds=8.0, capacity=4),
        Moment(operands=(0,), seconds=0.0, capacity=8),
        Moment(operands=(1,), seconds=0.0, capacity=8),
        Moment(operands=(), seconds=1.0, capacity=8, invalidates=(0, 1)),
    )
    trace = Trace(sizes=(4, 4), moments=moments)
    winner = compete(trace, links=quick)
    assert winner.predicted_seconds == 17.0 + 4.0  # the fetch has no room before
    assert {x for actions in winner.actions for x in actions.evict} == {0}
    assert plan(trace, links=quick).predicted_seconds > winner.predicted_seconds


def test_operands_that_do_not_fit_are_refused():
    with pytest.raises(CapacityError):
        compete(Trace(sizes=(4,), moments=(Moment(operands=(0,), capacity=3),)), links=SLOW)
