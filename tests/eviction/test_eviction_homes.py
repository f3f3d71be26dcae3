"""Which parameters should live on the device: the orders in which they may come to; of one order, the fastest number,
and the fewest bytes of those about as fast."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hetero.eviction import (
    Actions,
    CapacityError,
    HomeCost,
    Links,
    Moment,
    Schedule,
    Trace,
    Updates,
    choose_device_homes,
)
from hetero.eviction.device_homes import rankings

COST = HomeCost(nbytes=40, step_nbytes=0, step_seconds=0.0)


def chosen(outcomes, *, most_bytes=None, cost=COST):
    """``outcomes``: by number of homes, seconds of the step and bytes of copies; None: they do not fit."""
    count = len(outcomes) - 1
    sizes, costs = (10,) * count, dict.fromkeys(range(count), cost)
    most_bytes = 40 * count if most_bytes is None else most_bytes

    def plan(homes):
        outcome = outcomes[len(homes)]
        if outcome is None:
            raise CapacityError(moment=0, needed=2, capacity=1)
        seconds, nbytes = outcome
        trace = Trace(
            sizes=sizes,
            moments=(Moment(capacity=100, operands=()),),
            updates=Updates(tensors=(), seconds=(), queued=0, finished=0),
        )
        return trace, Schedule(
            actions=(Actions(),),
            fetched_bytes=nbytes,
            written_back_bytes=0,
            predicted_seconds=seconds,
            policy="opt",
        )

    links = Links(h2d_bandwidth=1.0, d2h_bandwidth=1.0)
    return choose_device_homes(range(count), costs, sizes, most_bytes=most_bytes, links=links, plan=plan)


@pytest.mark.parametrize(
    ("outcomes", "count", "moves_more"),
    [
        # Gradients of those at home, 10 bytes each, are counted with the copies.
        ([(1.0, 50), (1.0, 55), (1.0, 60), (1.0, 75), (1.0, 95)], 2, False),
        ([(1.0, 50), (1.0, 70), (1.0, 90), (1.0, 99), (1.0, 99)], 0, False),
        ([(1.0, 50), (0.99, 90), (0.99, 95), (0.9, 190), (0.902, 170)], 4, True),
        ([(1.0, 50), (0.9, 60), (0.8, 60), None, None], 2, False),
    ],
)
def test_the_fastest_number_or_the_fewest_bytes(outcomes, count, moves_more):
    best = chosen(outcomes)
    assert best.homes == tuple(range(count))
    assert best.nbytes == 40 * count
    assert best.seconds == outcomes[count][0]
    assert best.moves_more is moves_more


def test_no_more_of_the_device_than_is_given():
    assert chosen([(1.0, 90), (0.5, 80), (0.4, 70), (0.3, 0), (0.2, 0)], most_bytes=100).homes == (0, 1)


def test_parameters_that_take_nothing():
    nothing = HomeCost(nbytes=0, step_nbytes=0, step_seconds=0.0)
    assert chosen([(1.0, 90), (0.5, 80), (0.4, 70)], cost=nothing).homes == (0, 1)


@pytest.mark.parametrize("fit", range(1, 64))
def test_as_many_as_fit_where_more_of_them_move_less(fit):
    outcomes = [(1.0, 1000 - 10 * count) if count <= fit else None for count in range(65)]
    assert chosen(outcomes).homes == tuple(range(fit))


def ranked(nbytes, most_bytes):
    """The rankings of parameters of so many bytes each, the last one used first."""
    order = tuple(reversed(range(len(nbytes))))
    costs = {x: HomeCost(nbytes=n, step_nbytes=0, step_seconds=0.0) for x, n in enumerate(nbytes)}
    return order, rankings(order, costs, most_bytes)


@given(nbytes=st.lists(st.integers(0, 40), max_size=12), most_bytes=st.integers(0, 120))
@example(nbytes=[4, 4, 12, 20, 30], most_bytes=30)
def test_each_ranking_has_all_of_them_and_another_is_worth_it(nbytes, most_bytes):
    order, (first, *others) = ranked(nbytes, most_bytes)
    assert first.ranked == order
    for ranking in (first, *others):
        assert sorted(ranking.ranked) == sorted(order)
        for count in range(len(order) + 1):
            homes = ranking.first(count)
            assert homes == tuple(sorted(ranking.ranked[:count], reverse=True))
            assert ranking.taken[count] == sum(nbytes[x] for x in homes)
        count = ranking.within(most_bytes)
        assert ranking.taken[count] == ranking.held(most_bytes) <= most_bytes
        assert count == len(order) or ranking.taken[count + 1] > most_bytes
    for number, ranking in enumerate(others, 1):
        before = [first, *others[: number - 1]]
        gains = [
            ranking.held(most_bytes * part // 8) - max(each.held(most_bytes * part // 8) for each in before)
            for part in range(1, 9)
        ]
        assert max(gains) > most_bytes / 16


@pytest.mark.parametrize(
    ("nbytes", "most_bytes", "expected"),
    [
        # By use from last to first. All alike, or small beside the device: by first use only.
        ([10, 10, 10, 10], 25, [(3, 2, 1, 0)]),
        ([1, 4, 1, 4, 1, 4], 80, [(5, 4, 3, 2, 1, 0)]),
        # The one that is used first does not fit at all; a quarter of the bytes holds the small ones only.
        ([4, 4, 12, 20, 100], 30, [(4, 3, 2, 1, 0), (3, 1, 0, 4, 2), (1, 0, 2, 3, 4)]),
        ([4, 4, 4, 4, 100], 30, [(4, 3, 2, 1, 0), (3, 2, 1, 0, 4)]),
        # It does, and leaves room for the smallest only; without it there is as much of others.
        ([4, 8, 8, 8, 28], 32, [(4, 3, 2, 1, 0), (4, 0, 3, 2, 1), (0, 3, 2, 1, 4)]),
        # The large one is used last: it keeps nothing out.
        ([100, 4, 4, 4], 30, [(3, 2, 1, 0)]),
    ],
)
def test_other_rankings_where_a_large_one_keeps_others_out(nbytes, most_bytes, expected):
    _, found = ranked(nbytes, most_bytes)
    assert [each.ranked for each in found] == expected
