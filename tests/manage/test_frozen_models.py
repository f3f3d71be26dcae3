"""Models of which nothing is trained: teachers, references, losses made of networks. And those that are unfrozen layer
by layer."""

import gc

import pytest
import torch
from accelerators import device
from loops import batch, mlp
from twins import assert_twins

import hetero


def frozen():
    return mlp().requires_grad_(False)


def nothing(model):
    """No optimizer."""


def forwards(model, optimizer, target):
    """As of a teacher, in grad mode."""
    return [model(batch(target)) for _ in range(6)]


def through(model, optimizer, target):
    """As of a loss that is a network: its inputs are trained."""
    seen = []
    for _ in range(6):
        x = batch(target).requires_grad_()
        loss = (model(x) - model(x.detach())).square().mean() + model(x).mean()
        loss.backward()
        seen.append([loss, x.grad])
    return seen


@pytest.mark.parametrize("loop", [forwards, through])
@pytest.mark.parametrize("share", [0.5, 0.8, 2.0])
def test_a_frozen_model_in_grad_mode(loop, share):
    assert_twins(frozen, loop, share=share, make_optimizer=nothing)


@pytest.mark.parametrize("share", [0.5, 2.0])
def test_a_teacher_without_a_backward_is_planned_after_its_first_forward(share):
    target = device()
    gc.collect()
    model = frozen()
    nbytes = sum(p.nbytes for p in model.parameters())
    budget = torch.accelerator.memory_allocated() + int(share * nbytes)
    with hetero.manage(model, device=target, device_budget=budget) as manager:
        for _ in range(6):
            model(batch(target))
        assert manager.plan is not None
        assert manager.plan.everything_fits == (share > 1)
        assert len(manager._stm.plans.samples) == 1, "each forward counts as another kind"


def half_frozen():
    model = mlp(depth=4)
    for module in list(model)[:12]:
        module.requires_grad_(False)
    return model


def unfreezing(model, optimizer, target):
    seen = []
    for number in range(20):
        if number % 3 == 2 and number < 12:
            for module in list(model)[12 - 4 * (number // 3 + 1) :]:
                module.requires_grad_(True)
        loss = model(batch(target)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss)
    return seen


def all_of_them(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)


@pytest.mark.parametrize("share", [0.25, 0.5, 3.0])
def test_what_is_unfrozen_makes_another_kind_of_iteration(share):
    manager = assert_twins(half_frozen, unfreezing, share=share, make_optimizer=all_of_them)
    if share == 0.5:
        # Seldom one, by timing.
        assert manager.stats.unplanned_fetches <= 1
    if share > 1:
        # Within three iterations after the last was unfrozen: nothing of what was measured before is counted twice.
        assert manager.stats.settled_forwards > 5
