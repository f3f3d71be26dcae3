"""What is there once, the first time or now and then: a library that tries which of its kernels is the fastest takes
memory for it, and so does whoever looks at activations in each tenth iteration."""

import itertools

import pytest
import torch
from settling import managed_mlp
from torch import nn
from twins import assert_twins

WIDTH, ROWS, LAYERS, STEPS = 256, 64, 8, 12
PEAK = 4 * (
    LAYERS * WIDTH * (WIDTH + 1) * 4 + LAYERS * ROWS * WIDTH * 2
)  # about that of the chain, unmanaged
WORKSPACE = PEAK // 4


class Tuned(torch.autograd.Function):
    """A linear layer's kernels, tried on their first call."""

    @staticmethod
    def forward(ctx, x, weight, bias, layer):
        ctx.save_for_backward(x, weight)
        ctx.layer = layer
        layer.try_kernels("forward", x.device)
        return torch.addmm(bias, x, weight.t())

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        ctx.layer.try_kernels("backward", x.device)
        return gradient @ weight, gradient.t() @ x, gradient.sum(0), None


class TunedLinear(nn.Linear):
    def __init__(self, workspace, where):
        super().__init__(WIDTH, WIDTH)
        self.workspace, self.where, self.tried = workspace, where, set()

    def forward(self, x):
        return Tuned.apply(x, self.weight, self.bias, self)

    def try_kernels(self, where, device):
        if where in self.where and where not in self.tried:
            self.tried.add(where)
            torch.empty(self.workspace, dtype=torch.uint8, device=device)


def tuned_chain(workspace, where):
    return lambda: nn.Sequential(
        *[m for _ in range(LAYERS) for m in (TunedLinear(workspace, where), nn.Tanh())]
    )


def train_once(model, optimizer, target):
    loss = model(torch.randn(ROWS, WIDTH).to(target)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def train(model, optimizer, target):
    return [train_once(model, optimizer, target) for _ in range(STEPS)]


WHERE = pytest.mark.parametrize("where", [("forward",), ("forward", "backward")], ids="+".join)


@WHERE
@pytest.mark.parametrize("share", [0.9, 0.5])
def test_kernels_that_are_tried_change_no_number(where, share):
    assert_twins(tuned_chain(WORKSPACE, where), train, share=share)


@WHERE
def test_kernels_that_were_tried_once_leave_room_for_everything(where):
    """In the iteration that was measured all would not have fitted beside what they took."""
    budget = int(1.1 * PEAK)
    model, optimizer, manager, target = managed_mlp(budget, build=tuned_chain(2 * WORKSPACE, where))
    train(model, optimizer, target)
    assert manager.plan.everything_fits
    assert manager.stats.peak_device_bytes <= budget
    manager.close()


@WHERE
def test_what_kernels_took_once_is_not_kept_free_for_good(where):
    budget = PEAK // 2
    # Nor are places kept free for updates that begin early, which the clock decides.
    model, optimizer, manager, target = managed_mlp(
        budget, build=tuned_chain(WORKSPACE, where), device_homes=False, speculate=False
    )
    train(model, optimizer, target)
    assert min(moment.capacity_bytes for moment in manager.plan.moments) > budget - WORKSPACE
    assert manager.stats.peak_device_bytes <= budget
    manager.close()


class Watched(nn.Module):
    """Somebody looks at what comes by, in some iterations."""

    def __init__(self, looks_at):
        super().__init__()
        self.looks_at, self.iteration = looks_at, 0

    def forward(self, x):
        if self.iteration in self.looks_at:
            torch.empty(WORKSPACE, dtype=torch.uint8, device=x.device)
        self.iteration += 1
        return x


def watched_chain(looks_at):
    def build():
        chain = tuned_chain(0, ())()
        chain.insert(LAYERS, Watched(looks_at))
        return chain

    return build


def passes(looks_at, steps):
    """By how many bytes each iteration passes the budget."""
    budget, over = PEAK // 2, []
    model, optimizer, manager, target = managed_mlp(budget, build=watched_chain(looks_at))
    for _ in range(steps):
        torch.accelerator.reset_peak_memory_stats()
        train_once(model, optimizer, target)
        over.append(max(0, torch.accelerator.max_memory_allocated() - budget))
    manager.close()
    return over


def test_who_looks_the_first_time_may_look_again():
    """What is between two operators is no library's: it is kept free all along."""
    assert not any(passes({0, 10, 20}, 24))


@pytest.mark.parametrize("share", [0.5, 0.7])
def test_who_looks_at_gradients_the_first_time_may_look_again(share):
    """In a backward, hooks run where kernels do: what is taken there alone is kept free all along as well."""
    budget, looks, over = int(share * PEAK), {0, 10, 20}, []
    model, optimizer, manager, target = managed_mlp(budget, build=tuned_chain(0, ()))
    iterations = itertools.count()

    def look(module, given, made):
        if next(iterations) in looks:
            torch.empty(WORKSPACE, dtype=torch.uint8, device=made[0].device)

    model[LAYERS].register_full_backward_hook(look)
    for _ in range(24):
        torch.accelerator.reset_peak_memory_stats()
        train_once(model, optimizer, target)
        over.append(max(0, torch.accelerator.max_memory_allocated() - budget))
    manager.close()
    assert not any(over)
