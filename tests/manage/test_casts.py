"""Autocast keeps one cast of a weight for a whole region; so must a managed parameter, without keeping its bytes."""

import pytest
import torch
import torch.nn.functional as F
from accelerators import GAPS, device
from loops import batch
from torch import nn
from torch.utils.checkpoint import checkpoint
from twins import assert_twins

import hetero
from hetero.stm.interception import casts

WIDTH = 64


class Shared(nn.Module):
    """The same layers three times over, as ALBERT's are; ``kind`` is how the weight is used."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(WIDTH, WIDTH) / 8) for _ in range(4)])
        self.bias = nn.Parameter(torch.randn(WIDTH))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        for _ in range(3):
            for weight in self.weights:
                x = self.use(x, weight)
            x = self.norm(x)
        return x

    def use(self, x, weight):
        match self.kind:
            case "linear":
                return torch.tanh(F.linear(x, weight, self.bias))
            case "matmul":
                return torch.tanh(x @ weight)
            case "view":
                return torch.tanh(F.linear(x, weight) + x @ weight.t())
            case "conv":
                y = F.conv1d(x[:, :, None], weight[:, :, None], self.bias)
                return torch.tanh(y + F.conv1d(y, weight.view(WIDTH, WIDTH, 1)))[:, :, 0]
            case "checkpoint":
                return checkpoint(lambda y: torch.tanh(F.linear(y, weight)), x, use_reentrant=False)
            case "recomputed":  # without saved-tensor hooks of ours: the graph holds the casts
                return checkpoint(
                    lambda y: torch.tanh(F.linear(y, weight)) + F.linear(y, weight), x, use_reentrant=True
                )
        raise AssertionError(self.kind)


def steps(model, optimizer, target, forwards=1):
    seen = []
    for _ in range(4):
        with torch.autocast(target.type, dtype=torch.bfloat16):
            losses = [
                model(torch.randn(8, WIDTH).to(target).requires_grad_()).float().square().mean()
                for _ in range(forwards)
            ]
        sum(losses).backward()
        seen.append([*losses, *[p.grad for p in model.parameters()]])
        optimizer.step()
        optimizer.zero_grad()
    return seen


@pytest.mark.parametrize("kind", ["linear", "matmul", "view", "conv", "checkpoint", "recomputed"])
def test_a_weight_used_several_times_in_a_region(kind):
    assert_twins(lambda: Shared(kind), steps, share=0.8)


def test_two_forwards_in_one_region():
    build = lambda: nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(6)])  # noqa: E731
    assert_twins(build, lambda m, o, t: steps(m, o, t, forwards=2), share=0.8)


def test_a_region_within_a_region_and_a_cleared_cache():
    class Nested(Shared):
        def forward(self, x):
            x = super().forward(x)
            with torch.autocast(x.device.type, enabled=False):
                x = F.linear(x.float(), self.weights[0])
            with torch.autocast(x.device.type, dtype=torch.bfloat16):
                x = F.linear(x, self.weights[0])
            torch.clear_autocast_cache()
            with torch.no_grad():
                y = F.linear(x, self.weights[1])
            return F.linear(x, self.weights[0]) + y

    assert_twins(lambda: Nested("linear"), steps, share=0.8)


class AsItIs(nn.Module):
    """A weight's cast is made first of all, as ``first`` says; then the weight is used as it is, twice, and cast."""

    def __init__(self, first: str):
        super().__init__()
        self.first = first
        self.before, self.linear = (nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x):
        x = self.before(x)
        y = None
        match self.first:
            case "recomputed":
                x = checkpoint(lambda y: torch.tanh(self.linear(y)), x, use_reentrant=True)
            case "without gradients":
                with torch.no_grad():
                    x = x + self.linear(x)
            case "its own graph":
                y = self.linear(x.detach())
        with torch.autocast(x.device.type, enabled=self.first != "its own graph"):
            x = x.float() @ (self.linear.weight / self.linear.weight.norm())
        x = self.linear(x)
        return x if y is None else x + y.detach()


@pytest.mark.parametrize("first", ["recomputed", "without gradients", "its own graph"])
def test_a_cast_made_before_a_weight_is_used_as_it_is_adds_its_gradient_after_that(first):
    assert_twins(lambda: AsItIs(first), steps, share=0.8)


class OneAfterAnother(nn.Module):
    """One layer in each way of ``order``: (c)heckpointed, reentrant; as a (l)ayer; its (w)eight as it is."""

    def __init__(self, order):
        super().__init__()
        self.first, self.layer, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.order = order

    def forward(self, x):
        x = self.first(x)
        for each in self.order:
            match each:
                case "c":
                    x = checkpoint(lambda y: torch.tanh(self.layer(y)), x, use_reentrant=True)
                case "l":
                    x = self.layer(x)
                case "w":
                    x = x @ (self.layer.weight / self.layer.weight.norm())
        return self.last(x)


@pytest.mark.parametrize("share", [0.7, 4.0])
@pytest.mark.parametrize("order", ["cl", "lc", "ccl", "clc", "cclc", "ccll", "cclw", "wccl", "cwcl"])
def test_what_checkpoints_add_to_a_gradient_comes_when_it_would(order, share):
    """Clipped in between, gradients are no sums of numbers in low precision, which are exact in any order."""

    def loop(model, optimizer, target):
        seen = []
        for _ in range(5):
            for micro in range(2):
                with torch.autocast(target.type, dtype=torch.bfloat16):
                    loss = model(batch(target)).float().square().mean()
                loss.backward()
                if micro == 0:
                    nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
            seen += [loss.detach(), *[p.grad.cpu().clone() for p in model.parameters()]]
            optimizer.step()
            optimizer.zero_grad()
        return seen

    assert_twins(lambda: OneAfterAnother(order), loop, share=share)


def test_without_kept_casts_the_gradients_differ(monkeypatch):
    # So that the tests above cannot pass by chance.
    monkeypatch.setattr(casts, "_LOW_PRECISION", frozenset())
    with pytest.raises(AssertionError, match="apart"):
        assert_twins(lambda: Shared("linear"), steps, share=0.8)


def test_casts_take_no_memory_between_operators():
    target = device()
    model = nn.Sequential(*[nn.Linear(128, 128, bias=False) for _ in range(16)])
    casts = 16 * 128 * 128 * 2
    budget = torch.accelerator.memory_allocated() + casts * 3 // 4
    with hetero.manage(model, device=target, device_budget=budget):
        torch.accelerator.reset_peak_memory_stats()
        for _ in range(3):
            with torch.autocast(target.type, dtype=torch.bfloat16):
                for _ in range(2):
                    model(torch.randn(4, 128, device=target)).float().square().mean().backward()
        assert torch.accelerator.max_memory_allocated() <= budget + GAPS


class KeepsCast(nn.Module):
    """Casts its weight every second time, and uses the cast twice: before and after a step."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64) * 0.15)
        self.calls = 0

    def forward(self, x):
        if self.calls % 2 == 0:
            self.cast = self.weight.to(torch.bfloat16)
        self.calls += 1
        return nn.functional.linear(x.to(torch.bfloat16), self.cast).float()


@pytest.mark.parametrize("device_homes", [False, True])
def test_a_cast_from_before_a_step_is_not_made_again_from_what_it_wrote(device_homes):
    def build():
        return nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(64, 64), KeepsCast())))

    def loop(model, optimizer, target):
        seen = []
        for _ in range(12):
            loss = model(batch(target)).square().mean()
            loss.backward()
            seen.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
        return seen

    assert_twins(build, loop, share=0.8, device_homes=device_homes)
