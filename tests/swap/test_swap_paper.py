"""Scores, selection and schedule on steps small enough to work out by hand, after the AutoSwap paper's figures."""

import numpy as np
import pytest
from ticks import SLOW

from hetero.errors import BudgetError, ConfigError, PlanError
from hetero.swap import (
    Step,
    SwapLimitError,
    Variable,
    all_gaps,
    candidates,
    combine,
    least_limit,
    plan_swaps,
    schedule,
    scores,
    select,
    swap_everything,
)


def nested() -> Step:
    """Three variables, made one after another and used again in reverse: Figure 7's shape.

    Operators 0, 1, 2 make them, 3 is the peak, 4, 5, 6 use them last to first; each operator takes 10 s.
    """
    return Step(
        seconds=(10.0,) * 7,
        variables=(
            Variable(nbytes=3, begin=0, end=7, accesses=(0, 6), name="a"),
            Variable(nbytes=4, begin=1, end=6, accesses=(1, 5), name="b"),
            Variable(nbytes=5, begin=2, end=5, accesses=(2, 4), name="c"),
        ),
    )


def test_the_load_curve_peaks_where_all_three_are_alive() -> None:
    step = nested()
    assert step.load.tolist() == [3, 7, 12, 12, 12, 7, 3]
    assert (step.peak_bytes, step.peak_at) == (12, 2)


def test_candidates_are_large_and_absent_at_the_peak() -> None:
    step = nested()
    # Operator 2 itself makes c: at the first of the peak's operators it cannot be away.
    assert [gap.nbytes for gap in candidates(step, threshold=1)] == [3, 4]
    assert [gap.nbytes for gap in candidates(step, threshold=4)] == [4]
    assert [(gap.after, gap.before) for gap in all_gaps(step, threshold=1)] == [(0, 6), (1, 5), (2, 4)]


def test_the_scores_are_those_worked_out_by_hand() -> None:
    step = nested()
    by_score = scores(step, all_gaps(step, threshold=1), SLOW)
    # a is away from 10 to 60, b from 20 to 50, c from 30 to 40; both transfers take 2 x bytes.
    assert by_score["doa"].tolist() == [50 - 6, 30 - 8, 10 - 10]
    assert by_score["aoa"].tolist() == [44 * 3, 22 * 4, 0]
    assert by_score["wdoa"].tolist() == [10 * (7 + 12 + 12 + 12 + 7), 10 * 36, 10 * 12]
    # a first; b's area then lacks 3 bytes over 30 s, and c's 7 over 10 s.
    assert by_score["swdoa"].tolist() == [500, 10 * (36 - 9), 10 * (12 - 7)]


def test_a_negative_duration_of_absence_is_divided_by_the_size() -> None:
    step = Step(
        seconds=(1.0,) * 3,
        variables=(
            Variable(nbytes=2, begin=0, end=3, accesses=(0, 2)),
            Variable(nbytes=8, begin=0, end=3, accesses=(0, 2)),
        ),
    )
    by_score = scores(step, all_gaps(step, threshold=1), SLOW)
    assert by_score["doa"].tolist() == [1 - 4, 1 - 16]
    assert by_score["aoa"].tolist() == [-3 / 2, -15 / 8]


def test_a_persistent_variable_is_away_across_the_end_of_the_iteration() -> None:
    step = Step(
        seconds=(10.0,) * 4,
        variables=(Variable(nbytes=2, begin=0, end=4, accesses=(1, 2), persistent=True),),
    )
    (gap,) = all_gaps(step, threshold=1)
    assert (gap.after, gap.before) == (2, 5)
    assert [gap.covers(t, 4) for t in range(4)] == [True, False, False, True]
    assert scores(step, [gap], SLOW)["doa"].tolist() == [20 - 4]
    assert scores(step, [gap], SLOW)["wdoa"].tolist() == [2 * 20]


def test_the_combination_weighs_standardised_scores_and_ignores_those_that_say_nothing() -> None:
    same = np.array([5.0, 5.0])
    by_score = {"doa": np.array([1.0, 3.0]), "aoa": same, "wdoa": np.array([7.0, 1.0]), "swdoa": same}
    assert combine(by_score, (1.0, 1.0, 0.5, -1.0)).tolist() == [-1.0 + 0.5, 1.0 - 0.5]
    with pytest.raises(ConfigError, match="2 weights"):
        combine(by_score, (1.0, 1.0))


def test_selection_stops_at_the_limit_and_not_before() -> None:
    step = nested()
    gaps = all_gaps(step, threshold=1)
    score = np.array([3.0, 2.0, 1.0])
    assert select(step, gaps, score, 12) == ()
    assert select(step, gaps, score, 9) == gaps[:1]
    assert select(step, gaps, score, 8) == gaps[:2]  # 12 - 3 = 9 is still above 8
    # c is in use in operators 2 and 4: moving it does not help there, and b goes as well.
    assert select(step, gaps, -score, 9) == (gaps[2], gaps[1])


def test_a_limit_that_no_candidate_helps_to_meet_is_refused_with_the_least_one() -> None:
    step = nested()
    with pytest.raises(SwapLimitError, match="leaves a load of 5 B") as caught:
        plan_swaps(step, 3, SLOW, method="doa", threshold=1)
    assert caught.value.least == 5 == least_limit(step, method="doa", threshold=1)
    assert isinstance(caught.value, BudgetError)


def test_ins_are_planned_backwards_one_at_a_time_and_as_late_as_is_in_time() -> None:
    step = nested()
    gaps = all_gaps(step, threshold=1)
    # c must be back at 40 (in from 35), b at 50 (from 46), a at 60 (from 57): in operators 3, 4 and 5.
    swaps = schedule(step, gaps, SLOW, limit=12)
    assert [(swap.gap.nbytes, swap.release) for swap in swaps] == [(5, 3), (4, 4), (3, 5)]


def test_an_in_starts_only_after_enough_is_freed() -> None:
    step = nested()
    gaps = all_gaps(step, threshold=1)
    # With b and a away, operator 4 uses c (5): beside it is room for b within 9, but not within 8.
    assert [swap.release for swap in schedule(step, gaps[:2], SLOW, limit=9)] == [4, 5]
    assert [swap.release for swap in schedule(step, gaps[:2], SLOW, limit=8)] == [5, 5]


def test_transfers_that_fit_between_uses_cost_no_time() -> None:
    plan = plan_swaps(nested(), 9, SLOW, method="wdoa", threshold=1)
    assert [swap.gap.nbytes for swap in plan.swaps] == [3]
    assert plan.overhead == 0.0
    assert plan.timeline.step_seconds == 70.0
    assert plan.timeline.peak_bytes <= 9
    assert plan.moved_bytes == 6


def test_an_allocation_waits_for_a_late_out() -> None:
    # a (8 bytes) leaves from 1 to 9; operator 1 has no memory until then: 8 s late. It is back in time.
    step = Step(
        seconds=(1.0, 20.0, 1.0),
        variables=(
            Variable(nbytes=8, begin=0, end=3, accesses=(0, 2)),
            Variable(nbytes=8, begin=1, end=2, accesses=(1,)),
        ),
    )
    plan = plan_swaps(step, 8, SLOW, method="doa", threshold=1)
    # The in has no room until operator 1 has ended, at 29, and takes until 37.
    assert plan.timeline.stall_seconds["memory"] == 8.0
    assert plan.timeline.stall_seconds["h2d"] == 8.0
    assert plan.timeline.step_seconds == 22.0 + 16.0
    assert plan.timeline.peak_bytes == 8
    assert plan.timeline.over_bytes == 0


def test_swapping_everything_moves_every_candidate() -> None:
    plan = swap_everything(nested(), 12, SLOW, threshold=1)
    assert plan.moved_bytes == 2 * (3 + 4)


def test_an_unknown_method_and_a_step_that_makes_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match="not one of doa"):
        plan_swaps(nested(), 9, SLOW, method="best")  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="outside its life"):
        Step(seconds=(1.0, 1.0), variables=(Variable(nbytes=1, begin=0, end=1, accesses=(1,)),))
    with pytest.raises(PlanError, match="ascending"):
        Step(seconds=(1.0, 1.0), variables=(Variable(nbytes=1, begin=0, end=2, accesses=(0, 1, 1)),))
