"""Homes that the loop writes in each iteration, besides the step: plans know that copies from before are worthless."""

import gc

import pytest
import torch
from loops import batch, mlp
from twins import assert_twins, device

import hetero

STEPS = 10


def deep():
    return mlp(depth=6)


def sharpness_aware(model, optimizer, target):
    """SAM: the step's gradients are those at a point nearby."""
    seen = []
    for _ in range(STEPS):
        x = batch(target)
        loss = model(x).square().mean()
        loss.backward()
        with torch.no_grad():
            moves = [p.grad * 0.05 for p in model.parameters()]
            for p, move in zip(model.parameters(), moves, strict=True):
                p.add_(move)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        with torch.no_grad():
            for p, move in zip(model.parameters(), moves, strict=True):
                p.sub_(move)
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss)
        note()
    return seen


def averaged(model, optimizer, target):
    """A teacher, written through ``p.data`` after each of its forwards."""
    torch.manual_seed(3)
    student = [torch.randn(p.shape) for p in model.parameters()]
    seen = []
    for _ in range(STEPS):
        with torch.no_grad():
            seen.append(model(batch(target)).cpu())  # kept there, they would outgrow each plan in the end
        for p, other in zip(model.parameters(), student, strict=True):
            p.data.mul_(0.9).add_(other.to(p.device), alpha=0.1)
        note()
    return seen


moved = []


def note():
    for manager in [m for m in gc.get_objects() if type(m) is hetero.Manager and not m._closed]:
        stats = manager.stats
        both = stats.total_fetched_bytes + stats.total_written_bytes
        moved.append((stats.unplanned_fetches, both, stats.lower_bound_bytes))


@pytest.mark.parametrize("device_homes", [False, True])
@pytest.mark.parametrize("share", [0.3, 0.6])
@pytest.mark.parametrize("loop", [sharpness_aware, averaged])
def test_what_the_loop_writes_is_planned_for(loop, share, device_homes):
    device()
    moved.clear()
    assert_twins(deep, loop, share=share, device_homes=device_homes)
    assert len(moved) == STEPS
    (unplanned, before, _), (unplanned_then, after, bound) = moved[-4], moved[-1]
    assert unplanned_then == unplanned
    assert after - before == 3 * bound > 0
