"""Optimizer states that the user puts on the device, as loops do after resuming and frameworks around training. Where a
parameter lives at home, so do its states, and the device need not have room for all of them."""

import copy
import gc
import threading

import pytest
import torch
from accelerators import clear_races, races, set_memory_limit
from loops import losses, mlp
from twins import assert_same, assert_twins, device, plain, unmanaged

import hetero
from hetero.stm.tensors.homes import Homes

WIDTH = 128


def fused(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def over_items(optimizer, target):
    for _, entry in optimizer.state.items():
        for name, value in entry.items():
            entry[name] = value.to(target)


def over_values(optimizer, target):
    for entry in optimizer.state.values():
        entry.update({name: value.to(target) for name, value in entry.items()})


def over_parameters(optimizer, target):
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            entry = optimizer.state[parameter]
            for name, value in entry.items():
                entry[name] = value.to(target)


WAYS = [over_items, over_values, over_parameters]


@pytest.mark.parametrize("move", WAYS)
@pytest.mark.parametrize("share", [0.6, 4.0])
def test_training_goes_on(move, share):
    def loop(model, optimizer, target):
        seen = losses(model, optimizer, target, 4)
        move(optimizer, target)
        seen += losses(model, optimizer, target, 4)
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        move(optimizer, target)
        seen += losses(model, optimizer, target, 4)
        return [*seen, [*optimizer.state_dict()["state"][0].values()]]

    assert_twins(mlp, loop, share=share, make_optimizer=fused)


@pytest.mark.parametrize("move", WAYS)
def test_they_need_not_fit_all_at_once(move):
    def build():
        return mlp(width=WIDTH)

    expected, parameters, _ = unmanaged(build, losses_of, fused)
    target = device()
    gc.collect()
    clear_races()
    torch.manual_seed(0)
    model = build()
    optimizer = fused(model)
    base = torch.accelerator.memory_allocated()
    states = 2 * sum(p.nbytes for p in model.parameters())
    budget = states // 2
    with hetero.manage(model, optimizer, device=target, device_budget=base + budget):
        torch.manual_seed(1)
        seen = losses_of(model, optimizer, target, steps=2)
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        set_memory_limit(base + budget)
        try:
            move_on_full_device(optimizer, move, target, base + budget)
            move(
                optimizer, torch.device("cpu")
            )  # as frameworks do where training ends: copies of the user's own
            with torch.no_grad():
                for _ in range(3):  # copies come again
                    model(torch.ones(8, WIDTH).to(target))
            move_on_full_device(optimizer, move, target, base + budget)
        finally:
            set_memory_limit(256 << 20)
        seen += losses_of(model, optimizer, target, steps=4)
        assert_same(plain(seen), expected, "losses")
    assert_same([p.detach().cpu() for p in model.parameters()], parameters, "parameters")
    assert {value.device.type for entry in optimizer.state.values() for value in entry.values()} == {"cpu"}
    assert races() == []


def move_on_full_device(optimizer, move, target, limit):
    """Copies of parameters have to make room."""
    left = limit - torch.accelerator.memory_allocated()
    everything = torch.empty(left - left % 512, dtype=torch.uint8, device=target)
    move(optimizer, target)
    del everything


def test_a_copy_that_another_thread_holds_for_a_moment_leaves_then():
    """As autograd's does with what a backward has used."""
    target = device()
    gc.collect()
    model = mlp(width=WIDTH)
    optimizer = fused(model)
    base = torch.accelerator.memory_allocated()
    budget = sum(p.nbytes for p in model.parameters())
    with hetero.manage(model, optimizer, device=target, device_budget=base + budget) as manager:
        losses_of(model, optimizer, target, steps=2)
        held = [tensor.data.view(-1) for tensor in manager._stm.residency.resident.values()]
        assert held
        set_memory_limit(base + budget)
        holder = threading.Timer(0.005, held.clear)
        holder.start()
        try:
            move_on_full_device(optimizer, over_values, target, base + budget)
        finally:
            set_memory_limit(256 << 20)
            holder.join()


def losses_of(model, optimizer, target, steps=6):
    seen = []
    for _ in range(steps):
        loss = model(torch.randn(8, WIDTH).to(target)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.detach())
    return seen


def test_which_tensors_are_kept_is_known_after_each_change():
    target, homes = device(), Homes(None)
    first, passing = torch.ones(8, device=target), torch.ones(8, device=target)
    assert homes.kept_ids() == frozenset()
    homes.take_state("first", first, returns=True)
    assert homes.kept_ids() == {id(first)}
    homes.take_state("passing", passing, returns=False)
    assert homes.kept_ids() == {id(first)}
    homes.forget_states(())
    assert homes.kept_ids() == frozenset()
    buffer = torch.ones(8)
    homes.take_tensor("buffer", buffer, target)
    assert homes.kept_ids() == {id(buffer)}
    homes.give_back()
    assert homes.kept_ids() == frozenset()
    assert (first.device.type, passing.device.type, buffer.device.type) == ("cpu", "cpu", "cpu")
