"""Iterations that each train a part of the model: heads in turn, early exits, layers that are left out, a head of its
own now and then."""

import copy

import pytest
import torch
from accelerators import GAPS
from loops import batch, mlp
from settling import PLENTY, managed_mlp
from torch import nn
from twins import assert_twins

from hetero.stm.plans import homechoice


class Parts(nn.Module):
    """``choose(number, training)``: which of the heads an iteration uses, and how many blocks, or which."""

    def __init__(self, choose):
        super().__init__()
        self.blocks = nn.ModuleList(mlp(depth=1) for _ in range(4))
        self.heads = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
        self.choose, self.number = choose, 0

    def forward(self, x):
        blocks, heads = self.choose(self.number)
        self.number += self.training
        for block in blocks:
            x = self.blocks[block](x)
        return sum(self.heads[head](x) for head in heads)


ALL = range(4)
CHOICES = {
    "heads in turn": lambda number: (ALL, [number % 2]),
    "early exits": lambda number: (range(1 + number % 4), [0]),
    "layers left out": lambda number: ([block for block in ALL if (number * 7 + block * 3) % 5 > 1], [0]),
    "a head now and then": lambda number: (ALL, [0, 1] if number % 5 == 4 else [0]),
}


def train(model, optimizer, target, steps=40):
    losses = []
    for _ in range(steps):
        loss = model(batch(target)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("share", [0.6, 0.9, 3.0])
def test_parts_train_to_the_same_bits(choice, share):
    assert_twins(lambda: Parts(CHOICES[choice]), train, share=share)


@pytest.mark.parametrize("choice", CHOICES)
def test_all_parts_live_on_the_device_where_everything_fits(choice):
    model, optimizer, manager, target = managed_mlp(PLENTY, build=lambda: Parts(CHOICES[choice]))
    train(model, optimizer, target)
    assert manager.plan.everything_fits
    manager.close()


def test_what_is_not_trained_now_may_stay_where_it_lives():
    """Nothing of it moves, as if it were stepped."""
    model, optimizer, manager, target = managed_mlp(PLENTY, build=lambda: Parts(CHOICES["heads in turn"]))
    manager._stm.settled.forbid()
    train(model, optimizer, target)
    before = manager.stats.bytes_moved
    train(model, optimizer, target, steps=4)
    assert manager.stats.bytes_moved == 0 == before
    manager.close()


class Shrinking(torch.optim.Optimizer):
    """Writes to all parameters, with a gradient or without."""

    steps_parameters_independently = True

    def __init__(self, params):
        super().__init__(params, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].setdefault("sum", torch.zeros_like(p)).add_(p)
                p.mul_(0.99)
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"])


@pytest.mark.parametrize("share", [0.6, 0.9, 1.5, 3.0])
def test_what_is_not_trained_now_is_stepped_all_the_same_by_who_does_so(share):
    assert_twins(
        lambda: Parts(CHOICES["heads in turn"]),
        train,
        share=share,
        make_optimizer=lambda model: Shrinking(model.parameters()),
    )


@pytest.mark.parametrize("share", [0.6, 0.9, 1.5, 3.0])
def test_states_are_loaded_and_a_closure_is_stepped_while_nothing_has_a_gradient(share):
    def loop(model, optimizer, target):
        seen = train(model, optimizer, target, steps=12)
        saved = copy.deepcopy(optimizer.state_dict())
        seen += train(model, optimizer, target, steps=3)
        optimizer.load_state_dict(saved)
        seen += train(model, optimizer, target, steps=5)

        def closure():
            optimizer.zero_grad()
            loss = model(batch(target)).square().mean()
            loss.backward()
            return loss

        for _ in range(6):
            seen.append(optimizer.step(closure).detach())
        return seen + train(model, optimizer, target, steps=4)

    assert_twins(lambda: Parts(CHOICES["heads in turn"]), loop, share=share)


@pytest.mark.usefixtures("homes_on_device")
@pytest.mark.parametrize("budget", [660_000, 670_000, 680_000, 690_000])
def test_copies_of_other_iterations_leave_for_gradients_that_stay(budget, monkeypatch):
    """The plan of an iteration knows what is left over from another head's no more than the measured ones did."""

    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk = mlp(depth=2)
            self.heads = nn.ModuleList(mlp(depth=1) for _ in range(4))

        def forward(self, x, head):
            return self.heads[head](self.trunk(x))

    model, optimizer, manager, target = managed_mlp(budget, build=Heads)
    torch.accelerator.reset_peak_memory_stats()
    choose, chosen = homechoice.choose_placement, set()
    monkeypatch.setattr(
        homechoice,
        "choose_placement",
        lambda order, costs, *sizes, **limits: choose(
            order, {index: cost for index, cost in costs.items() if index in chosen}, *sizes, **limits
        ),
    )
    for number in range(32):
        if number == 21:  # late: copies of all heads are there
            chosen.update(range(len(list(model.trunk.parameters()))))
            manager._stm.home_choice.choose_again()
        loss = model(batch(target, rows=16), number % 4).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(manager._stm.device_homes()) == len(chosen)
    assert torch.accelerator.max_memory_allocated() <= budget + GAPS
    manager.close()
