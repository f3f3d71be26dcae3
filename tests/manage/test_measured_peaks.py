"""What a period is measured to need beside model data."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from accelerators import ON_CUDA
from loops import losses, mlp
from settling import BLOCKS
from torch import nn
from twins import device

import hetero
from hetero.msc import Phase


@pytest.mark.skipif(ON_CUDA, reason=BLOCKS)
@pytest.mark.parametrize("kib", [160, 200])
def test_what_leaves_for_an_operator_is_no_need_of_it(kib):
    """In a warm-up, which has room for one of two large weights. Both fit later, beside all else."""
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)).requires_grad_(False)
    target = device()
    weights = sum(p.nbytes for p in model.parameters())
    budget = torch.accelerator.memory_allocated() + (kib << 10)
    with hetero.manage(model, device=target, device_budget=budget) as manager:
        x = torch.randn(8, 64).to(target).requires_grad_()
        for _ in range(6):
            model(x).square().mean().backward()
        stats = manager.stats
    assert max(period.device_non_model_bytes for period in stats.periods) < budget - weights
    assert stats.bytes_moved == stats.lower_bound_bytes == 0


@pytest.mark.usefixtures("homes_on_device")
def test_gradients_that_stay_are_no_need_of_what_comes_after_them():
    """Two layers get theirs between two operators. At first these go home at once; when the iteration is measured again
    they stay."""
    model, target = mlp(), device()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    needs = []
    with hetero.manage(model, optimizer, device=target, device_budget="64MiB", activations=False) as manager:
        plans = manager._stm.plans
        manager._stm.settled.forbid()
        for _ in range(2):
            for _ in range(6):
                losses(model, optimizer, target, 1)
            measured = [plans.samples[key][0] for key in plans.last.keys if key.phase is not Phase.STEP]
            needs.append([period.non_model_bytes for segment in measured for period in segment.periods])
            plans.measure_again(plans.last.keys, for_good=True)
    assert needs[0] == needs[1]


@pytest.mark.parametrize("ends", [True, False])
def test_what_lives_on_the_device_may_change_on_several_threads_at_once(ends):
    """As with two managers, each trained on a thread of its own: the first to begin is the first to end."""
    model, target = mlp(), device()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with (
        hetero.manage(model, optimizer, device=target, device_budget="64MiB") as manager,
        ThreadPoolExecutor(1) as elsewhere,
    ):
        ours, anothers = (manager._stm.collector.homes_changing() for _ in range(2))
        ours.__enter__()
        elsewhere.submit(anothers.__enter__).result()
        ours.__exit__(None, None, None)
        if ends:
            elsewhere.submit(anothers.__exit__, None, None, None).result()
        losses(model, optimizer, target, 1)
        assert manager.stats.periods
