"""Plans of random steps against a naive second-by-second simulator, and against the rules of swapping."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ticks import SLOW, run

from hetero.simulate import simulate_program
from hetero.swap import (
    Method,
    Step,
    SwapLimitError,
    Variable,
    all_gaps,
    candidates,
    least_limit,
    lower,
    lower_bound_limit,
    plan_swaps,
    schedule,
)
from hetero.swap.selection import load_without

METHODS: tuple[Method, ...] = ("doa", "aoa", "wdoa", "swdoa", "search")
ITERATIONS = 12


@st.composite
def steps(draw: st.DrawFn) -> Step:
    """Up to 9 operators of 1 to 20 s and 8 variables of 1 to 9 bytes, some of them persistent."""
    span = draw(st.integers(2, 9))
    variables = []
    for _ in range(draw(st.integers(1, 8))):
        persistent = draw(st.booleans())
        begin = 0 if persistent else draw(st.integers(0, span - 1))
        end = span if persistent else draw(st.integers(begin + 1, span))
        uses = draw(st.sets(st.integers(begin, end - 1), min_size=1, max_size=4))
        variables.append(
            Variable(
                nbytes=draw(st.integers(1, 9)),
                begin=begin,
                end=end,
                accesses=tuple(sorted(uses)),
                persistent=persistent,
            )
        )
    seconds = tuple(float(draw(st.integers(1, 20))) for _ in range(span))
    return Step(seconds=seconds, variables=tuple(variables))


@st.composite
def problems(draw: st.DrawFn) -> tuple[Step, Method, int]:
    step, method = draw(steps()), draw(st.sampled_from(METHODS))
    least = least_limit(step, method=method, threshold=1)
    return step, method, draw(st.integers(least, max(least, step.peak_bytes)))


def planned(step: Step, method: Method, limit: int) -> Any:
    return plan_swaps(step, limit, SLOW, method=method, threshold=1, trials=5)


@given(problems())
@settings(max_examples=200, deadline=None)
def test_the_event_simulation_agrees_with_the_naive_one_second_by_second(
    problem: tuple[Step, Method, int],
) -> None:
    step, method, limit = problem
    plan = planned(step, method, limit)
    naive = run(step, plan.swaps, limit, ITERATIONS)
    ends = [end for _, end in naive.operators][step.span - 1 :: step.span]
    busy = max(plan.timeline.busy_seconds.values())
    done = plan.timeline.iterations  # it stops as soon as a step repeats
    assert plan.timeline.step_seconds == max(ends[done - 1] - ends[done - 2], busy)
    inside = naive.memory[ends[done - 2] : ends[done - 1]]
    assert plan.timeline.peak_bytes >= max(inside, default=0)


@given(problems())
@settings(max_examples=200, deadline=None)
def test_memory_stays_within_the_limit_and_transfers_keep_their_order(
    problem: tuple[Step, Method, int],
) -> None:
    step, method, limit = problem
    plan = planned(step, method, limit)
    naive = run(step, plan.swaps, limit, ITERATIONS)
    assert load_without(step, [swap.gap for swap in plan.swaps]).max() <= limit
    assert plan.timeline.over_bytes == 0
    assert plan.timeline.peak_bytes <= limit
    memory = simulate_program(lower(step, plan.swaps, SLOW), limit=limit, memory=True).memory_bytes
    assert memory.min() >= 0
    assert memory.max() <= limit
    for transfers in (naive.outs, naive.ins):
        times = sorted(transfers.values())
        assert all(one[1] <= other[0] for one, other in pairwise(times))
    for (turn, k), (begin, end) in naive.ins.items():
        gap = plan.swaps[k].gap
        base = turn - (gap.before >= step.span)
        if base >= 0:
            assert naive.operators[base * step.span + gap.after][1] <= naive.outs[base, k][0]
            assert naive.outs[base, k][1] <= begin
        used = turn * step.span + gap.before % step.span
        assert used >= len(naive.operators) or end <= naive.operators[used][0]


@given(problems())
@settings(max_examples=100, deadline=None)
def test_a_swapped_variable_is_used_by_nobody_while_it_is_away(problem: tuple[Step, Method, int]) -> None:
    step, method, limit = problem
    gaps = [swap.gap for swap in planned(step, method, limit).swaps]
    assert len(set(gaps)) == len(gaps)
    for gap in gaps:
        variable = step.variables[gap.variable]
        for t in range(step.span):
            if gap.covers(t, step.span):
                assert variable.begin <= t < variable.end
                assert t not in variable.accesses
                assert t != variable.begin or variable.persistent


@given(steps())
@settings(max_examples=100, deadline=None)
def test_no_plan_without_overhead_lies_below_the_bound(step: Step) -> None:
    bound = lower_bound_limit(step, SLOW, threshold=1)
    for method in METHODS:
        for limit in range(least_limit(step, method=method, threshold=1), bound):
            assert planned(step, method, limit).overhead > 0.0


@given(steps())
@settings(max_examples=100, deadline=None)
def test_the_search_is_no_worse_than_the_best_score(step: Step) -> None:
    limit = least_limit(step, method="doa", threshold=1)
    if limit >= step.peak_bytes:
        return
    search = planned(step, "search", limit)
    assert search.overhead <= min(planned(step, method, limit).overhead for method in METHODS[:-1])
    assert search == planned(step, "search", limit), "the same seed must give the same plan"


def test_no_trials_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr("hetero.swap.planner.search", lambda *_, trials, **__: asked.append(trials))
    step = Step(seconds=(1.0, 1.0), variables=(Variable(nbytes=1, begin=0, end=2, accesses=(0, 1)),))
    plan_swaps(step, 1, SLOW, threshold=1, trials=0)
    assert asked == [0]


@given(steps(), st.data())
@settings(max_examples=100, deadline=None)
def test_eager_ins_start_no_later_and_have_room_as_well(step: Step, data: st.DataObject) -> None:
    gaps = all_gaps(step, threshold=1)
    limit = data.draw(st.integers(least_limit(step, threshold=1), step.peak_bytes))
    late = schedule(step, gaps, SLOW, limit)
    eager = schedule(step, gaps, SLOW, limit, eager=True)
    assert [swap.gap for swap in late] == [swap.gap for swap in eager]
    for swaps in (late, eager):
        assert all(swap.gap.after < swap.release <= swap.gap.before for swap in swaps)
        timeline = simulate_program(lower(step, swaps, SLOW), limit=limit)
        assert timeline.over_bytes == 0
        assert timeline.peak_bytes <= limit


@given(steps())
@settings(max_examples=50, deadline=None)
def test_below_the_least_limit_every_method_refuses(step: Step) -> None:
    for method in METHODS:
        with pytest.raises(SwapLimitError):
            planned(step, method, least_limit(step, method=method, threshold=1) - 1)
    assert set(candidates(step, threshold=1)) <= set(all_gaps(step, threshold=1))
