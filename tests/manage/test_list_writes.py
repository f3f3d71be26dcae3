"""In-place operators on lists of parameters, and ``set_``: writes that torch does not count are seen all the same."""

import pytest
import torch
from accelerators import ON_CUDA, clear_races, races
from loops import mlp
from torch import nn
from torch.optim.sgd import sgd
from torch.utils.flop_counter import FlopCounterMode
from twins import assert_same, device, plain

import hetero

WIDTH = 64
BUDGETS = ["72KiB", "128KiB", "1MiB"]


def foreach_multiply(target, source):
    torch._foreach_mul_(target, 0.5)


def foreach_copy(target, source):
    torch._foreach_copy_(target, source)


def foreach_lerp(target, source):
    torch._foreach_lerp_(target, source, 0.1)


def foreach_after_single_writes(target, source):
    for p in target:
        p.mul_(0.9)
    torch._foreach_mul_(target, 0.5)


def foreach_on_data(target, source):
    torch._foreach_mul_([p.data for p in target], 0.5)


def foreach_under_a_mode(target, source):
    with FlopCounterMode(display=False):
        torch._foreach_mul_(target, 0.5)


WRITES = [
    foreach_multiply,
    foreach_copy,
    foreach_lerp,
    foreach_after_single_writes,
    foreach_on_data,
    foreach_under_a_mode,
]


class Momentum(nn.Module):
    """A key encoder that follows the query encoder, in forward or in the loop."""

    def __init__(self, write=None):
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH)
        self.key.requires_grad_(False)
        self.write = write

    def follow(self, write):
        with torch.no_grad():
            write(list(self.key.parameters()), list(self.query.parameters()))

    def forward(self, x):
        if self.write is not None:
            self.follow(self.write)
        return self.query(x) + self.key(x)


def outcome(build, loop, budget):
    """Losses and parameters, unmanaged if there is no budget."""
    target = device()
    clear_races()
    torch.manual_seed(0)
    model = build()
    if budget is None:
        model.to(target)
        return plain([loop(model, target), [p.detach().cpu() for p in model.parameters()]])
    with hetero.manage(model, None, device=target, device_budget=budget):
        seen = plain(loop(model, target))
    assert races() == []
    return plain([seen, [p.detach().cpu() for p in model.parameters()]])


def descend(model):
    """One operator a parameter, which both runs have on their own device."""
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p.sub_(p.grad, alpha=0.1)
                p.grad = None


def losses_of(model, target, after_backward):
    torch.manual_seed(1)
    losses = []
    for _ in range(6):
        loss = model(torch.randn(8, WIDTH).to(target)).square().mean()
        loss.backward()
        after_backward(model)
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("write", WRITES)
def test_a_momentum_encoder_in_forward_has_the_numbers_of_an_unmanaged_one(write, budget):
    def loop(model, target):
        return losses_of(model, target, descend)

    expected = outcome(lambda: Momentum(write), loop, None)
    assert_same(outcome(lambda: Momentum(write), loop, budget), expected, write.__name__)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("write", WRITES)
def test_so_has_one_that_the_loop_moves(write, budget):
    def move(model):
        descend(model)
        model.follow(write)

    def loop(model, target):
        return losses_of(model, target, move)

    expected = outcome(Momentum, loop, None)
    assert_same(outcome(Momentum, loop, budget), expected, write.__name__)


def fused_step(model):
    """Torch's function, without an optimizer."""
    parameters = list(model.parameters())
    with torch.no_grad():
        sgd(
            parameters,
            [p.grad for p in parameters],
            [None] * len(parameters),
            weight_decay=0.0,
            momentum=0.0,
            lr=0.5,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            fused=True,
            grad_scale=None,
            found_inf=None,
        )
    model.zero_grad()


@pytest.mark.skipif(ON_CUDA, reason="a fused step at home has the host's arithmetic")
@pytest.mark.parametrize("budget", ["128KiB", "1MiB"])
def test_a_fused_kernel_that_the_user_calls_writes_parameters(budget):
    def build():
        return mlp(depth=2, width=WIDTH)

    def loop(model, target):
        return losses_of(model, target, fused_step)

    assert_same(outcome(build, loop, budget), outcome(build, loop, None), "fused")


@pytest.mark.parametrize("budget", ["100KiB", "125KiB", "200KiB", "1MiB"])
def test_set_is_an_assignment_of_data(budget):
    def build():
        return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])

    def assign(model):
        descend(model)
        weight = model[1].weight
        with torch.no_grad():
            weight.set_(weight.detach() * 0.5)

    def loop(model, target):
        return losses_of(model, target, assign)

    assert_same(outcome(build, loop, budget), outcome(build, loop, None), "set_")


def test_set_to_a_part_of_a_storage_is_refused_with_a_cure():
    model = mlp(depth=1)
    with hetero.manage(model, None, device=device(), device_budget="1MiB"):
        weight = model[0].weight
        before = weight.detach().clone()
        with pytest.raises(hetero.ManageError, match=r"p\.copy_\(\), or call manager\.close\(\) first"):
            weight.set_(torch.zeros(10).untyped_storage(), 0, (10,), (1,))
        assert torch.equal(weight.detach(), before)
