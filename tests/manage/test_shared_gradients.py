"""Gradients that somebody else holds on the device when they are handed over, and writes to afterwards."""

import pytest
import torch
from loops import backward, batch, losses, mlp
from torch import nn
from twins import assert_twins

from hetero.stm.gradients.offload import Gradients

pytestmark = pytest.mark.usefixtures("late_queue")


class Keeps(torch.autograd.Function):
    kept = []  # noqa: RUF012

    @staticmethod
    def forward(ctx, x, bias):
        return x + bias

    @staticmethod
    def backward(ctx, gradient):
        Keeps.kept.append(gradient)
        return gradient, gradient


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.bias = nn.Parameter(torch.randn(8, 64))
        self.kept = []

    def forward(self, x):
        total = Keeps.apply(self.linear(x), self.bias)
        total.register_hook(self.kept.append)
        return total


def in_a_hook(model, target):
    backward(model, target)
    model.kept.pop().zero_()


def in_a_function(model, target):
    backward(model, target)
    Keeps.kept[-1].zero_()


def by_the_caller(model, target):
    out = model(batch(target))
    gradient = torch.ones_like(out)
    out.backward(gradient)
    gradient.zero_()


WAYS = [in_a_hook, in_a_function, by_the_caller]


def loop_of(way):
    def loop(model, optimizer, target):
        seen = []
        for _ in range(7):
            way(model, target)
            way(model, target)
            model.kept.clear()
            Keeps.kept.clear()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(model.bias.detach().clone())
        return seen

    return loop


@pytest.mark.parametrize("way", WAYS)
def test_writing_to_it_changes_nothing_at_home(way):
    assert_twins(Model, loop_of(way), budget=4 << 20, bandwidth="64MiB/s", device_homes=False)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.usefixtures("homes_on_device")
def test_writing_to_it_changes_nothing_on_the_device(way):
    manager = assert_twins(Model, loop_of(way), budget=4 << 20)
    assert manager._stm.plans.device_homes


def test_those_of_ordinary_layers_are_nobody_elses(monkeypatch):
    answers = []
    original = Gradients.hand_over

    def noted(self, tensor, gradient, *, is_shared):
        answers.append(is_shared)
        return original(self, tensor, gradient, is_shared=is_shared)

    monkeypatch.setattr(Gradients, "hand_over", noted)
    assert_twins(mlp, lambda m, o, t: losses(m, o, t, 3), share=0.6)
    assert len(answers) == 3 * len(list(mlp().parameters()))
    assert not any(answers)
