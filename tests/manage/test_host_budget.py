"""Saved tensors that leave keep to the host's budget, by the counters of the memory itself."""

import gc
import re

import pytest
import torch
from accelerators import GAPS, races
from blocks import ROWS, WIDTH, deep, steps
from torch import nn
from twins import adamw, assert_same, device, managed, plain, unmanaged

import hetero
from hetero.devices import Accelerator, HostArena
from hetero.errors import BudgetError
from hetero.stm import Kind, Ledger, StatefulTensor, Tier
from hetero.stm.activations import slots as slots_module
from hetero.stm.activations.slots import HostSlots
from hetero.stm.interception.parameter import is_managed, managed_of


def homes_of(model):
    """With gradients and AdamW's two states."""
    return 4 * sum(p.nbytes for p in model.parameters())


def host_bytes(manager):
    """What the ledger counts; and the slabs, beside the states at home, which are cut from none."""
    ledger = manager._stm.ledger
    slabs = manager._homes._arena.nbytes
    return max(ledger.host_bytes, slabs + ledger.nbytes(Tier.HOST, Kind.OPTIMIZER_STATE))


def trained(device_budget, host_budget, count=5, **keywords):
    """As `steps`, managed; the most host memory seen, and the manager."""
    target = device()
    gc.collect()
    torch.manual_seed(0)
    model = deep()
    optimizer = adamw(model)
    before = torch.accelerator.memory_allocated()
    device_budget += before
    manager = hetero.manage(
        model, optimizer, device=target, device_budget=device_budget, host_budget=host_budget, **keywords
    )
    torch.manual_seed(1)
    seen, most = [], []
    try:
        for _ in range(count):
            loss = model(torch.randn(ROWS, WIDTH).to(target)).square().mean()
            most.append(host_bytes(manager))
            loss.backward()
            most.append(host_bytes(manager))
            seen.append(plain([loss, *[p.grad for p in model.parameters()]]))
            optimizer.step()
            optimizer.zero_grad()
            _ = manager.stats
            most.append(host_bytes(manager))
    finally:
        manager.close()
    assert races() == []
    return seen, max(most), manager


@pytest.mark.parametrize("room", [1 << 20, 3 << 20, 32 << 20])
def test_the_host_budget_is_never_passed_and_the_numbers_are_the_same(room):
    def loop(model, optimizer, target):
        return steps(model, optimizer, target, 5)

    expected, _, peak = unmanaged(deep, loop)
    budget = homes_of(deep()) + room
    seen, most, manager = trained(int(0.7 * peak), budget)
    assert_same(seen, expected, "observed")
    assert most <= budget
    assert manager.stats.activation_out_bytes > 0
    slots = manager._stm.activations._slots
    assert 0 < slots.nbytes <= room


# In the first two, activations leave little more than what slabs lose.
@pytest.mark.usefixtures("speculating")
@pytest.mark.parametrize("room", [(1 << 20) + (1 << 16), (3 << 20) + (1 << 16), 6 << 20, 32 << 20])
def test_so_it_is_where_updates_begin_in_backward_and_copy_what_they_overwrite(room):
    def loop(model, optimizer, target):
        return steps(model, optimizer, target, 5)

    expected, _, peak = unmanaged(deep, loop)
    budget = homes_of(deep()) + room
    seen, most, manager = trained(int(0.7 * peak), budget, device_homes=False)
    assert_same(seen, expected, "observed")
    assert most <= budget
    assert manager.stats.activation_out_bytes > 0
    assert manager.stats.tried_updates > 0


def test_what_gradients_and_states_will_need_is_not_given_to_activations_of_the_first_forward():
    expected_homes = homes_of(deep())
    budget = expected_homes + (1 << 20)
    model = deep()
    target = device()
    optimizer = adamw(model)
    # Of the device: what is small beside its budget would not be worth moving.
    with hetero.manage(
        model, optimizer, device=target, device_budget="200MiB", host_budget=budget
    ) as manager:
        loss = model(torch.randn(ROWS, WIDTH).to(target)).square().mean()
        manager._stm.activations.shed(1 << 40)
        # There is nothing but the parameters at home yet.
        assert manager._stm.ledger.nbytes(Tier.HOST, Kind.GRADIENT) == 0
        assert 0 < manager._stm.ledger.nbytes(Tier.HOST, Kind.ACTIVATION) <= 1 << 20
        loss.backward()
        optimizer.step()
        _ = manager.stats
        assert host_bytes(manager) <= budget


def test_gradients_of_a_model_without_optimizer_are_left_room_as_well():
    model, target = deep(), device()
    parameters = sum(p.nbytes for p in model.parameters())
    budget = 2 * parameters + (1 << 20)
    with hetero.manage(model, device=target, device_budget="200MiB", host_budget=budget) as manager:
        loss = model(torch.randn(ROWS, WIDTH).to(target)).square().mean()
        manager._stm.activations.shed(1 << 40)
        assert 0 < manager._stm.ledger.nbytes(Tier.HOST, Kind.ACTIVATION) <= 1 << 20
        loss.backward()
        assert manager.stats.by_kind["host"]["gradient"] >= parameters
        assert host_bytes(manager) <= budget
    # Nor is a budget refused that holds the parameters alone: this may be inference.
    with hetero.manage(deep(), device=target, host_budget=parameters):
        pass


def test_without_room_on_the_host_nothing_leaves_and_what_then_does_not_fit_is_refused():
    def loop(model, optimizer, target):
        return steps(model, optimizer, target, 5)

    expected, _, peak = unmanaged(deep, loop)
    budget = homes_of(deep())
    seen, _, manager = trained(2 * peak, budget)
    assert_same(seen, expected, "observed")
    assert manager.stats.activation_out_bytes == 0
    assert manager._stm.activations._slots.nbytes == 0
    with pytest.raises(BudgetError, match="by saved tensors for which host_budget has no room") as caught:
        trained(int(0.4 * peak), budget)
    assert re.search(
        r"batch size, raise host_budget, or raise device_budget to .* bytes\)", str(caught.value)
    )
    trained(int(0.4 * peak), budget + peak)  # so it is
    if GAPS:
        return  # a budget below the size of a segment refuses nothing there
    with pytest.raises(BudgetError) as caught:
        trained(int(0.1 * peak), budget + peak)
    assert "host_budget" not in str(caught.value)


def test_blocks_are_used_again_by_sizes_that_take_as_much_of_a_slab():
    arena = HostArena(Accelerator(device()), pin=False)
    slots = HostSlots(arena, Ledger(), 8192, 0)
    first = slots.take(1000)
    assert first is not None
    assert first.numel() == 1000
    address = first.data_ptr()
    slots.give_back(first)
    again = slots.take(1024)
    assert again is not None
    assert (again.numel(), again.data_ptr()) == (1024, address)
    assert slots.nbytes == 1024


def test_a_block_taken_or_given_back_in_inference_mode_can_be_written_outside_of_it():
    """An evaluation makes saved tensors leave, and lets go of those of a graph that was dropped."""
    slots = HostSlots(HostArena(Accelerator(device()), pin=False), Ledger(), 8192, 0)
    with torch.inference_mode():
        block = slots.take(1000)
    block.zero_()
    with torch.inference_mode():
        slots.give_back(block)
    slots.take(1024).zero_()


def test_a_page_that_a_slab_would_begin_counts_as_a_whole():
    arena = HostArena(Accelerator(device()), pin=False)
    slots = HostSlots(arena, Ledger(), 3 * 4096, 4096)
    assert slots.most_bytes == 2 * 4096
    one = slots.take(4096 + 512)  # two pages
    assert one is not None
    assert arena.nbytes == 2 * 4096
    assert slots.take(4096) is None  # the slab's rest is too small, and a third page is not ours
    assert slots.take(3584) is not None  # the slab's rest
    assert arena.nbytes == 2 * 4096


def lengths(model, optimizer, target):
    """Batches of random numbers of rows: saved tensors of as many sizes."""
    seen = []
    for rows in torch.randint(ROWS // 4, ROWS + 1, (24,)).tolist():
        loss = model(torch.randn(rows, WIDTH).to(target)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss)
    return seen


def test_batches_of_many_sizes_take_little_more_of_the_host_than_the_largest():
    def largest(model, optimizer, target):
        return steps(model, optimizer, target, 8)

    _, _, peak = unmanaged(deep, largest)
    budget = peak // 2
    most = managed(deep, largest, budget)[2]._stm.activations._slots.nbytes
    expected = unmanaged(deep, lengths)[0]
    seen, _, manager = managed(deep, lengths, budget)
    assert_same(seen, expected, "losses")
    slots = manager._stm.activations._slots
    assert most > 0
    # Of 24 lengths; with blocks of their own they would take several times as much.
    assert slots.nbytes <= 3 * peak
    # And where the host has no more, free blocks make room for one another.
    seen, _, manager = managed(deep, lengths, budget, host_budget=homes_of(deep()) + 2 * most)
    assert_same(seen, expected, "losses")
    assert manager._stm.activations._slots.nbytes <= 2 * most


def test_free_blocks_are_used_for_what_is_a_little_smaller_and_given_up_for_what_is_larger():
    arena = HostArena(Accelerator(device()), pin=False)
    slots = HostSlots(arena, Ledger(), 6 * 4096, 0)
    small, large = slots.take(4096), slots.take(2 * 4096)
    assert small is not None
    assert large is not None
    address = large.data_ptr()
    slots.give_back(small)
    slots.give_back(large)
    del small, large
    again = slots.take(2 * 4096 - 512)
    assert again is not None
    assert (again.numel(), again.data_ptr()) == (2 * 4096 - 512, address)
    assert slots.take(5 * 4096) is None  # whatever is given up: what is there stays
    assert slots.nbytes == 3 * 4096
    slots.give_back(again)
    del again
    assert slots.take(4 * 4096) is not None
    assert slots.nbytes == 4 * 4096
    assert arena.nbytes <= 6 * 4096  # the last slab stays


def test_blocks_that_no_iteration_uses_are_given_up(monkeypatch):
    monkeypatch.setattr(slots_module, "_KEPT", 3)
    arena = HostArena(Accelerator(device()), pin=False)
    slots = HostSlots(arena, Ledger(), 64 * 4096, 0)
    held = slots.take(4096)
    for block in [slots.take(2 * 4096) for _ in range(3)]:
        slots.give_back(block)
    del block
    sizes = []
    for _ in range(6):
        used = slots.take(2 * 4096)
        slots.give_back(used)
        del used
        slots.end_iteration()
        sizes.append(slots.nbytes)
    assert sizes == [7 * 4096, 7 * 4096, 3 * 4096, 3 * 4096, 3 * 4096, 3 * 4096]
    assert arena.nbytes <= slots.nbytes + 2 * 4096
    for _ in range(3):
        slots.end_iteration()
    assert slots.nbytes == held.nbytes == 4096
    assert arena.nbytes <= 4096 + 2 * 4096  # the slab that was cut last stays
    assert slots.take(2 * 4096) is not None


def test_plans_let_less_leave_than_warm_up_and_the_rest_is_given_back(monkeypatch):
    monkeypatch.setattr(slots_module, "_KEPT", 6)
    expected, _, peak = unmanaged(deep, lambda *arguments: steps(*arguments, 24))
    most = []

    def loop(model, optimizer, target):
        seen = []
        for _ in range(24):
            seen += steps(model, optimizer, target, 1)
            if tensors := [managed_of(p) for p in model.parameters() if is_managed(p)]:
                most.append(tensors[0].owner.host_slots.nbytes)
        return seen

    got, _, _ = managed(deep, loop, int(0.3 * peak))
    assert_same(got, expected, "losses")
    assert 0 < most[-1] < max(most)


def test_where_everything_fits_no_block_is_left():
    target = device()
    torch.manual_seed(0)
    model = deep()
    optimizer = adamw(model)
    with hetero.manage(
        model, optimizer, device=target, device_budget="200MiB", warmup_budget=1e-9
    ) as manager:
        most = 0
        for _ in range(9):
            model(torch.randn(ROWS, WIDTH).to(target)).square().mean().backward()
            most = max(most, manager._stm.host_slots.nbytes)
            optimizer.step()
            optimizer.zero_grad()
        assert most > 0
        assert manager.stats.settled_forwards > 0
        assert manager._stm.host_slots.nbytes == 0


def test_what_is_lent_comes_back_for_blocks():
    ledger = Ledger()
    slots = HostSlots(HostArena(Accelerator(device()), pin=False), ledger, 8 * 4096, 4096)
    lent = StatefulTensor(ledger, Kind.OPTIMIZER_STATE, "lent")

    def lend(nbytes, share):
        done = slots.lend(nbytes, share=share)
        lent.place(Tier.HOST, lent.nbytes(Tier.HOST) + nbytes * done)
        return done

    asked = []

    def ask_back(nbytes):
        asked.append(nbytes)
        lend(-lent.nbytes(Tier.HOST), 1.0)

    slots.ask_back = ask_back
    taken = [slots.take(4096)]
    assert not lend(4 * 4096, 0.5)
    assert lend(3 * 4096, 0.5)
    assert slots.most_bytes == 7 * 4096  # it is not lost to activations
    taken.append(slots.take(3 * 4096))
    assert not asked
    assert slots.take(8 * 4096) is None
    assert not asked  # in vain
    taken.append(slots.take(2 * 4096))
    assert all(block is not None for block in taken)
    assert asked == [2 * 4096]
    assert slots.nbytes == 6 * 4096


@pytest.mark.usefixtures("speculating")
def test_what_updates_overwrite_is_copied_no_more_where_larger_batches_save_more():
    def loop(model, optimizer, target):
        found = []
        for rows in [ROWS // 8] * 5 + [ROWS] * 4:
            loss = model(torch.randn(rows, WIDTH).to(target)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss)
            snapshots.append(copies())
        return found

    snapshots, copies = [], lambda: 0
    expected, _, peak = unmanaged(deep, loop)
    snapshots.clear()
    gc.collect()
    target = device()
    torch.manual_seed(0)
    model = deep()
    optimizer = adamw(model)
    budget = homes_of(deep()) + (2 << 20)
    with hetero.manage(
        model,
        optimizer,
        device=target,
        device_budget=torch.accelerator.memory_allocated() + int(0.7 * peak),
        host_budget=budget,
        device_homes=False,
    ) as manager:
        copies = lambda: manager._host_step.speculation.snapshots.nbytes  # noqa: E731
        torch.manual_seed(1)
        assert_same(plain(loop(model, optimizer, target)), expected, "losses")
        assert max(snapshots[:5]) >= 3 * sum(p.nbytes for p in model.parameters())
        assert snapshots[-1] < max(snapshots[:5])
        assert manager.stats.activation_out_bytes > 0
        assert host_bytes(manager) <= budget
    assert races() == []


def test_the_least_that_a_refusal_names_would_do():
    """Also where it is no round number: 1680 bytes are more than the 1.6 KiB that they would be written as."""
    model = nn.ParameterList(nn.Parameter(torch.zeros(5)) for _ in range(21))
    optimizer = adamw(model)
    with pytest.raises(BudgetError, match="raise it to at least 1680 bytes"):
        hetero.manage(model, optimizer, device=device(), host_budget="1KiB")
    with pytest.raises(BudgetError):
        hetero.manage(model, optimizer, device=device(), host_budget=1679)
    hetero.manage(model, optimizer, device=device(), host_budget=1680).close()


def test_a_refusal_adds_up_where_some_parameters_are_frozen():
    model = nn.ParameterList(nn.Parameter(torch.zeros(256), requires_grad=i < 2) for i in range(4))
    parts = re.escape("(4.0 KiB of parameters, 2.0 KiB of gradients, 4.0 KiB of optimizer states)")
    with pytest.raises(BudgetError, match=f"need 10240 bytes of host memory {parts}.*fewer states"):
        hetero.manage(model, adamw(model), device=device(), host_budget="1KiB")
    with pytest.raises(
        BudgetError, match=r"need 4096 bytes of host memory \(4.0 KiB of parameters\)"
    ) as caught:
        hetero.manage(model, device=device(), host_budget="1KiB")
    assert "fewer states" not in str(caught.value)


# -- several managers -------------------------------------------------------------------------------------


def test_what_one_takes_of_the_memory_that_was_free_others_leave_to_it():
    page = 4096
    arena = HostArena(Accelerator(device()), pin=False)
    first = HostSlots(arena, Ledger(), 8 * page, 2 * page, shares=True)
    early = first.take(page)
    second = HostSlots(arena, Ledger(), 5 * page, page, shares=True)  # what is left of the same eight
    own = HostSlots(arena, Ledger(), 4 * page, page)
    own.close()
    assert (first.most_bytes, second.most_bytes, own.most_bytes) == (5 * page, 4 * page, 3 * page)
    late = first.take(2 * page)
    assert None not in (early, late)
    assert (first.most_bytes, second.most_bytes, own.most_bytes) == (5 * page, 2 * page, 3 * page)
    assert second.take(3 * page) is None
    assert second.take(2 * page) is not None
    assert first.take(page) is None
    assert first.nbytes + second.nbytes + first.home_bytes + second.home_bytes == 8 * page
    second.close()
    assert first.take(page) is not None


@pytest.fixture
def host_memory(monkeypatch):
    """So much of it in all, of which managers have what they count; returns them, to be added to."""
    managers, total = [], [0]
    monkeypatch.setattr(hetero.manager, "host_memory_free", lambda: total[0] - sum(map(host_bytes, managers)))
    return managers, total


def test_a_model_is_refused_whose_states_have_no_room_beside_those_that_another_will_have(host_memory):
    managers, total = host_memory
    total[0] = int(1.8 * homes_of(deep()))

    def another():
        model = deep()
        managers.append(hetero.manage(model, adamw(model), device=device(), device_budget="100%"))

    another()
    assert host_bytes(managers[0]) < homes_of(deep()) / 3  # gradients and states are yet to come
    with pytest.raises(BudgetError, match=r"what is free, less .* that other managed models will take"):
        another()
    managers.pop().close()
    another()
    managers.pop().close()


def test_two_models_keep_to_the_host_memory_that_was_free_and_have_the_same_numbers(host_memory):
    managers, total = host_memory

    def loop(model, optimizer, target):
        """In turns, so that a generator of random numbers is its own."""
        generator = torch.Generator().manual_seed(1)
        while True:
            loss = model(torch.randn(ROWS, WIDTH, generator=generator).to(target)).square().mean()
            yield None
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield plain(loss)

    def begun():
        torch.manual_seed(0)
        model = deep()
        return model, adamw(model)

    gc.collect()
    model, optimizer = begun()
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    alone = loop(model.to(device()), optimizer, device())
    expected = [next(alone) for _ in range(16)]
    peak = torch.accelerator.max_memory_allocated() - before
    del model, optimizer, alone
    gc.collect()

    total[0] = 2 * homes_of(deep()) + int(1.2 * peak)
    budget = torch.accelerator.memory_allocated() + int(0.6 * peak)
    jobs = []
    for _ in range(2):
        model, optimizer = begun()
        managers.append(hetero.manage(model, optimizer, device=device(), device_budget=budget))
        jobs.append(loop(model, optimizer, device()))
    assert managers[0].config.host_budget == total[0]
    most, seen = 0, [[], []]
    for _ in range(16):
        for place, job in enumerate(jobs):
            seen[place].append(next(job))
            most = max(most, sum(map(host_bytes, managers)))
    for manager in managers:
        manager.close()
    assert_same(seen, [expected, expected], "losses")
    assert most <= total[0]
