"""Places that are filled again: what they do to traces, and to the simulated iteration."""

from dataclasses import replace

import pytest
from chains import SIZE, chain, links
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hetero.eviction import (
    Actions,
    CapacityError,
    Moment,
    Schedule,
    Trace,
    check,
    choose_places,
    lower_bound_seconds,
    plan,
    simulate,
    spare_bytes,
    without_places,
)


def planned(trace, seconds):
    return plan(trace, links=links(seconds))


def test_updates_that_begin_in_backward_shorten_the_iteration_and_not_below_what_it_needs():
    early, late = (planned(chain(12, 8, early=early), 2.0).predicted_seconds for early in (True, False))
    assert early < late
    # Compute, and from the last gradient on: down, updated, up again.
    assert early >= 12 * 3.0 + 2.0 + 3.0 + 2.0 - 1e-9


def test_where_everything_has_a_place_each_is_uploaded_once_and_waited_for_after_its_update():
    trace = chain(3, 6, places=(0, 1, 2), update=5.0)
    schedule = planned(trace, 2.0)
    assert not schedule.fetched_bytes
    result = simulate(trace, schedule, links(2.0))
    assert result.h2d_seconds == 3 * 2.0
    # Gradients of 2, 1, 0 are down 4, 6 and 8 s after backward began; updates end at 9, 14 (the first in order of use
    # that is there) and 19; so layer 0 can begin when the last of these has come up, at 21 at the latest.
    assert 6.0 + 3.0 <= result.step_seconds <= 21.0 + 3.0


def test_the_choice_is_never_worse_than_none_and_better_on_a_chain_that_the_link_holds_up():
    seconds = {}

    def with_places(places):
        trace = chain(24, 14, places)
        schedule = planned(trace, 2.0)
        seconds[places] = schedule.predicted_seconds
        return trace, schedule

    chosen = choose_places(range(24), with_places)
    assert chosen
    assert seconds[chosen] < 0.97 * seconds[()]
    assert seconds[chosen] == min(seconds.values())


class Tried:
    """``choose_places`` over so many tensors; ``seconds``: of an iteration, by its number of places."""

    def __init__(self, count, seconds, **keywords):
        self._seconds, self.numbers = seconds, []
        self.chosen = choose_places(range(count), self._plan, **keywords)

    def _plan(self, places):
        self.numbers.append(len(places))
        schedule = Schedule(
            actions=(Actions(),),
            start=(),
            fetched_bytes=0,
            written_back_bytes=0,
            predicted_seconds=self._seconds(len(places)),
            policy="opt",
        )
        return Trace(sizes=(), moments=(Moment(operands=(), capacity=0),)), schedule


@pytest.mark.parametrize(("thorough", "most"), [(True, 6), (False, 3)])
def test_it_ends_where_each_further_place_makes_it_slower(thorough, most):
    """With activations that leave, say: places take memory from them, for copies that nobody waits for."""
    tried = Tried(48, lambda count: 1.0 + count, thorough=thorough)
    assert tried.chosen == ()
    assert len(tried.numbers) == 1 + most
    assert tried.numbers == sorted(tried.numbers)


@pytest.mark.parametrize("thorough", [True, False])
@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_of_few_tensors_each_number_of_places_is_tried_once(count, thorough):
    """Also where the first do not help."""
    tried = Tried(count, lambda places: 1.0 if places < count // 2 else 0.5, thorough=thorough)
    assert tried.numbers == sorted(set(tried.numbers))
    assert len(tried.chosen) == max(1, count // 2)


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(2, 9),
    room=st.integers(4, 12),
    picks=st.sets(st.integers(0, 8)),
    early=st.booleans(),
    update=st.floats(0.0, 6.0),
    copy=st.floats(0.1, 4.0),
)
def test_any_places_give_valid_schedules_and_times_no_shorter_than_any_server_needs(
    count, room, picks, early, update, copy
):
    places = tuple(sorted(x for x in picks if x < count))
    trace = chain(count, room, places, early=early, update=update)
    try:
        schedule = planned(trace, copy)
    except CapacityError:
        assume(False)
    check(trace, schedule)
    result = simulate(trace, schedule, links(copy))
    busy = max(
        3.0 * count, count * update, count * copy
    )  # each tensor comes up once at least, and goes down once
    assert result.step_seconds >= busy - 1e-6
    issued = simulate(trace, schedule, replace(links(copy), issue=0.25))
    assert issued.issue_seconds >= 0.25 * count  # those with places too
    assert issued.step_seconds >= 3.0 * count + issued.issue_seconds - 1e-6
    for moment, nbytes in zip(trace.moments, result.model_bytes, strict=True):
        assert nbytes <= moment.capacity
    whole = without_places(trace)
    assert whole.updates == replace(trace.updates, places=())
    assert all(not moment.awaits for moment in whole.moments)
    planned(whole, copy)  # has a schedule as well: the same bytes fit


@settings(max_examples=60, deadline=None)
@given(count=st.integers(2, 9), room=st.integers(4, 12))
def test_spare_bytes_are_free_in_every_moment_up_to_the_step(count, room):
    trace = chain(count, room)
    try:
        schedule = planned(trace, 1.0)
    except CapacityError:
        assume(False)
    spare = spare_bytes(trace, schedule)
    for begin in range(len(trace.moments) - 1):
        resident = set(schedule.start)
        for now, (moment, actions) in enumerate(zip(trace.moments[:-1], schedule.actions, strict=False)):
            resident -= {*moment.invalidates, *actions.evict}
            resident |= {*actions.fetch}
            if now >= begin:
                assert SIZE * len(resident) + spare[begin] <= moment.capacity


def test_what_comes_back_in_backward_is_no_less_than_the_bound_of_such_an_iteration():
    trace = chain(12, 16, tuple(range(12)), update=0.1)
    seconds = planned(trace, 2.0).predicted_seconds
    assert lower_bound_seconds(without_places(trace), links(2.0)) <= seconds
    late = replace(trace.updates, early=False, places=())
    # The test can fail: what bounds updates in the step is beyond that.
    assert lower_bound_seconds(replace(without_places(trace), updates=late), links(2.0)) > seconds
