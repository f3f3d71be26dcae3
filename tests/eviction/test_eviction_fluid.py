"""The fluid's bound against simulated schedules of every kind, and where the answer is known."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_traces import LINKS, POLICIES, traces, traces_with_products

import hetero.eviction.fluid as package
from hetero.eviction import Links, Moment, Send, Trace, lower_bound_seconds, plan, simulate
from hetero.eviction.fluid import fluid
from hetero.eviction.intervals import read_intervals
from hetero.eviction.sweep import repair
from hetero.eviction.transfers import lay_out

SLOW = Links(h2d_bandwidth=1.0, d2h_bandwidth=2.0, latency=0.25)
TRACES = st.one_of(traces(cyclic=True), traces_with_products(cyclic=True))
CHECKPOINTS = st.sampled_from([1, 2, 5, 64])


@settings(max_examples=200, deadline=None)
@given(trace=TRACES, links=st.sampled_from([LINKS, SLOW]), checkpoints=CHECKPOINTS, data=st.data())
def test_no_schedule_is_faster_whatever_it_lets_leave(trace, links, checkpoints, data):
    problem = read_intervals(trace)
    stays = data.draw(st.lists(st.booleans(), min_size=len(problem.use), max_size=len(problem.use)))
    keep = (problem.reused | (problem.group >= 0)) & np.array(stays, dtype=bool)
    keep = repair(problem, problem.room, keep)
    schedule = lay_out(problem, keep, prefetch=data.draw(st.booleans()), policy="random")
    bound = fluid(trace, links, checkpoints=checkpoints)
    assert simulate(trace, schedule, links).step_seconds >= bound.step_seconds * (1 - 1e-9)
    assert ((bound.away >= -1e-6) & (bound.away <= 1 + 1e-6)).all()  # the solver's tolerance


@settings(max_examples=100, deadline=None)
@given(trace=TRACES, policy=st.sampled_from(POLICIES))
def test_no_plan_is_faster(trace, policy):
    schedule = plan(trace, links=SLOW, policy=policy)
    bound = fluid(trace, SLOW).step_seconds
    assert sum(moment.seconds for moment in trace.moments) <= bound
    assert schedule.predicted_seconds >= bound * (1 - 1e-9)
    assert lower_bound_seconds(trace, SLOW) >= bound


@settings(max_examples=50, deadline=None)
@given(trace=TRACES, seed=st.integers(0, 99))
def test_wrong_prices_only_weaken_the_bound(trace, seed):
    best = fluid(trace, SLOW).step_seconds
    solve = package.linprog

    def disturbed(*arguments, **keywords):
        result = solve(*arguments, **keywords)
        noise = np.random.default_rng(seed).normal(size=len(result.ineqlin.marginals))
        result.ineqlin.marginals = result.ineqlin.marginals + 0.3 * noise
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(package, "linprog", disturbed)
        # Relative to the solver's tolerance, which ours is added to.
        assert fluid(trace, SLOW).step_seconds <= best * (1 + 1e-6) + 1e-6


def swapping(*, dirty: bool) -> Trace:
    """Two tensors of 10 bytes take turns where only one of them fits; 1 s each."""
    return Trace(
        sizes=(10, 10),
        moments=tuple(
            Moment(operands=(x,), seconds=1.0, capacity=10, dirties=(x,) if dirty else ()) for x in (0, 1)
        ),
    )


def test_two_tensors_that_take_turns_are_fetched_one_after_the_other():
    links = Links(h2d_bandwidth=1.0, d2h_bandwidth=0.5)
    assert fluid(swapping(dirty=False), links).step_seconds == pytest.approx(20.0)
    # Written, each also needs 20 s down; as a fluid up and down go on at the same time.
    assert fluid(swapping(dirty=True), links).step_seconds == pytest.approx(40.0)
    assert fluid(swapping(dirty=False), links).away.tolist() == pytest.approx([1.0, 1.0])


def test_where_everything_fits_the_operators_are_the_bound():
    trace = swapping(dirty=True)
    roomy = replace(trace, moments=tuple(replace(moment, capacity=20) for moment in trace.moments))
    assert fluid(roomy, SLOW).step_seconds == 2.0


def test_what_is_invalidated_is_fetched_again_and_gradients_take_their_time():
    links = Links(h2d_bandwidth=1.0, d2h_bandwidth=1.0)
    first = Moment(operands=(0,), seconds=1.0, capacity=10, invalidates=(0,))
    assert fluid(Trace(sizes=(10,), moments=(first,)), links).step_seconds == pytest.approx(10.0)
    sending = replace(first, sends=(Send(tensor=0, nbytes=30, seconds=0.5),))
    trace = Trace(sizes=(10,), moments=(sending,), sending_bytes=30)
    assert fluid(trace, links).step_seconds == pytest.approx(30.0)


def test_a_trace_that_does_not_repeat_is_bounded_by_its_operators():
    trace = replace(swapping(dirty=True), cyclic=False)
    assert fluid(trace, SLOW).step_seconds == 2.0
