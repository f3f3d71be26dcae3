"""Graphs that are alive at the step, as the loss is, and hold copies of parameters: as attributes of a node, in layers
that compute their activations again; or by a hook that walks a part of them again, in deep equilibrium models."""

import pytest
import torch
from loops import batch, losses, mlp
from settling import managed_mlp
from torch import nn
from twins import assert_twins

PLENTY = 16 << 20


class Again(torch.autograd.Function):
    @staticmethod
    def forward(ctx, layer, x, *parameters):
        ctx.layer, ctx.parameters = layer, parameters
        ctx.save_for_backward(x)
        with torch.no_grad():
            return layer(x)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = ctx.layer(x)
        return None, *torch.autograd.grad(y, [x, *ctx.layer.parameters()], gradient)


class Recomputing(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.layers = nn.Linear(64, 64), nn.ModuleList(mlp(depth=1) for _ in range(3))

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = Again.apply(layer, x, *layer.parameters())
        return x


class Equilibrium(nn.Module):
    """As in the tutorial on them, whose hook is a reference cycle besides."""

    def __init__(self):
        super().__init__()
        self.of_state, self.of_input, self.out = nn.Linear(64, 64), nn.Linear(64, 64), mlp()

    def forward(self, x):
        def step(z):
            return torch.tanh(0.5 * self.of_state(z) + self.of_input(x))

        with torch.no_grad():
            z = torch.zeros_like(x)
            for _ in range(4):
                z = step(z)
        z = step(z)
        start = z.clone().detach().requires_grad_()
        end = step(start)

        def solve(gradient):
            found = gradient
            for _ in range(4):
                found = torch.autograd.grad(end, start, found, retain_graph=True)[0] + gradient
            return found

        z.register_hook(solve)
        return self.out(z)


def train(model, optimizer, target):
    return losses(model, optimizer, target, 12)


@pytest.mark.parametrize("build", [Recomputing, Equilibrium])
@pytest.mark.parametrize("share", [0.5, 0.7, 0.9, 1.2])
def test_the_same_numbers(build, share):
    assert_twins(build, train, share=share)


@pytest.mark.parametrize("build", [Recomputing, Equilibrium])
@pytest.mark.parametrize("share", [0.7, 0.9])
@pytest.mark.usefixtures("homes_on_device")
def test_the_same_numbers_where_some_live_on_the_device(build, share):
    assert_twins(build, train, share=share)


@pytest.mark.parametrize("micro", [1, 3])
def test_what_a_node_holds_is_stepped_where_it_lives(micro):
    manager = assert_twins(
        Recomputing, lambda *given: losses(*given, steps=12, micro_batches=micro), budget=PLENTY
    )
    assert manager.stats.settled_forwards > 0


def test_gradients_that_have_been_accumulated_stay_while_others_are_asked_for():
    model, optimizer, manager, target = managed_mlp("4MiB", build=Equilibrium)
    moved = []
    for number in range(24):
        loss = model(batch(target)).square().mean()  # the graph before it is alive until now
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if number in (15, 23):
            stats = manager.stats
            moved.append(stats.total_fetched_bytes + stats.total_written_bytes)
    assert moved[0] == moved[1]
    manager.close()
