"""Copies that autograd's thread holds a moment longer than backward runs are not measured as some that cannot leave."""

import time

import torch
from loops import batch, mlp
from torch import nn
from twins import adamw, device

import hetero
from hetero.stm.running import relief


def held_in_an_evaluation(monkeypatch, *, let_go):
    """Parameters that were measured to be held as an evaluation began. ``let_go``: while it waited for that."""
    target = device()
    torch.manual_seed(0)
    model = mlp()
    optimizer = adamw(model)
    holds = []

    class Clock:
        monotonic = staticmethod(time.monotonic)

        @staticmethod
        def sleep(seconds):
            if let_go:
                holds.clear()
            time.sleep(seconds)

    with hetero.manage(model, optimizer, device=target, device_budget="64MiB", device_homes=False) as manager:
        manager._stm.settled.forbid()
        for _ in range(3):
            model(batch(target)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        layer = next(module for module in model.modules() if isinstance(module, nn.Linear))
        hook = layer.register_forward_hook(
            lambda module, inputs, output: holds.append(module.weight.detach())
        )
        with torch.no_grad():
            model(batch(target))
        hook.remove()
        assert holds
        monkeypatch.setattr(relief, "time", Clock)
        with torch.no_grad():
            model(torch.cat([batch(target), batch(target)]))
        manager._stm.executor.finish_segment()
        samples = manager._stm.plans.samples
        last = list(samples)[-1]
        return samples[last][-1].periods[0].held


def test_what_is_let_go_meanwhile_was_not_held(monkeypatch):
    assert held_in_an_evaluation(monkeypatch, let_go=True) == ()


def test_what_somebody_keeps_is_held(monkeypatch):
    assert held_in_an_evaluation(monkeypatch, let_go=False)
