"""What plans are made of: own times without waits, copies as fast as they were, updates on the host. Clocks are set."""

import contextlib
import dataclasses
import math
from itertools import pairwise

import pytest
import torch
from loops import mlp
from twins import device

import hetero
from hetero.eviction import Links, simulate
from hetero.msc import (
    Copy,
    CopyTime,
    Gradient,
    IterationTimes,
    Period,
    PeriodTimes,
    Phase,
    Segment,
    SegmentKey,
    Wait,
    read_times,
)
from hetero.stm.plans import timings
from hetero.stm.plans.timings import Timings, fit_links

PROBED = Links(h2d_bandwidth=100.0, d2h_bandwidth=50.0, latency=0.5)
KEY = SegmentKey(Phase.FORWARD, True, None)


class At:
    """An event that the device reaches at ``seconds``."""

    def __init__(self, seconds):
        self.seconds = seconds

    def elapsed_time(self, later):
        return (later.seconds - self.seconds) * 1e3

    def synchronize(self):
        pass

    def query(self):
        return True


def period(begin, *, before=(), within=(), gradients=(), reached=None, issued=0):
    """``before``, ``within``: waits (from, to), before the operator and after its begin. Its moment was ``reached``
    earlier, and ``issued`` transfers."""
    waits = [Wait(At(a), At(b), False) for a, b in before]
    waits += [Wait(At(a), At(b), True) for a, b in within]
    made = Period(operands=(), waits=waits, gradients=list(gradients))
    made.begin = At(begin)
    made.reached, made.issued = At(begin if reached is None else reached), issued
    return made


def segment(*periods, opened=None, closed=None, copies=(), complete=True, timed=True):
    return Segment(
        KEY,
        sampled=False,
        timed=timed,
        complete=complete,
        periods=list(periods),
        opened=At(opened),
        closed=At(closed),
        copies=list(copies),
    )


def test_own_times_and_waits_add_up_to_the_iteration():
    times = read_times(
        [
            segment(
                period(1.0, before=[(0.25, 0.5)]), period(4.0, before=[(2.0, 3.5)]), opened=0.0, closed=5.0
            ),
            segment(period(8.0, within=[(9.0, 9.5), (10.0, 10.25)]), opened=5.0, closed=12.0),
        ]
    )
    assert times is not None
    # 1 to 4 less the wait for the next one's operands; 4 to 8; 8 to 12 less two waits, and 0 to 1 less one.
    assert [row.seconds for rows in times.segments for row in rows] == [1.5, 4.0, 3.25 + 0.75]
    assert times.seconds == 12.0
    own = sum(row.seconds for rows in times.segments for row in rows)
    waits = 0.25 + 1.5 + 0.5 + 0.25
    assert own + waits == times.seconds


def test_what_the_host_takes_to_issue_transfers_is_nobodys_own_time():
    times = read_times(
        [
            segment(
                period(1.0, reached=0.25, before=[(0.25, 0.5)], issued=1),
                period(4.0, reached=2.0, before=[(2.5, 3.5)], issued=3),
                period(6.0, reached=5.0),  # it issued none: what was done is the library's work
                opened=0.0,
                closed=7.0,
            )
        ]
    )
    assert times is not None
    # 1 to 2; 4 to 6; 6 to 7, and 0 to 0.25.
    assert [row.seconds for rows in times.segments for row in rows] == [1.0, 2.0, 1.0 + 0.25]
    assert (times.issued, times.issue_seconds) == (4, 0.5 + 1.0)
    own, waits = 1.0 + 2.0 + 1.25, 0.25 + 1.0
    assert own + waits + times.issue_seconds == times.seconds


def test_a_gradient_goes_home_after_so_much_own_time():
    gradients = [Gradient(0, 40, At(2.0), waits=1), Gradient(1, 60, At(6.0), waits=2)]
    only = period(1.0, before=[(0.0, 1.0)], within=[(3.0, 5.0)], gradients=gradients)
    times = read_times([segment(only, opened=0.0, closed=7.0)])
    assert times is not None
    assert times.segments == ((PeriodTimes(seconds=4.0, sends=((0, 40, 1.0), (1, 60, 3.0))),),)


def test_gradients_keep_the_order_in_which_they_came_whichever_stream_was_first():
    gradients = [Gradient(0, 40, At(4.0), waits=0), Gradient(1, 60, At(2.0), waits=0)]
    times = read_times([segment(period(1.0, gradients=gradients), opened=0.0, closed=7.0)])
    assert times is not None
    assert times.segments[0][0].sends == ((0, 40, 3.0), (1, 60, 3.0))


def test_an_iteration_that_was_not_timed_as_a_whole_says_nothing():
    whole = segment(period(1.0), opened=0.0, closed=2.0)
    assert read_times([whole, segment(period(3.0), opened=2.0, closed=4.0, timed=False)]) is None
    assert read_times([segment(period(3.0), opened=2.0, closed=4.0, complete=False)]) is None


def test_copies_and_queued_updates_are_read():
    made = segment(
        period(0.0), opened=0.0, closed=1.0, copies=[Copy(True, 30, At(0.25), At(0.5))], complete=True
    )
    made.queued = (2, 0)
    times = read_times([made])
    assert times is not None
    assert times.copies == (CopyTime(is_upload=True, nbytes=30, seconds=0.25),)
    assert times.queued == (2, 0)


def copies(*triples):
    return [CopyTime(is_upload=up, nbytes=nbytes, seconds=seconds) for up, nbytes, seconds in triples]


def test_links_are_as_fast_as_their_copies_were():
    seen = copies((True, 100, 2.5), (True, 50, 1.5), (False, 30, 3.5))
    links = fit_links(seen, PROBED)
    assert links == Links(h2d_bandwidth=150 / 3.0, d2h_bandwidth=10.0, latency=0.5)
    taken = [links.latency + c.nbytes / (links.h2d_bandwidth if c.is_upload else 10.0) for c in seen]
    assert math.isclose(sum(taken), 7.5)


def test_a_copy_faster_than_the_probed_latency_bounds_it():
    assert fit_links(copies((True, 100, 0.25), (True, 100, 0.75)), PROBED).latency == 0.25


def test_without_copies_links_are_as_probed():
    assert fit_links([], PROBED) == PROBED


def times_of(seconds, *, queued=(), issued=0, issue_seconds=0.0):
    return IterationTimes(
        segments=((PeriodTimes(seconds=seconds, sends=()),),),
        seconds=seconds,
        copies=(),
        queued=queued,
        issued=issued,
        issue_seconds=issue_seconds,
    )


def test_a_transfer_takes_as_long_to_issue_as_in_the_middle_round_or_as_before():
    rounds = [
        times_of(1.0, issued=8, issue_seconds=2.0),
        times_of(1.01, issued=2, issue_seconds=3.0),  # something else came in between
        times_of(1.02, issued=2, issue_seconds=0.25),
        times_of(1.03),
    ]
    before = timings._middle(rounds, PROBED, None, 0.0, 0.0)
    assert before.links.issue == 0.25
    # Of what lives on the device nothing is fetched any more; at home it would be again.
    assert timings._middle([times_of(1.0)], PROBED, before, 0.0, 0.0).links.issue == 0.25


def test_plans_are_made_anew_after_the_first_timed_iteration_and_after_three_more(monkeypatch):
    rounds = iter([times_of(5.0), times_of(1.0), None, times_of(3.0), times_of(2.0, queued=(4,))])
    monkeypatch.setattr("hetero.stm.plans.timings.read_times", lambda segments: next(rounds))
    timings = Timings(PROBED)
    work = iter([(10, 2.0), (10, 2.0), (10, 2.0), (10, 2.0), (40, 17.0)])
    timings.host_work = lambda: next(work)
    copies = iter([(0, 0.0), (8, 2.0), (8, 2.0), (8, 2.0), (16, 4.0)])
    timings.copy_work = lambda: next(copies)
    keys = (KEY,)
    assert timings.wants(keys)
    assert [timings.learn(keys, []) for _ in range(5)] == [True, False, False, False, True]
    timing = timings.get(keys)
    assert timing is not None
    assert timing.periods[0][0].seconds == 2.0  # the middle one of the last three
    assert timing.host_seconds == 0.5  # of a byte, in the last of them
    assert timing.copy_seconds == 0.25
    assert timing.queued == (4,)
    assert not timings.wants(keys)
    timings.note_moved(keys, on_trial=False)
    assert not timings.wants(keys)  # until what moves has moved
    timings.forget(keys)
    assert timings.wants(keys)


def copied(seconds, upload_seconds):
    """An iteration of so many seconds, with one copy up of 100 bytes."""
    copy = CopyTime(is_upload=True, nbytes=100, seconds=upload_seconds)
    return dataclasses.replace(times_of(seconds), copies=(copy,))


def followed(timings, count):
    """Of so many iterations, those that were to be timed, and those after which plans were to be made."""
    timed, made = [], []
    for iteration in range(count):
        timed += [iteration] if timings.wants((KEY,)) else []
        made += [iteration] if timings.learn((KEY,), []) else []
    return timed, made


@pytest.mark.parametrize(
    ("later", "drifts"),
    [
        (copied(2.05, 2.5), False),
        (copied(2.07, 2.5), True),
        (copied(1.93, 2.5), True),
        (copied(2.0, 2.4), False),
        (copied(2.0, 2.75), True),
    ],
)
def test_times_are_looked_at_again_ever_more_rarely_and_plans_follow_what_drifts(monkeypatch, later, drifts):
    seen = iter([copied(2.0, 2.5)] * 7 + [later] * 3)
    monkeypatch.setattr("hetero.stm.plans.timings.read_times", lambda segments: next(seen))
    timings = Timings(PROBED)
    timed, made = followed(timings, 82)
    # The first; three more; three after eight, which were as before; and three after sixty-four.
    assert timed == [0, 1, 2, 3, 12, 13, 14, 79, 80, 81]
    assert made == ([0, 3, 81] if drifts else [0, 3])
    found = timings.get((KEY,))
    assert found is not None
    assert found.own_seconds == (later.seconds if drifts else 2.0)
    assert found.typical_seconds == later.seconds  # what moves on trial is compared with
    assert timings.is_final((KEY,))


def test_a_look_at_iterations_that_leave_something_out_is_given_up(monkeypatch):
    whole, part = copied(2.0, 2.5), dataclasses.replace(copied(1.0, 2.5), segments=((),))
    seen = iter([whole] * 4 + [part, None, part, whole] * 3 + [part] * 4)
    monkeypatch.setattr("hetero.stm.plans.timings.read_times", lambda segments: next(seen))
    timings = Timings(PROBED)
    timed, made = followed(timings, 28)
    # Eight of no use come before the third whole one.
    assert timed == [0, 1, 2, 3, *range(12, 22)]
    assert made == [0, 3]
    found = timings.get((KEY,))
    assert found is not None
    assert found.own_seconds == 2.0


def test_a_direction_without_copies_has_not_drifted(monkeypatch):
    both = (*copied(2.0, 2.5).copies, CopyTime(is_upload=False, nbytes=100, seconds=4.5))
    seen = iter([dataclasses.replace(times_of(2.0), copies=both)] * 4 + [copied(2.0, 2.5)] * 3)
    monkeypatch.setattr("hetero.stm.plans.timings.read_times", lambda segments: next(seen))
    timings, keys = Timings(PROBED), (KEY,)
    assert timings.wants(keys)
    assert [n for n in range(15) if timings.learn(keys, [])] == [0, 3]
    assert timings.links(keys).d2h_bandwidth == 25.0  # as it was, and not as probed


def test_a_plan_is_made_anew_where_a_look_finds_drift(monkeypatch):
    made = []
    monkeypatch.setattr(timings, "_has_drifted", lambda before, now: not made.append(now))
    plans = []
    with trained(iterations=30, after=lambda manager: plans.append(manager._stm.plans.last)) as manager:
        timing = manager._stm.plans.timings.get(plans[-1].keys)
    assert len(made) == 1
    assert timing == made[0]
    # The last one was made after the look, which had no choice to follow: eight iterations, and three that are timed.
    changes = [n for n, (one, other) in enumerate(pairwise(plans), 1) if one is not other]
    assert changes[-1] - changes[-2] == 8 + 3


@pytest.mark.parametrize(("with_it", "in_vain"), [(1.5, False), (1.99, True), (2.5, True)])
def test_what_moves_on_trial_has_to_make_iterations_shorter(monkeypatch, with_it, in_vain):
    without = [times_of(seconds) for seconds in (9.0, 2.0, 3.0, 1.0)]
    rounds = iter([*without, *(times_of(with_it + off) for off in (-0.25, 0.0, 0.25))])
    monkeypatch.setattr("hetero.stm.plans.timings.read_times", lambda segments: next(rounds))
    timings = Timings(PROBED)
    keys = (KEY,)
    assert timings.wants(keys)
    while not timings.is_final(keys):
        timings.learn(keys, [])
    before = timings.get(keys)
    assert not timings.was_in_vain(keys)  # nothing has moved
    timings.note_moved(keys, on_trial=True)
    assert [timings.learn(keys, []) for _ in range(5)] == [False, False, False, False, True]
    with_them = timings.get(keys)
    assert with_them != before
    assert timings.was_in_vain(keys) is in_vain
    assert timings.get(keys) == (
        before if in_vain else with_them
    )  # what is taken back is planned for at once
    assert not timings.was_in_vain(keys)


@pytest.fixture
def planned():
    """A manager whose plan is final, with a schedule that moves copies, gradients and saved tensors."""
    with trained() as manager:
        yield manager


@contextlib.contextmanager
def trained(note=lambda manager: None, *, iterations=9, after=lambda manager: None):
    """As `planned`; ``note`` is told of it before the first iteration, ``after`` after each. No update begins in
    backward: whether that pays follows from what this machine took for updates, and plans are made anew for it."""
    target = device(bandwidth="1GiB/s", latency="20us")
    torch.manual_seed(0)
    model = mlp(depth=6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with hetero.manage(
        model, optimizer, device=target, device_budget="512KiB", device_homes=False, speculate=False
    ) as manager:
        note(manager)
        for _ in range(iterations):
            model(torch.randn(64, 64).to(target)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            after(manager)
        manager._stm.close_books()
        yield manager


def test_the_prediction_is_the_simulation_of_what_was_timed(planned):
    plans = planned._stm.plans
    plan = plans.last
    timing = plans.timings.get(plan.keys)
    assert timing is not None
    assert not plans.timings.wants(plan.keys)
    rows = [row for rows in timing.periods for row in rows]
    assert [moment.seconds for moment in plan.trace.moments] == [row.seconds for row in rows]
    result = simulate(plan.trace, plan.schedule, timing.links)
    assert planned.plan.predicted_seconds == result.step_seconds
    assert result.compute_seconds == pytest.approx(sum(row.seconds for row in rows))


def issued_and_simulated(monkeypatch):
    """Transfers of the last iteration that is timed, and of the simulation of its plan."""
    rounds = []

    def and_note(segments):
        times = read_times(segments)
        if times is not None:
            rounds.append((times.issued, managers[0]._stm.plans.last))
        return times

    monkeypatch.setattr("hetero.stm.plans.timings.read_times", and_note)
    managers = []
    with trained(managers.append) as manager:
        issued, plan = rounds[-1]
        moved = [x for actions in plan.schedule.actions for x in actions.fetch]
        assert any(x >= len(manager._stm.tensors) for x in moved)  # saved tensors, which have left before
        result = simulate(plan.trace, plan.schedule, Links(h2d_bandwidth=1e9, d2h_bandwidth=1e9, issue=1.0))
        assert result.issue_seconds > len(moved)
        assert "to issue transfers" in str(manager.plan)
        assert manager.plan.issue_seconds == manager._stm.plans.last.schedule.issue_seconds > 0.0
        return issued, result.issue_seconds


def test_as_many_transfers_are_issued_as_the_simulation_issues(monkeypatch):
    # A busy machine departs from the plan at times: 40, 58 and 66 of 62 were seen, in one of some thirty runs.
    runs = [issued_and_simulated(monkeypatch)]
    while runs[-1][0] != runs[-1][1] and len(runs) < 5:
        runs.append(issued_and_simulated(monkeypatch))
    issued, simulated = runs[-1]
    assert issued == simulated, runs


def test_every_gradient_and_every_update_is_in_the_trace(planned):
    tensors = planned._stm.tensors
    trace = planned._stm.plans.last.trace
    everyone = {tensor.index for tensor in tensors}
    sent = [send for moment in trace.moments for send in moment.sends]
    assert {send.tensor for send in sent} == everyone
    assert sum(send.nbytes for send in sent) == sum(tensor.home.nbytes for tensor in tensors)
    assert set(trace.updates.tensors) == everyone
    assert all(seconds > 0.0 for seconds in trace.updates.seconds)
    step = [moment for moment, key in enumerate(planned._stm.plans.last.keys) if key.phase is Phase.STEP]
    bounds = planned._stm.plans.last.bounds
    assert bounds[step[0]] == trace.updates.finished < trace.updates.queued == bounds[step[0] + 1] - 1


def test_an_iteration_that_is_not_timed_records_nothing(planned):
    for each in planned._stm.plans.last_segments:
        assert not each.timed
        assert each.copies == []
        assert all(not period.waits and period.begin is None for period in each.periods)


def test_what_lived_on_the_device_counts_as_queued_once_it_is_home():
    def times(queued):
        return IterationTimes(segments=(), seconds=1.0, copies=(), queued=queued, issued=0, issue_seconds=0.0)

    probed = Links(h2d_bandwidth=1e9, d2h_bandwidth=1e9)
    before = timings._middle([times((0, 1, 2))], probed, None, 0.0, 0.0)
    assert timings._middle([times((2, 3))], probed, before, 0.0, 0.0).queued == (2, 3, 0, 1)


def test_what_runs_on_a_stream_of_its_own_is_waited_for():
    """Compute has gone on, and waits for nothing of it."""
    target = device(bandwidth="20MiB/s")
    x, host = (
        torch.ones(1 << 20, dtype=torch.uint8).to(target),
        torch.empty(1 << 20, dtype=torch.uint8).pin_memory(),
    )
    side = torch.Stream(device=target)
    side.wait_stream(torch.accelerator.current_stream())
    gradient, closed = (torch.Event(device=target, enable_timing=True) for _ in range(2))
    begun, opened = (torch.Event(device=target, enable_timing=True) for _ in range(2))
    opened.record()
    begun.record()
    with side:
        host.copy_(x, non_blocking=True)  # 50 ms
        gradient.record()
    closed.record()
    assert not gradient.query()
    made = Period(operands=(), gradients=[Gradient(0, 4, gradient, 0)])
    made.begin = begun
    times = read_times(
        [Segment(KEY, sampled=False, timed=True, complete=True, periods=[made], opened=opened, closed=closed)]
    )
    assert times is not None
    [(_, _, seconds)] = times.segments[0][0].sends
    assert 0.0 < seconds <= times.segments[0][0].seconds  # as far as compute is concerned
