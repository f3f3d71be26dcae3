"""What a manager tells after it is closed is what it told before; a picture's name says its format."""

import dataclasses

import pytest
import torch
from equality import fresh_memory
from loops import losses, mlp
from torch import nn
from twins import device

import hetero
from hetero.msc import MemStatsCollector
from hetero.report.plot import draw_stats


def test_the_plan_of_a_closed_manager_is_what_it_was():
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    manager = hetero.manage(model, optimizer, device=device(), device_budget="768KiB", device_homes=False)
    losses(model, optimizer, manager.device, 4)
    before = manager.plan
    manager.close()
    assert before is not None
    assert manager.plan == before
    assert before.host_kernels[0].fused == len(list(model.parameters()))
    assert before.lower_bounds.host_step > 0


def test_that_everything_fitted_is_told_afterwards():
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    manager = hetero.manage(model, optimizer, device=device(), device_budget="64MiB")
    losses(model, optimizer, manager.device, 6)
    plan, stats = manager.plan, manager.stats
    manager.close()
    assert plan is not None
    assert plan.everything_fits
    assert manager.plan == plan
    assert (stats.bytes_moved, stats.lower_bound_bytes) == (0, 0)
    assert "no plan" not in str(stats)
    assert "What moves when" not in str(plan)  # nothing does
    assert "stepped at home" not in str(plan)
    after = manager.stats
    assert (after.bytes_moved, after.lower_bound_bytes) == (0, 0)


@pytest.mark.parametrize("budget", ["768KiB", "1MiB"])
def test_nothing_moves_less_than_the_bound_that_is_told(budget):
    """Not even in the first iteration after the plan has changed, which finds the copies of the one before."""
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    with hetero.manage(model, optimizer, device=device(), device_budget=budget) as manager:
        assert manager.stats.lower_bound_bytes is None
        known = 0
        for _ in range(16):
            losses(model, optimizer, manager.device, 1)
            stats = manager.stats
            if stats.lower_bound_bytes is not None:
                known += 1
                assert 0 < stats.lower_bound_bytes <= stats.bytes_moved
            assert (stats.lower_bound_bytes is None) == ("not known" in str(stats))
        assert known > 4


def penalised(model, x):
    """The gradient of a loss is part of the loss: a penalty on it."""
    (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    return gradient.norm(2, 1).mean()


def with_gradients_of_parameters(model, x):
    """Gradients go home twice, first with a graph."""
    loss = model(x).square().mean()
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    return loss + 0.01 * sum(gradient.square().sum() for gradient in gradients).to(x.device)


@pytest.mark.parametrize("budget", ["768KiB", "1MiB"])
@pytest.mark.parametrize("loss_of", [penalised, with_gradients_of_parameters])
def test_nor_where_gradients_are_differentiated(loss_of, budget):
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    with hetero.manage(model, optimizer, device=device(), device_budget=budget) as manager:
        known = 0
        for _ in range(12):
            x = torch.randn(4, 64).to(manager.device).requires_grad_()
            loss_of(model, x).backward()
            optimizer.step()
            optimizer.zero_grad()
            stats = manager.stats
            if stats.lower_bound_bytes is not None:
                known += 1
                assert 0 < stats.lower_bound_bytes <= stats.bytes_moved
        assert known > 4


def test_nor_where_gradients_are_sparse():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(64, 32, sparse=True), nn.Flatten(), *mlp(width=128))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dense = sum(p.nbytes for p in list(model.parameters())[1:])
    with hetero.manage(
        model, optimizer, device=device(), device_budget="768KiB", device_homes=False
    ) as manager:
        for _ in range(12):
            before = manager.stats.total_written_bytes
            model(torch.randint(0, 64, (4, 4)).to(manager.device)).sum().backward()
            sparse = model[0].weight.grad
            # Of 16 tokens, rather than all rows.
            content = sparse._indices().nbytes + sparse._values().nbytes
            assert manager.stats.total_written_bytes - before >= dense + content
            optimizer.step()
            optimizer.zero_grad()
            stats = manager.stats
            assert stats.lower_bound_bytes is None or stats.lower_bound_bytes <= stats.bytes_moved
        assert stats.lower_bound_bytes > 0


def test_updates_begun_in_backward_are_told_of_where_there_were_any():
    with hetero.manage(mlp(), device=device(), device_budget="64MiB") as manager:
        stats = manager.stats
    assert "begun in backward" not in str(stats)
    assert "3, 1 of them taken back" in str(dataclasses.replace(stats, tried_updates=3, taken_back_updates=1))


def test_a_picture_with_another_ending_is_refused(tmp_path):
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    with hetero.manage(model, optimizer, device=device(), device_budget="768KiB") as manager:
        losses(model, optimizer, manager.device, 2)
        with pytest.raises(hetero.ConfigError, match=r"\.png, \.svg, \.pdf"):
            manager.plot(str(tmp_path / "memory.xyz"))
        with pytest.raises(hetero.ConfigError, match=r"there is no folder .*missing"):
            manager.plot(str(tmp_path / "missing" / "memory.png"))
        manager.plot(str(tmp_path / "memory.SVG"))
    assert (tmp_path / "memory.SVG").stat().st_size > 0


@pytest.mark.parametrize(
    ("budget", "unit", "label"),
    [
        ("768KiB", "KiB", "budget 768.0 KiB"),
        ("30MiB", "KiB", "budget 30.0 MiB, far above"),
    ],
)
def test_a_picture_shows_the_iteration_whatever_the_budget(budget, unit, label):
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    with hetero.manage(model, optimizer, device=device(), device_budget=budget) as manager:
        losses(model, optimizer, manager.device, 2)
        stats = manager.stats
    figure = draw_stats(stats)
    (axes,) = figure.axes
    assert axes.get_ylabel() == f"{unit} on the device"
    assert figure.legends[0].get_texts()[-1].get_text() == label
    peak = max(period.device_peak_bytes for period in stats.periods) / 1024
    bottom, top = axes.get_ylim()
    assert bottom == 0
    assert peak <= top <= max(peak, 768) * 1.1


def test_what_manage_itself_tries_out_is_not_in_the_peak():
    target = device()
    fresh_memory()
    before = torch.accelerator.max_memory_allocated()
    with hetero.manage(mlp(), device=target, device_budget="64MiB"):
        assert torch.accelerator.max_memory_allocated() == before


def test_the_peak_is_at_least_what_is_in_use_whatever_the_counter_showed_before():
    target = device()
    fresh_memory()
    assert torch.empty(32 << 20, dtype=torch.uint8, device=target).nbytes == 32 << 20
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    with hetero.manage(model, optimizer, device=target, device_budget="64MiB") as manager:
        losses(model, optimizer, target, 6)
        stats = manager.stats
        assert stats.peak_device_bytes >= torch.accelerator.memory_allocated()
        assert stats.peak_device_bytes < 32 << 20


def test_the_peak_ends_with_management_and_does_not_fall():
    target = device()
    fresh_memory()
    assert (
        torch.empty(32 << 20, dtype=torch.uint8, device=target).nbytes == 32 << 20
    )  # a higher one from before
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    manager = hetero.manage(model, optimizer, device=target, device_budget="64MiB")
    losses(model, optimizer, target, 6)
    peak = manager.stats.peak_device_bytes
    manager.close()
    assert manager.stats.peak_device_bytes >= peak
    peak = manager.stats.peak_device_bytes
    assert torch.empty(40 << 20, dtype=torch.uint8, device=target).nbytes == 40 << 20
    assert manager.stats.peak_device_bytes == peak


def test_an_evaluation_does_not_hide_what_training_takes():
    """Whoever looks after an epoch's end has evaluated last."""
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    with hetero.manage(
        model, optimizer, device=device(), device_budget="768KiB", device_homes=False
    ) as manager:
        x = torch.randn(8, 64).to(manager.device)
        with torch.no_grad():
            for _ in range(3):
                model(x)
        alone = manager.stats
        assert {period.phase for period in alone.periods} == {"forward"}
        assert manager.plan.lower_bounds.gradients == 0.0
        for _ in range(3):
            losses(model, optimizer, manager.device, 4)
            with torch.no_grad():
                for _ in range(3):
                    model(x)
        phases = {"forward", "backward", "step"}
        assert {period.phase for period in manager.stats.periods} == phases
        assert {moment.phase for moment in manager.plan.moments} == phases
        assert manager.plan.lower_bounds.gradients > 0.0


def test_what_was_needed_before_it_had_left_lowers_the_bound(monkeypatch):
    """Whether saved tensors have left by then is the link's affair, and no plan's."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(8)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hetero.manage(
        model, optimizer, device=device(), device_budget="768KiB", device_homes=False, speculate=False
    ) as manager:

        def train():
            model(torch.randn(512, 64).to(manager.device)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            return manager.stats

        for _ in range(8):
            planned = train()
        monkeypatch.setattr(MemStatsCollector, "count_activation_in", MemStatsCollector.count_spared)
        stats, followed = train(), manager._stm.cycles.followed
        periods = [period for segment in manager._stm.plans.last_segments for period in segment.periods]
    spared = sum(period.spared_bytes for period in periods)
    assert spared >= sum(period.activation_in_bytes for period in planned.periods) > 0
    known = followed.plan.least_bytes + followed.plan.gradient_bytes
    assert 0 < stats.lower_bound_bytes <= min(known - spared, stats.bytes_moved)
