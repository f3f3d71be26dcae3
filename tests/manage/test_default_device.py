"""``torch.set_default_device`` and ``with torch.device(...)``: what the user makes is there, what is ours is not."""

import pytest
import torch
from loops import mlp, square_loss
from twins import adamw, assert_twins, device

import hetero


def trained(model, optimizer, seen):
    loss = model(torch.randn(8, 64)).square().mean()
    loss.backward()
    seen.append([loss, *[p.grad for p in model.parameters()]])
    optimizer.step()
    optimizer.zero_grad()


def by_default(model, optimizer, target):
    seen = []
    torch.set_default_device(target)
    try:
        for _ in range(6):
            trained(model, optimizer, seen)
    finally:
        torch.set_default_device(None)
    return seen


def within(model, optimizer, target):
    seen = []
    for _ in range(6):
        with torch.device(target):
            trained(model, optimizer, seen)
    return seen


@pytest.mark.parametrize("loop", [by_default, within])
@pytest.mark.parametrize("share", [0.4, 0.7, 1.4])
@pytest.mark.parametrize("speculates", [False, True])
def test_a_loop_under_a_default_device(loop, share, speculates, request):
    if speculates:
        request.getfixturevalue("speculating")
    assert_twins(mlp, loop, share=share)


def test_managed_under_a_default_device():
    target = device()
    with torch.device("cpu"):
        model = mlp()
    optimizer = adamw(model)
    with torch.device(target), hetero.manage(model, optimizer, device=target, device_budget="1MiB"):
        square_loss(model, target).backward()
        optimizer.step()
        assert all(p.device.type == "cpu" for p in model.parameters())
