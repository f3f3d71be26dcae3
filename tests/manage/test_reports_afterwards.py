"""What a manager tells after it is closed is what it told before; a picture's name says its format."""

import pytest
import torch
from equality import fresh_memory
from loops import losses, mlp
from twins import device

import hetero


def test_the_plan_of_a_closed_manager_still_says_what_stepped_where():
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    manager = hetero.manage(model, optimizer, device=device(), device_budget="768KiB", device_homes=False)
    losses(model, optimizer, manager.device, 4)
    before = manager.plan
    manager.close()
    after = manager.plan
    assert before is not None
    assert after is not None
    assert (after.host_kernels, after.lives_at_home) == (before.host_kernels, before.lives_at_home)
    assert before.host_kernels[0].fused == len(list(model.parameters()))


def test_a_picture_with_another_ending_is_refused(tmp_path):
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    with hetero.manage(model, optimizer, device=device(), device_budget="768KiB") as manager:
        losses(model, optimizer, manager.device, 2)
        with pytest.raises(hetero.ConfigError, match=r"\.png, \.svg, \.pdf"):
            manager.plot(str(tmp_path / "memory.xyz"))
        manager.plot(str(tmp_path / "memory.SVG"))
    assert (tmp_path / "memory.SVG").stat().st_size > 0


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
