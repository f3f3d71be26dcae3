"""Memory in segments, as CUDA's caching allocator keeps it: gaps in them are reserved and cannot be used by all."""

import gc
import threading

import pytest
import torch
from accelerators import ON_CUDA, in_segments
from bits import same_bits
from torch import nn
from twins import adamw

import hetero
from hetero.devices import Accelerator, accelerator, virtual
from hetero.msc.peaks import PeakKeeper
from hetero.stm.copies.shortage import no_room
from hetero.stm.running.guard import guarded, lifted
from hetero.stm.running.retry import Retry

pytestmark = pytest.mark.skipif(ON_CUDA, reason="imitates what is there on a real device")
MIB = 1 << 20


@pytest.fixture
def target():
    with in_segments(bandwidth="100GiB/s", latency="1us") as found:
        yield found


def block(target, mib):
    return torch.empty(int(mib * MIB), dtype=torch.uint8, device=target)


def test_a_cap_refuses_what_cached_memory_would_have_room_for(target):
    accelerator = Accelerator(target)
    held, cached = block(target, 4), block(target, 100)
    del cached
    accelerator.cap(accelerator.used_bytes() + 60 * MIB)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            block(target, 80)
        block(target, 30)
    finally:
        accelerator.cap(None)
    block(target, 80)
    del held


def test_the_peak_that_is_reached_again_is_no_higher(target):
    accelerator = Accelerator(target)
    keeper = PeakKeeper(accelerator)
    accelerator.reset_peak()
    block(target, 20)  # cached from now on
    held = block(target, 0.3)
    peak = accelerator.peak_bytes()
    keeper.begin()
    keeper.end()  # what is missing is a little less than that block
    assert accelerator.peak_bytes() == peak
    del held


def test_by_default_some_of_what_is_free_is_left_to_gaps(target):
    model = nn.Linear(8, 8)
    free = torch.get_device_module(target).mem_get_info(target)[0]
    with hetero.manage(model, device=target) as manager:
        budget = manager._stm.plans.budget
        # But for what the library itself takes.
        assert budget == pytest.approx((free - 128 * MIB) / 1.25, rel=0.01)
        assert not Accelerator(target).may_fail_within(budget)
        assert Accelerator(target).may_fail_within(free)


def test_the_users_share_is_the_same_however_often_a_cap_was_set(target, monkeypatch):
    # torch.cuda takes a share of one total, and says it of another.
    shares = []
    module = torch.get_device_module(target)
    monkeypatch.setattr(module, "set_per_process_memory_fraction", lambda share, device: shares.append(share))
    monkeypatch.setattr(
        module, "get_per_process_memory_fraction", lambda device: 0.99 * shares[-1] if shares else 1.0
    )
    accelerator = Accelerator(target)
    for _ in range(3):
        accelerator.cap(100 * MIB)
        accelerator.cap(None)
    assert shares[1::2] == [1.0, 1.0, 1.0]
    shares.append(0.5)  # the user's
    accelerator.cap(100 * MIB)
    accelerator.cap(None)
    assert shares[-1] == 0.99 * 0.5


def test_caps_of_two_threads_leave_the_users_share_as_it_was(target, monkeypatch):
    """One ends it while another has told the device of it, and not noted that yet."""
    module = torch.get_device_module(target)
    tell, has_told, goes_on = module.set_per_process_memory_fraction, threading.Event(), threading.Event()
    before = module.get_per_process_memory_fraction(target)
    accelerator = Accelerator(target)

    def slowly(share, device):
        tell(share, device)
        if threading.current_thread() is one:
            has_told.set()
            goes_on.wait(0.2)  # all of it, where the other one has to wait

    monkeypatch.setattr(module, "set_per_process_memory_fraction", slowly)
    one = threading.Thread(target=accelerator.cap, args=(60 * MIB,))
    one.start()
    has_told.wait()
    accelerator.cap(None)
    goes_on.set()
    one.join()
    accelerator.cap(60 * MIB)
    accelerator.cap(None)
    assert module.get_per_process_memory_fraction(target) == before


def test_an_operator_that_only_gaps_keep_from_its_memory_runs_once_without_the_cap(target):
    accelerator = Accelerator(target)
    used = accelerator.used_bytes()
    caps = []

    def cap(on):
        caps.append(on)
        accelerator.cap(used + 30 * MIB if on else None)

    cap(True)
    try:
        for lifts in (False, True):
            with guarded(
                Retry(lambda: 0, uncapped=lambda error, lifts=lifts: lifted(cap, lifts)), at_once=True
            ):
                if lifts:
                    block(target, 60)
                else:
                    with pytest.raises(torch.OutOfMemoryError):
                        block(target, 60)
    finally:
        accelerator.cap(None)
    assert caps == [True, False, True]


def test_what_gaps_keep_from_an_operator_is_not_cured_by_a_larger_budget(target):
    error = torch.OutOfMemoryError("tried to allocate 60.00 MiB")
    accelerator = Accelerator(target)
    used = accelerator.used_bytes()
    told = [
        str(
            no_room(accelerator, used + budget * MIB, "linear", error, held=0, saved=0, others=0, enough=None)
        )
        for budget in (59, 60)
    ]
    assert "raise device_budget to more than" in told[0]
    assert "raise device_budget" not in told[1]
    assert "expandable_segments" in told[1]


def steps(model, optimizer, target, count):
    torch.manual_seed(1)
    losses = []
    for _ in range(count):
        loss = model(torch.randn(64, 64).to(target)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().cpu())
    return torch.stack(losses)


def trained(build, target, count, budget=None):
    torch.manual_seed(0)
    model = build()
    if budget is None:
        return steps(model, adamw(model), torch.device("cpu"), count)
    optimizer = adamw(model)
    with hetero.manage(model, optimizer, device=target, device_budget=budget, device_homes=False):
        return steps(model, optimizer, target, count)


def test_what_others_leave_between_their_tensors_is_no_reason_to_refuse_an_operator(target):
    def wide():
        return nn.Sequential(nn.Linear(64, 1024), nn.Linear(1024, 5632), nn.Linear(5632, 64))

    held, between = [], []
    for _ in range(10):  # of each segment of 20 MiB, 1.5 are used, and 18.5 are too few for a weight of 22
        held.append(block(target, 1.5))
        between.append(block(target, 18))
    del between
    torch.accelerator.empty_cache()
    budget = torch.accelerator.memory_allocated() + 90 * MIB
    assert torch.virtual.memory_reserved() > budget
    assert same_bits(trained(wide, target, 3, budget), trained(wide, target, 3))
    del held


def test_on_a_device_of_hardly_more_than_the_budget_copies_leave_where_gaps_are_too_small(target):
    def deep():
        layers = [nn.Linear(64, 448)]
        for _ in range(8):
            layers += [nn.LayerNorm(448), nn.Linear(448, 1344), nn.GELU(), nn.Linear(1344, 448)]
        return nn.Sequential(*layers, nn.Linear(448, 64))

    budget = torch.accelerator.memory_allocated() + 60 * MIB
    virtual.set_memory_limit(budget)
    failures = torch.virtual.memory_stats()["num_ooms"]
    got = trained(deep, target, 6, budget)
    assert torch.virtual.memory_stats()["num_ooms"] > failures
    assert same_bits(got, trained(deep, target, 6))


def transformer():
    """With tensors on both sides of the 1 MiB from which on they lie in segments of 20 MiB."""
    torch.manual_seed(0)
    return nn.Sequential(
        *[nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True) for _ in range(4)]
    )


def train_transformer(model, optimizer, target, count):
    """Losses; None where there was no memory, whose error is the second."""
    torch.manual_seed(1)
    losses, error = [], None
    for _ in range(count):
        try:
            loss = model(torch.randn(16, 64, 256).to(target)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        except torch.OutOfMemoryError as failed:
            losses.append(None)
            error = failed
        loss = None
        optimizer.zero_grad()
    return losses, error


@pytest.mark.parametrize(("mib", "share"), [(58, 1.25), (64, 1.35), (77, 1.5), (83, 1.35)])
def test_segments_that_are_hardly_used_leave_room_enough_on_a_small_device(target, mib, share):
    model = transformer().to(target)
    expected, error = train_transformer(model, adamw(model), target, 5)
    assert error is None
    model = transformer()
    optimizer = adamw(model)
    gc.collect()
    torch.accelerator.empty_cache()
    budget = torch.accelerator.memory_allocated() + mib * MIB
    virtual.set_memory_limit(int(budget * share))
    with hetero.manage(model, optimizer, device=target, device_budget=budget):
        losses, error = train_transformer(model, optimizer, target, 5)
    assert error is None
    assert losses == expected


def test_an_operator_that_found_no_gap_says_so_and_none_fails_for_that_again(target, monkeypatch):
    monkeypatch.setattr(accelerator, "_FEW_SEGMENTS", 0)  # as if the device were known to have room enough
    model = transformer()
    budget = torch.accelerator.memory_allocated() + 64 * MIB
    virtual.set_memory_limit(int(budget * 1.35))
    optimizer = adamw(model)
    with hetero.manage(model, optimizer, device=target, device_budget=budget):
        losses, error = train_transformer(model, optimizer, target, 6)
    assert isinstance(error, hetero.NoRoomError)
    assert "not there in one piece" in str(error)
    assert losses.count(None) == 1


def test_one_that_has_settled_says_so_as_well_and_goes_on(target):
    model = nn.Sequential(nn.Linear(64, 4096), nn.GELU(), nn.Linear(4096, 64))
    optimizer = adamw(model)
    budget = torch.accelerator.memory_allocated() + 100 * MIB
    with hetero.manage(model, optimizer, device=target, device_budget=budget) as manager:
        steps(model, optimizer, target, 8)
        settled = manager.stats.settled_forwards
        assert settled > 0
        before, x = virtual.memory_limit(), torch.randn(64, 64).to(target)
        torch.accelerator.empty_cache()
        virtual.set_memory_limit(torch.virtual.memory_reserved() + MIB)
        with pytest.raises(hetero.NoRoomError, match="not there in one piece"):
            model(x)
        virtual.set_memory_limit(before)
        steps(model, optimizer, target, 2)
        assert manager.stats.settled_forwards == settled + 1  # the one that failed
