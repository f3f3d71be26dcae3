"""Loops over several models under one budget, managed and not."""

import gc

import torch
from accelerators import GAPS, device, races
from equality import fresh_memory, peak_memory
from loops import batch, mlp
from twins import assert_same, plain

import hetero


def twins(loop, build, budget, **keywords):
    """``loop(models, optimizers, target, ticks)`` with all models on the device, and with a manager each under one
    budget, which an optimizer that is None has as well; returns the managers' statistics. ``keywords``: of
    `hetero.manage`."""

    def run(manage):
        target = device()
        gc.collect()
        torch.manual_seed(0)
        models, optimizers = build()
        before = torch.accelerator.memory_allocated()
        managers = []
        for model, optimizer in zip(models, optimizers, strict=True):
            if manage:
                where = {"device": target, "device_budget": before + budget}
                managers.append(hetero.manage(model, optimizer, **where, **keywords))
            else:
                model.to(target)
        torch.accelerator.reset_peak_memory_stats()
        torch.manual_seed(1)
        seen = plain(loop(models, optimizers, target))
        stats = [manager.stats for manager in managers]
        for manager in managers:
            assert manager.stats.peak_device_bytes <= before + budget + GAPS
            manager.close()
        state = [t.detach().cpu() for model in models for t in (*model.parameters(), *model.buffers())]
        return seen, state, stats

    expected, state, _ = run(manage=False)
    got, got_state, stats = run(manage=True)
    assert_same(got, expected, "observed")
    assert_same(got_state, state, "state")
    assert races() == []
    return stats


def unmanaged_peak(loop, build):
    """Of ``loop`` with all models on the device."""
    target = device()
    torch.manual_seed(0)
    models, optimizers = build()
    before = fresh_memory()
    for model in models:
        model.to(target)
    loop(models, optimizers, target)
    return peak_memory() - before


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, foreach=False)


def two_that_are_trained():
    models = mlp(depth=3), mlp(depth=3)
    return models, [sgd(model) for model in models]


def in_turn(models, optimizers, target, steps=8, rows=batch):
    seen = []
    for _ in range(steps):
        for model, optimizer in zip(models, optimizers, strict=True):
            loss = model(rows(target)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss)
    return seen
