"""The named policies, and what is refused before any planning."""

import math
import pickle
from dataclasses import replace

import pytest
from random_traces import LINKS

from hetero.errors import BudgetError, ConfigError, PlanError
from hetero.eviction import (
    Candidate,
    CapacityError,
    Links,
    Moment,
    Send,
    Trace,
    Updates,
    plan,
    resolve_policy,
)


def copy(tensor, nbytes, *, next_use=1.0, last_use=0.0, fetched_at=0.0, dirty=False):
    return Candidate(
        tensor=tensor,
        nbytes=nbytes,
        next_use=next_use,
        last_use=last_use,
        fetched_at=fetched_at,
        dirty=dirty,
    )


def test_opt_evicts_the_copy_needed_last():
    copies = [copy(0, 4, next_use=2), copy(1, 4, next_use=9), copy(2, 4, next_use=math.inf)]
    assert resolve_policy("opt").victims(copies, 8) == [2, 1]


def test_opt_lets_stay_what_a_larger_victim_made_unnecessary():
    copies = [copy(0, 1, next_use=9), copy(1, 100, next_use=8), copy(2, 50, next_use=7)]
    assert resolve_policy("opt").victims(copies, 100) == [1]


def test_cost_opt_prefers_clean_copies_to_dirty_ones_needed_a_little_later():
    copies = [copy(0, 4, next_use=10, dirty=True), copy(1, 4, next_use=8)]
    assert resolve_policy("cost-opt").victims(copies, 4) == [1]
    assert resolve_policy("opt").victims(copies, 4) == [0]


def test_lru_looks_at_the_last_use_and_fifo_at_the_fetch():
    copies = [copy(0, 4, last_use=5, fetched_at=1), copy(1, 4, last_use=3, fetched_at=2)]
    assert resolve_policy("lru").victims(copies, 4) == [1]
    assert resolve_policy("fifo").victims(copies, 4) == [0]


def test_all_are_named_when_all_together_free_too_little():
    for name in ("opt", "cost-opt", "lru", "fifo"):
        assert sorted(resolve_policy(name).victims([copy(0, 4), copy(1, 4)], 100)) == [0, 1]


def test_an_unknown_policy_is_refused_with_the_choices():
    with pytest.raises(ConfigError, match=r"'belady'.*'opt', 'cost-opt', 'lru', 'fifo'"):
        resolve_policy("belady")


def test_operands_beyond_the_capacity_are_refused_with_moment_and_bytes():
    trace = Trace(
        sizes=(6, 6), moments=(Moment(operands=(0,), capacity=9), Moment(operands=(0, 1), capacity=9))
    )
    with pytest.raises(CapacityError, match="moment 1 needs 12 B") as caught:
        plan(trace, links=LINKS)
    error = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(error, BudgetError)
    assert (error.moment, error.needed, error.capacity) == (1, 12, 9)


@pytest.mark.parametrize(
    ("sizes", "moment", "message"),
    [
        ((-1,), {}, "tensor 0 has -1 bytes"),
        ((1,), {"operands": (1,)}, "moment 0 names tensor 1"),
        ((1,), {"invalidates": (-1,)}, "moment 0 names tensor -1"),
        ((1,), {"dirties": (0,)}, r"dirties tensors \[0\]"),
        ((1,), {"seconds": math.nan}, "moment 0 takes nan s"),
    ],
)
def test_a_trace_that_makes_no_sense_is_refused(sizes, moment, message):
    with pytest.raises(PlanError, match=message):
        Trace(sizes=sizes, moments=(Moment(**{"operands": (), "capacity": 1, **moment}),))


UPDATED = Updates(tensors=(0, 1), seconds=(1.0, 2.0), queued=1, finished=1, places=(1,))
SENDING = Moment(
    operands=(0,), awaits=(1,), seconds=2.0, capacity=9, sends=(Send(tensor=0, nbytes=4, seconds=1.0),)
)


def updating(moment=None, updates=None, **keywords):
    moments = (replace(SENDING, **(moment or {})), Moment(operands=(), capacity=9))
    updates = None if updates == {} else replace(UPDATED, **(updates or {}))
    return Trace(sizes=(4, 4), moments=moments, updates=updates, **keywords)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"sending_bytes": -1}, "-1 bytes may be on their way"),
        ({"moment": {"still_sending": -1}}, "-1 bytes may be on their way as moment 0 begins"),
        ({"moment": {"sends": (Send(tensor=2, nbytes=4, seconds=1.0),)}}, "moment 0 sends .* tensor 2"),
        ({"moment": {"sends": (Send(tensor=-1, nbytes=4, seconds=1.0),)}}, "moment 0 sends .* tensor -1"),
        ({"moment": {"sends": (Send(tensor=0, nbytes=-4, seconds=1.0),)}}, "sends -4 bytes for tensor 0"),
        ({"moment": {"sends": (Send(tensor=0, nbytes=4, seconds=3.0),)}}, "after 3.0 s, and takes 2.0 s"),
        ({"moment": {"sends": (Send(tensor=0, nbytes=4, seconds=math.nan),)}}, "after nan s"),
        (
            {"moment": {"sends": tuple(Send(tensor=0, nbytes=4, seconds=s) for s in (1.0, 0.5))}},
            "after 0.5 s.* from 1.0 s on",
        ),
        ({"moment": {"awaits": (0, 1)}}, r"moment 0 awaits tensors \[0\].* Updates.places"),
        ({"updates": {}}, r"moment 0 awaits tensors \[1\]"),
        ({"moment": {"operands": (0, 1)}}, r"tensors \[1\] have a place of their own.* moment 0"),
        ({"updates": {"tensors": (0, 0)}}, r"twice among their tensors, \(0, 0\)"),
        ({"updates": {"places": (1, 1)}}, r"twice among their places, \(1, 1\)"),
        ({"updates": {"tensors": (0, 2)}}, r"updates name tensors \[2\]; the trace has 2"),
        ({"updates": {"places": (1, -1)}}, r"updates name tensors \[-1\]"),
        ({"updates": {"seconds": (1.0,)}}, "2 tensors and 1 seconds"),
        ({"updates": {"copies": (1.0,)}}, "2 tensors and 1 copies"),
        ({"updates": {"seconds": (1.0, math.inf)}}, "seconds of .*inf"),
        ({"updates": {"copies": (0.0, -1.0)}}, "copies of .*-1.0"),
        ({"updates": {"queued": 2}}, "queued at moment 2; the trace has 2 moments"),
        ({"updates": {"finished": -1}}, "finished at moment -1"),
    ],
)
def test_sends_and_updates_that_make_no_sense_are_refused(changed, message):
    updating()
    with pytest.raises(PlanError, match=message):
        updating(**changed)


def test_links_that_make_no_sense_are_refused():
    with pytest.raises(PlanError, match="positive"):
        Links(h2d_bandwidth=0.0, d2h_bandwidth=1.0)
    with pytest.raises(PlanError, match="latency"):
        Links(h2d_bandwidth=1.0, d2h_bandwidth=1.0, latency=-1.0)
