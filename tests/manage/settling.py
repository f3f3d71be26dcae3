"""Models that settle, because everything fits, and loops in which they leave that state and come back."""

import gc

import torch
from accelerators import clear_races
from loops import batch, mlp
from twins import adamw, assert_twins, device

import hetero
from hetero.stm.interception.parameter import ManagedParameter

PLENTY = 64 << 20
BLOCKS = "a real allocator serves small tensors from blocks that it has, whatever the limit"


def managed_mlp(budget="64MiB", build=mlp, make_optimizer=adamw, **keywords):
    target = device()
    gc.collect()
    clear_races()
    torch.manual_seed(0)
    model = build()
    optimizer = make_optimizer(model)
    manager = hetero.manage(model, optimizer, device=target, device_budget=budget, **keywords)
    return model, optimizer, manager, target


def step(model, optimizer, target, rows=8):
    loss = model(batch(target, rows)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def settle(model, optimizer, manager, target, steps=6):
    for _ in range(steps):
        step(model, optimizer, target)
    assert manager.plan.everything_fits


def is_intercepted(model):
    return {type(p) is ManagedParameter for p in model.parameters()} == {True}


def assert_leaves_and_comes_back(loop, *, build=mlp, make_optimizer=adamw, budget=PLENTY):
    """``loop(model, optimizer, target, note)``: it calls ``note(expected)`` where it is to be settled or not."""
    noted = []

    def silent(model, optimizer, target):
        return loop(model, optimizer, target, lambda expected: None)

    def noting(model, optimizer, target):
        return loop(
            model, optimizer, target, lambda expected: noted.append((expected, not is_intercepted(model)))
        )

    def either(model, optimizer, target):
        managed = type(next(model.parameters())) is ManagedParameter
        return (noting if managed else silent)(model, optimizer, target)

    assert_twins(build, either, budget=budget, make_optimizer=make_optimizer)
    assert noted
    assert all(expected == settled for expected, settled in noted), noted
