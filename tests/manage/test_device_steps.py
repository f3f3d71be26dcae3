"""The step of parameters that live on the device: its numbers, what it moves, what memory it takes."""

import gc
import importlib

import pytest
import torch
from accelerators import ON_CUDA, STEPS_AT_HOME
from loops import backward, batch, losses, mlp
from residents import assert_nothing_moves, living, managed_mlp, step
from test_optimizer_db import both, configurations
from torch import nn
from torch.utils.checkpoint import checkpoint
from twins import adamw, assert_twins, device

import hetero
from hetero.stm.step.devicehomes import DeviceHomes
from hetero.stm.updates.counts import StepCounts
from hetero.stm.updates.temporaries import is_measured

pytestmark = pytest.mark.usefixtures("homes_on_device", "late_queue")


def test_where_everything_fits_nothing_moves():
    model, optimizer, manager, target = managed_mlp("64MiB")
    with manager:
        for _ in range(5):
            step(model, optimizer, target)
        assert living(manager) == {name for name, _ in model.named_parameters()}

        def clipped():
            x = torch.ones(8, 64, device=target)
            model(x).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()
            optimizer.zero_grad()

        assert_nothing_moves(manager, clipped)


@pytest.mark.skipif(ON_CUDA, reason="copies between devices are called as all others there")
@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.Adagrad, torch.optim.SGD])
def test_a_step_waits_for_no_copy(optimizer_class):
    """The numbers of steps lie at home, and kernels on the device want theirs there."""
    model, optimizer, manager, target = managed_mlp(
        "64MiB", lambda model: optimizer_class(model.parameters(), lr=1e-3)
    )
    with manager:
        manager._stm.settled.forbid()  # or it would be the user's own step
        for _ in range(5):
            step(model, optimizer, target)
        assert living(manager) == {name for name, _ in model.named_parameters()}
        backward(model, target)
        with torch.autograd.profiler.profile() as operators:
            optimizer.step()
        names = {event.name for event in operators.function_events}
        assert any(name.startswith("aten::_fused_") for name in names)
        assert "aten::_copy_from" not in names


def test_numbers_of_steps_are_each_parameters_own():
    target, counts = device(), StepCounts()
    one, other, third = (counts.copy(torch.tensor(x), target) for x in (3.0, 3.0, 5.0))
    assert (one.device, one.dtype, one.shape) == (target, torch.float32, torch.Size([]))
    one.add_(1)
    assert [float(x) for x in (one, other, third)] == [4.0, 3.0, 5.0]
    assert counts.copy(torch.tensor([3.0]), target).shape == (1,)
    many = [counts.copy(torch.tensor(3.0), target) for _ in range(300)]
    torch._foreach_add_(many, 1)
    assert [float(x) for x in many] == [4.0] * 300
    assert float(other) == 3.0


@pytest.mark.parametrize(
    ("values", "nbytes"),
    [
        ([7.0] * 256, 2 * 512),
        ([float(x) for x in range(256)], 256 * 512),
        ([float("nan")] * 256, 256 * 512),  # no two are equal
    ],
)
def test_numbers_of_steps_take_no_more_than_is_kept_free_for_each(values, nbytes):
    target, counts = device(), StepCounts()
    before = torch.accelerator.memory_allocated(target)
    copies = [counts.copy(torch.tensor(x), target) for x in values]
    assert torch.accelerator.memory_allocated(target) - before == nbytes
    copies.clear()
    assert torch.accelerator.memory_allocated(target) - before == 512
    del counts
    assert torch.accelerator.memory_allocated(target) == before


def test_kernels_that_are_not_fused_for_the_number_of_steps_find_room():
    """Of another type than fused kernels want: it was made where numbers are of double precision by default."""
    target = device()
    gc.collect()
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    torch.set_default_dtype(torch.float64)
    try:
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
        optimizer.zero_grad()
    finally:
        torch.set_default_dtype(torch.float32)
    assert optimizer.state[model[0].weight]["step"].dtype is torch.float64
    budget = 1200 << 10
    before = torch.accelerator.memory_allocated(target)
    with hetero.manage(model, optimizer, device=target, device_budget=budget + before) as manager:
        manager._stm.settled.forbid()
        for _ in range(5):
            backward(model, target)
            torch.accelerator.reset_peak_memory_stats(target)
            optimizer.step()
            assert torch.accelerator.max_memory_allocated(target) - before <= budget
            optimizer.zero_grad()
        assert living(manager)


class Recomputed(nn.Module):
    """``layers``, each of which runs again in backward, where operators are outside of the model's forward."""

    def __init__(self, layers, *, use_reentrant):
        super().__init__()
        self.layers = layers
        self.use_reentrant = use_reentrant

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.use_reentrant)
        return x


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum(0)


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))

    def forward(self, x):
        return Scaled.apply(x, self.weight)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_what_lives_there_does_not_move_when_layers_are_recomputed(use_reentrant):
    target = device()
    gc.collect()
    torch.manual_seed(0)
    layers = nn.Sequential(*mlp(), Scale())
    model = Recomputed(layers, use_reentrant=use_reentrant)
    optimizer = adamw(model)
    with hetero.manage(model, optimizer, device=target, device_budget="1000KiB") as manager:
        for _ in range(10):
            x = batch(target).requires_grad_()
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        here = living(manager)
        assert 0 < len(here) < len(list(model.parameters()))
        before = manager.stats.total_written_bytes
        for _ in range(2):
            x = batch(target).requires_grad_()
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert living(manager) == here
        stats = manager.stats
    others = sum(p.nbytes for name, p in model.named_parameters() if name not in here)
    assert stats.total_written_bytes - before == 2 * others  # their gradients
    assert stats.unplanned_fetches == 0  # not even in the forward before the step with which they move
    # Parameters move whole, for which the bound need not pay.
    assert stats.bytes_moved <= 1.05 * stats.lower_bound_bytes


def test_casts_of_what_lives_there_are_not_kept_until_backward():
    kept = {}
    for allowed in (False, True):
        target = device()
        gc.collect()
        torch.manual_seed(0)
        model = mlp()
        optimizer = adamw(model)
        with hetero.manage(
            model, optimizer, device=target, device_budget="1000KiB", device_homes=allowed
        ) as manager:

            def forward(model=model, target=target):
                with torch.autocast(target.type, torch.bfloat16):
                    return model(batch(target))

            for _ in range(10):
                forward().float().square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            assert bool(living(manager)) is allowed
            output = forward()
            kept[allowed] = manager.stats.by_kind["device"]["activation"]
            del output
    assert kept[True] == kept[False] > 0


@pytest.mark.skipif(ON_CUDA, reason=STEPS_AT_HOME)
def test_one_call_steps_those_that_there_is_room_for_side_by_side(monkeypatch):
    module = importlib.import_module("torch.optim.adam")  # torch.optim has no attribute for it
    stepped, adam = [], module.adam

    def counting(params, *args, **keywords):
        if params and params[0].device.type != "cpu":
            stepped.append(len(params))
        return adam(params, *args, **keywords)

    monkeypatch.setattr(module, "adam", counting)
    model, optimizer, manager, target = managed_mlp(1300 << 10)
    with manager:
        for _ in range(6):
            step(model, optimizer, target)
        stepped.clear()
        step(model, optimizer, target)
        there = len(living(manager))
    assert sum(stepped) == there > len(stepped)


def test_the_books_follow_what_comes_to_the_device_at_once(monkeypatch):
    taken, take = [], DeviceHomes.take

    def noting(self, candidates):
        before = self._stm.collector.non_model_bytes()
        here = take(self, candidates)
        taken.append((len(here), before, self._stm.collector.non_model_bytes()))
        return here

    monkeypatch.setattr(DeviceHomes, "take", noting)
    model, optimizer, manager, target = managed_mlp(900 << 10)
    with manager:
        for _ in range(4):
            step(model, optimizer, target)
    assert taken[0][0] == 0 < taken[-1][0]
    assert all(after <= before for _, before, after in taken)  # else states would count as the operators' own


@pytest.mark.parametrize(
    ("info", "keywords"),
    [case for case in configurations() if is_measured(object.__new__(case.values[0].optim_cls))],
)
def test_every_optimizer_and_configuration(info, keywords):
    both(info, keywords, steps=8)


def nesterov(model):
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, nesterov=True, foreach=True)


@pytest.mark.parametrize("share", [0.7, 1.0, 4.0])
def test_a_gradient_that_a_step_changes_is_seen_so(share):
    """As torch's foreach kernel for Nesterov's momentum does; it is at home where somebody has looked at it before."""

    def loop(model, optimizer, target):
        seen = []
        for number in range(14):
            backward(model, target)
            if number % 3 == 1:
                seen.append([p.grad.clone() for p in model.parameters()])
            optimizer.step()
            if number % 3:
                seen.append([p.grad.clone() for p in model.parameters()])
            if number % 4:
                optimizer.zero_grad()
        return seen

    assert_twins(mlp, loop, share=share, make_optimizer=nesterov)


def adafactor(model):
    return torch.optim.Adafactor(model.parameters(), lr=1e-2)


def muon(model):
    return torch.optim.Muon(model.parameters(), lr=1e-2)


def matrices():
    layers = (nn.Linear(width, 160 - width, bias=False) for width in (64, 96) * 4)
    return nn.Sequential(*(layer for linear in layers for layer in (linear, nn.GELU())))


@pytest.mark.parametrize("share", [0.8, 1.5])
@pytest.mark.parametrize(("build", "make_optimizer"), [(mlp, adafactor), (matrices, muon)])
def test_optimizers_of_whole_matrices(build, make_optimizer, share):
    """What their updates allocate depends on the shape; their norms and products on which numbers are together."""
    manager = assert_twins(
        build, lambda m, o, t: losses(m, o, t, 12), share=share, make_optimizer=make_optimizer
    )
    assert manager._stm.plans.device_homes
