"""What a period is measured to need beside model data."""

import pytest
import torch
from accelerators import ON_CUDA
from settling import BLOCKS
from torch import nn
from twins import device

import hetero


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
