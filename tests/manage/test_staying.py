"""Losses that the caller makes while what they run is tried again: the same bits, and no mode is left behind."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from accelerators import GAPS
from loops import batch, mlp
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from twins import assert_twins

from hetero.stm.running import modes
from hetero.stm.running.retry import Retry


class Seen(TorchDispatchMode):
    """A mode of the caller's own."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def labels(y):
    return torch.arange(len(y)).to(y.device) % 4


def weighted(model, x):
    y = model(x)
    weight = torch.ones(y.shape[1]).to(y.device) * 0.5
    return F.cross_entropy(y, labels(y), weight=weight, label_smoothing=0.1)


def product(model, x):
    return model(x).sigmoid().prod(1).sum()


def masked(model, x):
    y = model(x)
    return y.masked_fill(y < 0, torch.tensor(0.5).to(y.device)).cumprod(1).mean()


def autocast(model, x):
    y = model(x)
    with torch.autocast(y.device.type, dtype=torch.bfloat16):
        return F.linear(y, torch.ones(4, y.shape[1]).to(y.device)).float().square().mean()


def with_metrics(model, x):
    y = model(x)
    with torch.inference_mode():
        y.argmax(1).float().mean()
    return y.square().mean()


def counted(model, x):
    y = model(x)
    with FlopCounterMode(display=False) as counter:
        loss = (y @ y.t()).square().mean()
    assert counter.get_total_flops() > 0
    return loss


def seen_by_a_mode(model, x):
    with Seen() as mode:
        loss = model(x).square().mean()
    assert mode.count > 0
    return loss


def seen_from_forward_to_loss(model, x):
    y = model(x)
    with Seen() as mode:
        loss = y.square().mean()
    assert mode.count >= 2
    return loss


def drawn(model, x):
    y = model(x)
    return (F.dropout(y, 0.3) + torch.randn_like(y)).square().mean()


LOSSES = [
    *(weighted, product, masked, autocast, with_metrics, counted, seen_by_a_mode, seen_from_forward_to_loss),
    drawn,
]


@pytest.mark.parametrize("share", [0.3, 0.5, 0.8])
@pytest.mark.parametrize("loss_of", LOSSES)
def test_a_loss_between_forward_and_backward_is_the_same(loss_of, share):
    stayed = []

    def loop(model: nn.Module, optimizer, target):
        seen = []
        for _ in range(3):
            loss = loss_of(model, batch(target))
            stayed.append(len(modes.active(Retry)))
            loss.backward()
            seen.append([loss, *[p.grad for p in model.parameters()]])
            optimizer.step()
            assert not any(not retry.is_over for retry in modes.active(Retry))
            optimizer.zero_grad()
        return seen

    assert_twins(mlp, loop, share=share)
    # Of the managed run's first iterations; else this would show nothing. With gaps, the caller's part is not
    # capped.
    assert max(stayed) == (0 if GAPS else 1)
    assert modes.active(Retry) == []


@pytest.mark.parametrize("part", ["forward and backward", "backward", "step", "epoch"])
@pytest.mark.parametrize("infers", [False, True])
def test_inference_mode_begins_with_modes_and_ends_without_them_or_the_other_way_round(part, infers):
    """Torch restores at its end what there was at its begin; also if it is told ``mode=False``."""

    def within(*parts):
        return torch.inference_mode(False) if part in parts else contextlib.nullcontext()

    def loop(model, optimizer, target):
        seen = []
        for _ in range(3):
            with within("epoch"):
                for _ in range(2):
                    with within("forward and backward"):
                        loss = model(batch(target)).square().mean()
                        with within("backward"):
                            loss.backward()
                    with within("step"):
                        optimizer.step()
                    optimizer.zero_grad()
                    seen.append(loss)
            if infers:
                with torch.inference_mode():
                    seen.append(model(batch(target)).square().mean())
            assert torch.empty(1).numel() == 1
        return seen

    assert_twins(mlp, loop, share=0.5)
    assert not modes.active(Retry)
