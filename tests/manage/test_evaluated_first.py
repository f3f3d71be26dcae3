"""A model that is evaluated before it is trained: what that takes tells nothing of what training does."""

import functools

import pytest
import torch
from loops import batch, mlp, square_loss
from settling import is_intercepted
from torch import nn
from torch.utils.checkpoint import checkpoint
from twins import assert_twins, device

import hetero


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = mlp(depth=3), nn.Linear(64, 64)

    def forward(self, x):
        return self.head(self.body(x))

    def loss(self, x):
        """As a method of its own, which calls modules and not the model."""
        return self.head(self.body(x)).square().mean()


def of_layers(model, x):
    for layer in (*model.body, model.head):
        x = layer(x)
    return x.square().mean()


def of_weights(model, x):
    """As functional code has it."""
    for layer in (*model.body, model.head):
        x = nn.functional.linear(x, layer.weight, layer.bias) if isinstance(layer, nn.Linear) else layer(x)
    return x.square().mean()


LOSSES = {
    "model": lambda model, x: model(x).square().mean(),
    "method": lambda model, x: model.loss(x),
    "layers": of_layers,
    "weights": of_weights,
}


def evaluate_and_train(model, optimizer, target, *, loss_of, holds=False):
    seen, held = [], []
    for _ in range(5):
        with torch.no_grad():
            seen.append(model(batch(target)).mean())
    if holds:  # as who saves a checkpoint before the first step
        held.append(model.state_dict())
    for _ in range(4):
        loss = loss_of(model, batch(target))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss)
    return seen


@pytest.mark.parametrize("holds", [False, True], ids=["", "state_dict"])
@pytest.mark.parametrize("way", LOSSES)
def test_it_is_kept_to_the_budget_however_training_begins(way, holds):
    loop = functools.partial(evaluate_and_train, loss_of=LOSSES[way], holds=holds)
    manager = assert_twins(Encoder, loop, share=0.5)
    assert manager.stats.settled_forwards == 0


def test_within_a_reentrant_checkpoint_what_was_trained_settles():
    """Its forward looks like an evaluation's."""

    def loop(model, optimizer, target):
        seen = []
        for _ in range(14):
            x = batch(target).requires_grad_()
            loss = checkpoint(model, x, use_reentrant=True).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.detach())
        return seen

    assert assert_twins(Encoder, loop, budget=64 << 20).stats.settled_forwards > 0


def test_without_an_optimizer_it_settles():
    model = Encoder()
    with hetero.manage(model, device=device(), device_budget="64MiB") as manager:
        for _ in range(5):
            with torch.no_grad():
                model(batch(manager.device))
        assert not is_intercepted(model)


def test_whoever_holds_what_has_to_leave_is_told_of_it_once():
    """Layers are unfrozen, and then all does not fit any more."""
    model = Encoder().requires_grad_(False)
    model.head.requires_grad_(True)
    optimizer = torch.optim.AdamW(model.parameters())
    target = device()

    def step(model):
        square_loss(model, target).backward()
        optimizer.step()
        optimizer.zero_grad()

    budget = torch.accelerator.memory_allocated() + (640 << 10)
    with hetero.manage(model, optimizer, device=target, device_budget=budget):
        for _ in range(6):
            step(model)
        assert not is_intercepted(model)
        held = model.state_dict()
        model.requires_grad_(True)
        step(model)
        assert torch.accelerator.max_memory_allocated() > budget
        with pytest.warns(RuntimeWarning, match=r"device_budget of .* was passed by .*state_dict"):
            step(model)
        step(model)  # where a warning is an error
        assert not is_intercepted(model)
        del held
        step(model)
        assert is_intercepted(model)


def test_who_passes_only_what_was_given_to_others_is_told_nothing():
    """By `Manager.trim`: the budget is kept."""
    model = Encoder()
    optimizer = torch.optim.AdamW(model.parameters())
    target = device()
    with hetero.manage(model, optimizer, device=target, device_budget="64MiB") as manager:

        def step(rows):
            model(batch(target, rows)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(6):
            step(8)
        manager.trim(torch.accelerator.memory_allocated() + (1 << 20))
        for _ in range(6):
            step(8)
        assert not is_intercepted(model)
        held = model.state_dict()
        for _ in range(3):
            step(2048)  # where a warning is an error
        assert not is_intercepted(model)
        del held
