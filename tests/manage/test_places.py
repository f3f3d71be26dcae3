"""Parameters that keep a place on the device, filled again in backward: same numbers, within the budget."""

import gc

import pytest
import torch
from accelerators import GAPS, clear_races, races
from test_deferred_clipping import (  # noqa: F401
    norms_taken,
    test_clipping_accumulation_and_a_scheduler,
)
from test_deferred_loops import test_any_loop  # noqa: F401
from torch import nn
from twins import device

import hetero

pytestmark = pytest.mark.usefixtures("late_queue", "speculating", "places")

LAYERS, WIDTH, BATCH = 8, 64, 4


def chain():
    torch.manual_seed(0)
    return nn.Sequential(
        *(m for _ in range(LAYERS) for m in (nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()))
    )


def norms(pattern, step):
    return {"never": 1e9, "always": 1e-3, "sometimes": 1e9 if step % 3 else 1e-3}[pattern]


def train(model, optimizer, target, pattern, steps, look=lambda step: None):
    torch.manual_seed(1)
    for step in range(steps):
        model(torch.randn(BATCH, WIDTH).to(target)).square().sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), norms(pattern, step))
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 4:  # an iteration that the plan does not know
            with torch.no_grad():
                model(torch.randn(2 * BATCH, WIDTH).to(target))
        look(step)


@pytest.mark.parametrize("pattern", ["never", "always", "sometimes"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("device_homes", [False, True])
def test_a_tight_budget_and_places_give_the_bits_of_a_plain_run(pattern, momentum, device_homes):
    target = device()
    gc.collect()  # models of the tests before
    clear_races()
    twin = chain().to(target)
    train(twin, sgd(twin, momentum), target, pattern, 24)
    expected = [p.detach().cpu() for p in twin.parameters()]
    del twin
    gc.collect()

    model = chain()
    optimizer = sgd(model, momentum)
    nbytes = sum(p.nbytes for p in model.parameters())
    used = torch.accelerator.memory_allocated()
    budget = used + int((1.4 if device_homes else 0.8) * nbytes)
    places, homes = set(), set()
    with hetero.manage(
        model, optimizer, device=target, device_budget=budget, speculate=True, device_homes=device_homes
    ) as manager:
        plans = manager._stm.plans

        def look(step):
            if plans.last is not None:
                places.update(plans.last.places)
                homes.update(manager._host_step.on_device)

        torch.accelerator.reset_peak_memory_stats()
        train(model, optimizer, target, pattern, 24, look)
        assert torch.accelerator.max_memory_allocated() <= budget + GAPS
    assert places or (device_homes and homes)  # which may have taken all the room
    assert not races()
    assert torch.accelerator.memory_allocated() == used
    for p, q in zip(model.parameters(), expected, strict=True):
        assert torch.equal(p.detach(), q)


def test_nothing_stays_on_the_device_after_close_while_the_manager_is_held():
    target = device()
    gc.collect()
    before = torch.accelerator.memory_allocated()
    model = chain()
    manager = hetero.manage(model, optimizer := sgd(model, 0.0), device=target, speculate=True)
    train(model, optimizer, target, "sometimes", 8)
    manager.close()  # the last step's factor is still to be looked at by a next one
    assert torch.accelerator.memory_allocated() == before
    assert manager.stats.tried_updates > 0


def sgd(model, momentum):
    # The for-loop at home and there alike.
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=momentum, foreach=False)


def test_places_go_when_updates_begin_late_again(monkeypatch):
    target = device()
    gc.collect()  # models of the tests before
    clear_races()
    model = chain()
    optimizer = sgd(model, 0.0)
    budget = torch.accelerator.memory_allocated() + sum(p.nbytes for p in model.parameters())
    with hetero.manage(
        model, optimizer, device=target, device_budget=budget, speculate=True, device_homes=False
    ) as manager:
        plans = manager._stm.plans
        for _ in range(15):  # until times are final, and the last plan is that of training
            train(model, optimizer, target, "never", 4)
            if plans.last.places and any(plans.last.trace.updates.copies):
                break
        assert plans.last.places
        copies = plans.last.trace.updates.copies
        assert copies
        assert min(copies) > 0.0  # as measured
        monkeypatch.setattr(manager._stm.home_choice, "updates_early", lambda: False)
        train(model, optimizer, target, "never", 4)
        assert not plans.last.places
        assert not plans.last.trace.updates.early
        assert not plans.last.trace.updates.copies
