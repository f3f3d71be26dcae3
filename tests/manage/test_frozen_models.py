"""Models of which nothing is trained: teachers, references, losses made of networks."""

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
        assert len(manager._stm.cycles.samples) == 1, "each forward counts as another kind"
