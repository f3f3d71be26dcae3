"""The training planner on AutoSwap's steps: the same gaps, the same scores, and never slower than the best of them."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from test_swap_properties import steps
from ticks import SLOW

from hetero.errors import PlanError
from hetero.eviction import CapacityError, check, lower_bound_seconds, simulate
from hetero.eviction.intervals import read_intervals
from hetero.eviction.scores import across_peak, by_score
from hetero.eviction.transfers import lay_out
from hetero.swap import (
    SCORES,
    Step,
    SwapLimitError,
    Variable,
    all_gaps,
    candidates,
    least_limit,
    links_of,
    one_plan,
    scores,
    select,
    to_trace,
)

LINKS = links_of(SLOW)


def limited(step: Step, data: st.DataObject) -> int:
    least = least_limit(step, method="doa", threshold=1)
    return data.draw(st.integers(least, max(least, step.peak_bytes)))


@given(steps(), st.data())
@settings(max_examples=100, deadline=None)
def test_every_gap_is_an_interval_that_may_leave_and_has_the_same_scores(
    step: Step, data: st.DataObject
) -> None:
    trace = to_trace(step, limited(step, data), threshold=1)
    problem = read_intervals(trace)
    places = {(int(x), int(t)): j for j, (x, t) in enumerate(zip(problem.tensor, problem.use, strict=True))}
    gaps = all_gaps(step, threshold=1)
    reused = {j for j in places.values() if problem.reused[j] and problem.end[j] > problem.begin[j]}
    assert {places[gap.variable, gap.after] for gap in gaps} == reused
    ours, theirs = by_score(trace, problem, LINKS), scores(step, gaps, SLOW)
    peak = across_peak(trace, problem)
    for k, gap in enumerate(gaps):
        j = places[gap.variable, gap.after]
        for name in SCORES:
            assert ours[name][j] == pytest.approx(theirs[name][k])
        assert bool(peak[j]) == gap.covers(step.peak_at, step.span)


@given(steps(), st.data())
@settings(max_examples=60, deadline=None)
def test_it_is_no_slower_than_what_the_best_score_selects(step: Step, data: st.DataObject) -> None:
    limit = limited(step, data)
    trace = to_trace(step, limit, threshold=1)
    problem = read_intervals(trace)
    places = {(int(x), int(t)): j for j, (x, t) in enumerate(zip(problem.tensor, problem.use, strict=True))}
    plan = one_plan(step, limit, SLOW, threshold=1)
    assume(sum(seconds > 0 for seconds in step.seconds) == step.span)
    gaps = candidates(step, threshold=1)
    by_name = scores(step, gaps, SLOW)
    for name in ("doa", "aoa"):  # the areas count what is too small to leave, and may break ties otherwise
        try:
            chosen = select(step, gaps, by_name[name], limit)
        except SwapLimitError:
            continue
        keep = problem.reused | (problem.group >= 0)
        for gap in chosen:
            keep[places[gap.variable, gap.after]] = False
        alone = simulate(trace, lay_out(problem, keep, prefetch=True, policy=name), LINKS)
        assert plan.schedule.predicted_seconds <= alone.step_seconds * (1 + 1e-9)


@given(steps(), st.data(), st.booleans())
@settings(max_examples=60, deadline=None)
def test_plans_are_valid_within_the_limit_and_no_faster_than_the_bound(
    step: Step, data: st.DataObject, clean: bool
) -> None:
    limit = limited(step, data)
    plan = one_plan(step, limit, SLOW, threshold=1, clean=clean)
    check(plan.trace, plan.schedule)
    assert plan.timeline.over_bytes == 0
    fixed = limit - plan.trace.moments[0].capacity
    assert fixed >= 0
    result = simulate(plan.trace, plan.schedule, LINKS)
    for held, moment in zip(result.model_bytes, plan.trace.moments, strict=True):
        assert held <= moment.capacity
    # The two simulators share no code; sums of the same times in another order.
    assert plan.timeline.step_seconds == pytest.approx(result.step_seconds)
    assert result.step_seconds >= lower_bound_seconds(plan.trace, LINKS) * (1 - 1e-9)


@given(steps())
@settings(max_examples=40, deadline=None)
def test_at_its_peak_load_a_step_loses_no_time(step: Step) -> None:
    plan = one_plan(step, step.peak_bytes, SLOW, threshold=1)
    assert plan.overhead == 0.0
    assert plan.schedule.moved_bytes == 0


def test_what_was_not_written_since_leaves_for_nothing_if_clean_copies_count() -> None:
    step = Step(
        seconds=(1.0, 9.0, 1.0, 9.0, 1.0),
        variables=(
            Variable(nbytes=4, begin=0, end=5, accesses=(0, 2, 4), writes=(0,), persistent=True),
            Variable(nbytes=4, begin=1, end=2, accesses=(1,)),
            Variable(nbytes=4, begin=3, end=4, accesses=(3,)),
        ),
    )
    copied = one_plan(step, 4, SLOW, threshold=1)
    clean = one_plan(step, 4, SLOW, threshold=1, clean=True)
    assert copied.schedule.written_back_bytes == 8
    assert clean.schedule.written_back_bytes == 4


def test_small_variables_come_off_the_capacity_and_a_limit_below_an_operators_needs_is_refused() -> None:
    step = Step(
        seconds=(1.0, 1.0),
        variables=(
            Variable(nbytes=2, begin=0, end=2, accesses=(0,), persistent=True),
            Variable(nbytes=9, begin=0, end=2, accesses=(0,), persistent=True),
        ),
    )
    trace = to_trace(step, 11, threshold=5)
    assert trace.sizes == (9,)
    assert [moment.capacity for moment in trace.moments] == [9, 9]
    with pytest.raises(CapacityError):
        one_plan(step, 10, SLOW, threshold=5)


def test_writes_must_be_accesses() -> None:
    with pytest.raises(PlanError, match="not all among its accesses"):
        Step(seconds=(1.0,), variables=(Variable(nbytes=1, begin=0, end=1, accesses=(0,), writes=(1,)),))
