"""The one plan under AutoSwap's rules: no slower than any plan it begins with, valid, and no faster than the bound."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from test_swap_moments import limited
from test_swap_properties import METHODS, steps
from ticks import SLOW

from hetero.eviction import check
from hetero.eviction.fluid import fluid
from hetero.swap import (
    Step,
    SwapLimitError,
    SwapPlan,
    all_gaps,
    best_plan,
    links_of,
    one_plan,
    plan_swaps,
    select,
    to_trace,
)
from hetero.swap.best import to_schedule
from hetero.swap.evaluation import Evaluation
from hetero.swap.moments import judged

LINKS = links_of(SLOW)


def candidates_of(step: Step, limit: int) -> list[SwapPlan]:
    found = []
    for method in METHODS:
        try:
            found.append(plan_swaps(step, limit, SLOW, method=method, threshold=1, trials=5))
        except SwapLimitError:
            continue
    return found


@given(steps(), st.data())
@settings(max_examples=80, deadline=None)
def test_it_is_no_slower_than_any_plan_that_it_begins_with(step: Step, data: st.DataObject) -> None:
    limit = limited(step, data)
    start = candidates_of(step, limit)
    trained = one_plan(step, limit, SLOW, threshold=1)
    best = best_plan(step, limit, SLOW, start=start, trained=trained, threshold=1, trials=6)
    # Sums of the same times in another order.
    assert all(best.overhead <= plan.overhead + 1e-9 for plan in (trained, *start))
    check(best.trace, best.schedule)
    assert best.timeline.over_bytes == 0
    assert best.timeline.peak_bytes <= max(moment.capacity for moment in best.trace.moments)
    assert best.schedule.predicted_seconds == best.timeline.step_seconds
    assert best.timeline.step_seconds >= fluid(best.trace, LINKS).step_seconds * (1 - 1e-9)
    assert best == best_plan(step, limit, SLOW, start=start, threshold=1, trials=6)


@given(steps(), st.data(), st.booleans())
@settings(max_examples=150, deadline=None)
def test_a_swap_plan_as_a_schedule_takes_the_same_time(step: Step, data: st.DataObject, eager: bool) -> None:
    limit = limited(step, data)
    gaps = all_gaps(step, threshold=1)
    order = data.draw(st.permutations(range(len(gaps))))
    chosen = select(step, gaps, np.array(order, dtype=np.float64), limit) if gaps else ()
    plan = Evaluation(step, SLOW, limit).plan(chosen, method="random", eager=eager)
    trace = to_trace(step, limit, threshold=1)
    schedule = to_schedule(step, trace, plan, threshold=1)
    check(trace, schedule)
    assert schedule.moved_bytes == plan.moved_bytes
    result = judged(step, limit, trace, schedule, LINKS, patient=True)
    assert result.timeline.over_bytes == 0
    # Across the iteration's end the first iteration begins otherwise, and may end in another steady state.
    assume(all(gap.before < step.span for gap in chosen))
    assert result.timeline.step_seconds == pytest.approx(plan.timeline.step_seconds)


@given(steps())
@settings(max_examples=30, deadline=None)
def test_at_its_peak_load_nothing_moves(step: Step) -> None:
    best = best_plan(step, step.peak_bytes, SLOW, threshold=1)
    assert (best.overhead, best.schedule.moved_bytes) == (0.0, 0)
