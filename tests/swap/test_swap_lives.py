"""What a swapped step leaves in memory, placed: SmartPool and AutoSwap together."""

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_swap_paper import nested
from test_swap_properties import steps
from ticks import SLOW

from hetero.pool import smartpool
from hetero.pool.cycle import CyclicLife, cyclic_load, plan_cycle
from hetero.swap import Step, SwapPlan, Variable, footprint, least_limit, plan_swaps, resident_lives


def planned(step: Step, limit: int) -> SwapPlan:
    return plan_swaps(step, limit, SLOW, threshold=1, trials=20)


def test_without_swaps_each_variable_is_one_life_and_the_load_is_the_step_s() -> None:
    step = nested()
    lives = resident_lives(step, planned(step, step.peak_bytes))
    # a for all operators, b for five of them, c for three: in begins of others that is 3, 2 and 1 of three.
    assert lives == (
        CyclicLife(nbytes=3, length=3),
        CyclicLife(nbytes=4, length=2),
        CyclicLife(nbytes=5, length=1),
    )
    assert cyclic_load(lives).max() == step.peak_bytes


def test_a_swap_cuts_a_life_in_two_from_the_end_of_its_out_to_the_start_of_its_in() -> None:
    step = nested()
    plan = planned(step, 9)
    assert [(swap.gap.after, swap.gap.before) for swap in plan.swaps] == [(0, 6)]  # a is away at the peak
    lives = resident_lives(step, plan)
    # a's two stays and b's and c's one: a, b, c, a.
    assert [life.nbytes for life in lives] == [3, 4, 5, 3]
    assert cyclic_load(lives).max() == 9


def test_what_stays_over_the_end_of_the_iteration_is_one_life() -> None:
    """Weights that are away in the middle come back before the end and are there when the next iteration begins."""
    step = Step(
        seconds=(10.0,) * 6,
        variables=(
            Variable(nbytes=4, begin=0, end=6, accesses=(0, 5), persistent=True, name="weight"),
            Variable(nbytes=6, begin=2, end=4, accesses=(2, 3), name="activation"),
        ),
    )
    plan = planned(step, 6)
    assert [swap.gap.variable for swap in plan.swaps] == [0]
    lives = resident_lives(step, plan)
    assert sorted((life.nbytes, life.length) for life in lives) == [(4, 1), (6, 1)]
    assert cyclic_load(lives).max() == 6


@settings(deadline=None, max_examples=150)
@given(step=steps(), share=st.floats(0, 1))
def test_lives_are_within_the_limit_and_cover_every_use(step: Step, share: float) -> None:
    least = least_limit(step, threshold=1)
    limit = least + int(share * (step.peak_bytes - least))
    plan = planned(step, limit)
    lives = resident_lives(step, plan)
    load = cyclic_load(lives)
    assert load.max() <= max(limit, plan.timeline.peak_bytes)
    # A swap adds a stay, but where a persistent variable is away once: then it is still one.
    swapped = {swap.gap.variable for swap in plan.swaps}
    wraps = sum(step.variables[index].persistent for index in swapped)
    assert len(step.variables) <= len(lives) <= len(step.variables) + len(plan.swaps) - wraps
    placed = plan_cycle(lives, smartpool)
    assert placed.load_nbytes <= placed.nbytes
    assert_apart(lives, placed.offsets)


def assert_apart(lives: tuple[CyclicLife, ...], offsets: tuple[int | None, ...]) -> None:
    """Naively: no two that are alive at once overlap, in the repeated iteration."""
    period = len(lives)
    alive = [{(place + k) % period for k in range(life.length or 0)} for place, life in enumerate(lives)]
    for one, other in combinations(range(period), 2):
        if alive[one] & alive[other]:
            low, high = sorted((one, other), key=lambda i: offsets[i] or 0)
            assert offsets[low] is not None
            assert offsets[low] + lives[low].nbytes <= offsets[high]  # type: ignore[operator]


@pytest.mark.parametrize("limit", [9, 10, 12])
def test_the_footprint_is_what_the_planner_makes_of_the_lives(limit: int) -> None:
    step = nested()
    plan = planned(step, limit)
    rounded = plan_cycle(resident_lives(step, plan), smartpool, granularity=512)
    assert footprint(step, plan, smartpool) == rounded.nbytes >= 512
