"""A gradient that stays on the device is scaled where it lies, unless somebody else holds its memory."""

import pytest
import torch
from torch import nn
from twins import assert_same, managed, unmanaged

pytestmark = pytest.mark.usefixtures("homes_on_device")

WIDTH, LAYERS = 128, 6


class Product(torch.autograd.Function):
    """``x @ weight.t()``; its backward may keep the weight's gradient, or the memory of it."""

    @staticmethod
    def forward(ctx, x, weight, layer):
        ctx.save_for_backward(x, weight)
        ctx.layer = layer
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        product = x.t() @ gradient
        if ctx.layer.holds == "memory":
            ctx.layer.held = product
        returned = product.t()
        if ctx.layer.holds == "tensor":
            ctx.layer.held = returned
        return gradient @ weight, returned, None


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
        self.holds = self.held = None

    def forward(self, x):
        return Product.apply(x, self.weight, self).tanh()


def build():
    return nn.Sequential(*[Layer() for _ in range(LAYERS)])


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=1e-2, foreach=False)


def loop(holds, at=None):
    """Clips in each step; ``at(model)`` between that and the optimizer's."""

    def run(model, optimizer, target):
        seen = []
        for layer in model:
            layer.holds = holds
        for _ in range(8):
            loss = model(torch.randn(16, WIDTH).to(target)).square().sum()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            if at is not None:
                seen += at(model)
            for layer in model:
                layer.held = None
            optimizer.step()
            optimizer.zero_grad()
            seen += [loss.detach(), norm]
        return seen

    return run


def copies_of_gradients(monkeypatch):
    """Counts, from now on, the operators that make a scaled copy."""
    made = []
    multiply = torch.Tensor.__mul__

    def counted(self, other):
        if self.shape == (WIDTH, WIDTH) and isinstance(other, torch.Tensor) and other.dim() == 0:
            made.append(self)
        return multiply(self, other)

    monkeypatch.setattr(torch.Tensor, "__mul__", counted)
    return made


@pytest.mark.parametrize("holds", [None, "tensor", "memory"])
def test_what_stays_is_scaled_and_the_budget_holds(holds, monkeypatch):
    seen, state, peak = unmanaged(build, loop(holds), sgd)
    made = copies_of_gradients(monkeypatch)
    got, got_state, manager = managed(build, loop(holds), int(0.85 * peak), sgd)  # asserts the budget
    assert manager._stm.plans.device_homes
    assert_same(got, seen, "observed")
    assert_same(got_state, state, "state")
    # They let go of it before the step, or it was copied as it came.
    assert not made


@pytest.mark.parametrize("share", [0.6, 0.7, 0.8])
def test_the_budget_holds_where_it_goes_home_while_somebody_holds_it(share):
    def look(model):
        return [layer.weight.grad.cpu() for layer in model]

    seen, state, peak = unmanaged(build, loop(None, look), sgd)
    got, got_state, _ = managed(build, loop("memory", look), int(share * peak), sgd)
    assert_same(got, seen, "observed")
    assert_same(got_state, state, "state")
