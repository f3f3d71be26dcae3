"""What raises within a step leaves training able to go on."""

from functools import partial

import pytest
import torch
from loops import mlp, train
from torch import nn
from twins import assert_twins

import hetero


class Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        raise ValueError("on purpose")


class Fragile(nn.Module):
    """Fails in its middle where it is told to: by ``middle``, which may be a Function whose backward does."""

    def __init__(self, middle):
        super().__init__()
        self.body, self.middle, self.fails = mlp(), middle, False

    def forward(self, x):
        x = self.body[:8](x)
        return self.body[8:](self.middle(x) if self.fails else x)


def interrupt(x):
    raise KeyboardInterrupt


def fail_now_and_then(model, optimizer, target, *, error, clears):
    """``clears``: gradients, of which a failed backward may have made some."""
    seen = []
    for step in range(6):
        model.fails = step in (0, 3)
        try:
            seen.append(train(model, optimizer, target, 1))
        except error:
            seen.append("failed")
            assert not hetero.stm.interception.scopes.in_scope()
            if clears:
                optimizer.zero_grad()
    assert seen.count("failed") == 2
    return seen


def test_an_exception_in_forward_leaves_training_able_to_go_on():
    loop = partial(fail_now_and_then, error=KeyboardInterrupt, clears=False)
    assert_twins(partial(Fragile, interrupt), loop)


def test_an_exception_in_backward_leaves_training_able_to_go_on():
    loop = partial(fail_now_and_then, error=ValueError, clears=True)
    assert_twins(partial(Fragile, lambda x: Raises.apply(x)), loop)


@pytest.mark.parametrize("share", [0.6, 4.0])
@pytest.mark.parametrize("catches", [False, True])
def test_a_backward_that_fails_within_an_operator_takes_nothing_from_it(catches, share):
    class Searches(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, fails):
            ctx.save_for_backward(x, weight)
            with torch.enable_grad():
                guess = x.detach().requires_grad_()
                try:
                    found = Raises.apply(guess @ weight.detach()) if fails else guess @ weight.detach()
                    torch.autograd.grad(found.sum(), guess)
                except ValueError:
                    if not catches:
                        raise
            return x @ weight

        @staticmethod
        def backward(ctx, g):
            x, weight = ctx.saved_tensors
            return g @ weight.t(), x.t() @ g, None

    class Searching(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.weight, self.fails = mlp(), nn.Parameter(torch.randn(64, 64) / 8), False

        def forward(self, x):
            return Searches.apply(self.body(x), self.weight, self.fails)

    def loop(model, optimizer, target):
        seen = []
        for step in range(8):
            model.fails = step in (0, 4, 5)
            try:
                seen.append(train(model, optimizer, target, 1))
            except ValueError as error:
                seen.append(str(error))
        return seen

    assert_twins(Searching, loop, share=share)
