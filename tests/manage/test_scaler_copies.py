"""`GradScaler` with gradients at home: what it sends there is waited for before it is read."""

import pytest
import torch
from loops import batch, mlp
from torch.utils._python_dispatch import TorchDispatchMode
from twins import assert_twins, device

import hetero


class UnawaitedCopies(TorchDispatchMode):
    """Those that a device sends home without waiting."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        unawaited = func is torch.ops.aten._to_copy.default and kwargs.get("non_blocking")
        if unawaited and args[0].device.type != "cpu" and result.device.type == "cpu":
            self.found.append(func)
        return result


def scaled_step(model, optimizer, scaler, target, *, unscales, factor=1.0):
    loss = model(batch(target)).square().mean() * factor
    scaler.scale(loss).backward()
    with UnawaitedCopies() as copies:
        if unscales:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    optimizer.zero_grad()
    return copies.found


@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("fused", [None, True])
def test_nothing_is_read_before_it_has_arrived(fused, unscales):
    target = device()
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), fused=fused)
    scaler = torch.amp.GradScaler(target.type, init_scale=256.0, growth_interval=2)
    with hetero.manage(model, optimizer, device=target, device_budget="4MiB", device_homes=False):
        for factor in (1.0, 1.0, float("inf"), 1.0):
            assert scaled_step(model, optimizer, scaler, target, unscales=unscales, factor=factor) == []
    assert scaler.get_scale() == 256.0  # doubled once, halved once


def test_unmanaged_with_parameters_at_home_it_is_not_waited_for():
    # So that the test above cannot pass by chance.
    target = device()
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())
    scaler = torch.amp.GradScaler(target.type, init_scale=256.0)
    scaler.scale(torch.zeros((), device=target))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with UnawaitedCopies() as copies:
        scaler.step(optimizer)
    assert copies.found


@pytest.mark.parametrize("fused", [False, True])
def test_scaled_steps_are_those_of_the_unmanaged_run(fused):
    def loop(model, optimizer, target):
        scaler = torch.amp.GradScaler(target.type, init_scale=256.0, growth_interval=2)
        seen = []
        for factor in (1.0, 1.0, float("inf"), 1.0, 1.0):
            loss = model(batch(target)).square().mean()
            scaler.scale(loss * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            seen += [loss, scaler.get_scale()]
        return seen

    def make(model):
        return torch.optim.Adam(model.parameters(), lr=1e-2, fused=fused, foreach=None if fused else False)

    assert_twins(mlp, loop, make_optimizer=make, device_homes=False)
