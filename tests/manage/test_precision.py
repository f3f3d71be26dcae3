"""Under ``precision`` the numbers are those of FSDP2's mixed precision, and half the bytes move."""

import pytest
import torch
from sharded import assert_as_fsdp2
from torch import nn

WIDTH = 64


def mlp(width=WIDTH, depth=4):
    return nn.Sequential(
        *[nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.GELU()) for _ in range(depth)]
    )


def steps(model, optimizer, target, count=4, *, micro_batches=1, clip=None):
    seen = []
    for _ in range(count):
        for _ in range(micro_batches):
            output = model(torch.randn(8, WIDTH).to(target))
            loss = output.float().square().mean()
            loss.backward()
            seen.append([output, loss])
        if clip is not None:
            seen.append(nn.utils.clip_grad_norm_(model.parameters(), clip))
        seen.append([p.grad for p in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
    return seen


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
def test_losses_gradients_and_parameters(precision):
    assert_as_fsdp2(mlp, steps, precision)


def test_accumulation():
    assert_as_fsdp2(mlp, lambda m, o, t: steps(m, o, t, micro_batches=3))


def test_clipping():
    assert_as_fsdp2(mlp, lambda m, o, t: steps(m, o, t, clip=1e-3))
