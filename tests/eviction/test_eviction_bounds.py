"""The lower bounds against an exhaustive search on tiny traces."""

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from random_traces import LINKS, fewest_bytes, traces

from hetero.eviction import Links, Moment, Trace, lower_bound, lower_bound_seconds, plan, relaxation
from hetero.eviction.exchange import _Search, exchange
from hetero.eviction.intervals import read_intervals
from hetero.eviction.relaxation import bound_from_prices
from hetero.eviction.selection import farthest_next_use

TINY = traces(tensors=3, moments=6)
ONES = st.integers(1, 1)


@settings(max_examples=300, deadline=None)
@given(trace=TINY)
def test_the_bound_never_exceeds_the_optimum(trace):
    assert lower_bound(trace) <= fewest_bytes(trace)


@settings(max_examples=150, deadline=None)
@given(trace=TINY, data=st.data())
def test_any_prices_give_a_valid_bound(trace, data):
    prices = data.draw(st.lists(st.floats(0, 2), min_size=len(trace.moments), max_size=len(trace.moments)))
    assert bound_from_prices(read_intervals(trace), np.array(prices)) <= fewest_bytes(trace)


@settings(max_examples=150, deadline=None)
@given(trace=traces(tensors=3, moments=6, sizes=ONES, clean=True, cyclic=False))
def test_with_equal_sizes_and_clean_copies_belady_the_bound_and_the_optimum_agree(trace):
    optimum = fewest_bytes(trace)
    assert lower_bound(trace) == optimum
    for policy in ("opt", "cost-opt"):
        assert plan(trace, links=LINKS, policy=policy, prefetch=False).moved_bytes == optimum


def seeded_trace(seed):
    pick = random.Random(seed)
    sizes = tuple(pick.randint(1, 9) for _ in range(3))
    moments = []
    for _ in range(pick.randint(3, 7)):
        operands = tuple(pick.sample(range(3), pick.randint(0, 2)))
        moments.append(
            Moment(
                operands=operands,
                capacity=sum(sizes[x] for x in operands) + pick.randint(0, 9),
                dirties=tuple(x for x in operands if pick.random() < 0.25),
                invalidates=tuple(x for x in range(3) if pick.random() < 0.05),
            )
        )
    return Trace(sizes=sizes, moments=tuple(moments), cyclic=pick.random() < 0.7)


def test_cost_aware_plans_stay_within_half_a_percent_of_the_optimum_over_many_traces():
    optimum, moved = 0, {"cost-opt": 0, "opt": 0, "lru": 0}
    for trace in map(seeded_trace, range(200)):
        optimum += fewest_bytes(trace)
        for policy in moved:
            moved[policy] += plan(trace, links=LINKS, policy=policy, prefetch=False).moved_bytes
    assert optimum <= moved["cost-opt"] <= 1.005 * optimum
    assert moved["cost-opt"] < moved["opt"] < moved["lru"]


@settings(max_examples=150, deadline=None)
@given(trace=traces(tensors=3, moments=8))
def test_windows_of_time_give_a_valid_bound_too(trace):
    whole = relaxation._MOST_PERIODS, relaxation._WINDOW, relaxation._OVERLAP
    relaxation._MOST_PERIODS, relaxation._WINDOW, relaxation._OVERLAP = 4, 2, 1
    try:
        assert lower_bound(trace) <= fewest_bytes(trace)
    finally:
        relaxation._MOST_PERIODS, relaxation._WINDOW, relaxation._OVERLAP = whole


def test_a_write_back_is_counted_once_however_often_the_clean_copy_leaves_later():
    # Tensor 0 is written once and read twice; tensors 1 and 2 push it out after each use.
    moments = [Moment(operands=(0,), capacity=4, dirties=(0,))]
    moments += [Moment(operands=(x,), capacity=4) for x in (1, 0, 2)]
    trace = Trace(sizes=(4, 4, 4), moments=tuple(moments))
    assert lower_bound(trace) == fewest_bytes(trace) == 4 * 4 + 4


def test_the_bound_in_seconds_sees_fetches_that_cannot_start_before_the_step():
    # Every weight is stepped at home at moment 0: four fetches of 1 s each against 0.1 s of forward, then 10
    # s of backward which needs nothing. Compute takes 10.4 s and transfers 4 s, but they cannot overlap.
    forward = [
        Moment(operands=(x,), seconds=0.1, capacity=40, invalidates=(0, 1, 2, 3) if x == 0 else ())
        for x in range(4)
    ]
    trace = Trace(sizes=(10,) * 4, moments=(*forward, Moment(operands=(), seconds=10.0, capacity=40)))
    links = Links(h2d_bandwidth=10.0, d2h_bandwidth=10.0)
    assert lower_bound_seconds(trace, links) == 14.0
    assert 14.0 <= plan(trace, links=links).predicted_seconds <= 14.1 + 1e-9


@settings(max_examples=100, deadline=None)
@given(trace=traces(moments=20), trials=st.integers(1, 30))
def test_exchanges_never_cost_bytes_and_never_overflow(trace, trials):
    problem = read_intervals(trace)
    before = farthest_next_use(problem, problem.room)
    after = exchange(problem, problem.room, before, trials=trials)
    assert problem.moved_bytes(after) <= problem.moved_bytes(before)
    assert (problem.load(after) <= problem.room).all()


def test_an_exchange_drops_two_small_copies_for_a_more_valuable_large_one():
    # Room for 10 beside moment 1: keeping tensors 1 and 2 saves 7, keeping tensor 0 saves 9.
    moments = (
        Moment(operands=(0, 1, 2), capacity=16),
        Moment(operands=(), capacity=10),
        Moment(operands=(0, 1, 2), capacity=16),
    )
    problem = read_intervals(Trace(sizes=(9, 4, 3), moments=moments, cyclic=False))
    wrong = np.array([x != 0 for x in problem.tensor]) & problem.reused
    right = exchange(problem, problem.room, wrong, trials=9)
    assert (problem.moved_bytes(wrong), problem.moved_bytes(right)) == (16 + 9, 16 + 7)


def test_many_small_copies_that_do_not_make_up_for_a_large_one_are_told_without_a_step_for_each(monkeypatch):
    # Norms and biases beside matrices: what is kept of them over the tight moment does not have the bytes of one more.
    small, large = 100, 4
    sizes = (1,) * small + (1000,) * large
    everyone = tuple(range(len(sizes)))
    moments = (
        Moment(operands=everyone, capacity=sum(sizes)),
        Moment(operands=(), capacity=small + 1000),
        Moment(operands=everyone, capacity=sum(sizes)),
    )
    problem = read_intervals(Trace(sizes=sizes, moments=moments, cyclic=False))
    keep = np.array([x <= small for x in problem.tensor]) & problem.reused
    changes, toggle = [], _Search._toggle
    monkeypatch.setattr(_Search, "_toggle", lambda search, j: [changes.append(j), toggle(search, j)][1])
    assert (exchange(problem, problem.room, keep, trials=large) == keep).all()
    assert len(changes) == 2 * (large - 1)  # each of the others was put there, and taken away again
