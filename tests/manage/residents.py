"""What tests of parameters that live on the device share: a small network, a step of it, and who lives there."""

import gc

import torch
from accelerators import clear_races
from loops import backward, mlp
from twins import adamw, device

import hetero


def living(manager):
    return {tensor.name for tensor in manager._stm.tensors if tensor.stays}


def managed_mlp(budget="4MiB", make_optimizer=adamw, **keywords):
    target = device()
    gc.collect()
    clear_races()
    torch.manual_seed(0)
    model = mlp()
    optimizer = make_optimizer(model)
    manager = hetero.manage(model, optimizer, device=target, device_budget=budget, **keywords)
    return model, optimizer, manager, target


def assert_nothing_moves(manager, once, times=3):
    """While ``once`` is called so often."""
    before = manager.stats
    for _ in range(times):
        once()
    after = manager.stats
    assert after.total_fetched_bytes == before.total_fetched_bytes
    assert after.total_written_bytes == before.total_written_bytes


def step(model, optimizer, target):
    backward(model, target)
    optimizer.step()
    optimizer.zero_grad()
