"""Runs the same loop unmanaged and managed on the accelerator, and compares every number.

A loop is a function ``loop(model, optimizer, device) -> observations``; observations are tensors, numbers, or
nested lists of them. Equal means `bits.same_bits`.
"""

import gc
from collections.abc import Callable
from typing import Any

import torch
from accelerators import GAPS, ON_CUDA, clear_races, device, races
from bits import same_bits
from torch import nn

import hetero

Build = Callable[[], nn.Module]
Loop = Callable[[nn.Module, torch.optim.Optimizer, torch.device], Any]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    # The host and the device default to different implementations; compare one with itself.
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, foreach=False)


def unmanaged(
    build: Build, loop: Loop, make_optimizer: Callable[[nn.Module], Any] = adamw
) -> tuple[Any, list[torch.Tensor], int]:
    """Observations, final parameters and buffers, and the peak of device memory."""
    target = device()
    gc.collect()
    torch.manual_seed(0)
    model = build().to(target)
    torch.accelerator.reset_peak_memory_stats()
    base = torch.accelerator.memory_allocated()
    torch.manual_seed(1)
    seen = plain(loop(model, make_optimizer(model), target))
    peak = torch.accelerator.max_memory_allocated()
    state = [t.detach().cpu() for t in (*model.parameters(), *model.buffers())]
    del model, base
    gc.collect()
    return seen, state, peak


def at_home(build: Build, loop: Loop, make_optimizer: Callable[[nn.Module], Any] = adamw) -> Any:
    """Observations on the host, where homes and their updates are: no device takes part, unless its kernels round
    otherwise; then only updates are the host's (`StepsAtHome`)."""
    if ON_CUDA:
        return unmanaged(build, loop, make_optimizer)[0]
    torch.manual_seed(0)
    model = build()
    optimizer = make_optimizer(model)
    torch.manual_seed(1)
    return plain(loop(model, optimizer, torch.device("cpu")))


def managed(
    build: Build,
    loop: Loop,
    budget: int,
    make_optimizer: Callable[[nn.Module], Any] = adamw,
    link: dict[str, str] | None = None,
    **keywords: Any,
) -> tuple[Any, list[torch.Tensor], hetero.Manager]:
    """As `unmanaged`; asserts the budget, no race and nothing left on the device."""
    target = device(**(link or {}))
    gc.collect()
    clear_races()
    torch.manual_seed(0)
    model = build()
    optimizer = make_optimizer(model)
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    manager = hetero.manage(model, optimizer, device=target, device_budget=before + budget, **keywords)
    torch.manual_seed(1)
    try:
        seen = plain(loop(model, optimizer, target))
        assert torch.accelerator.max_memory_allocated() <= before + budget + GAPS
        assert manager.stats.peak_device_bytes <= before + budget + GAPS
        assert_counted(manager)
    finally:
        manager.close()
    state = [t.detach().cpu() for t in (*model.parameters(), *model.buffers())]
    for parameter in model.parameters():
        assert type(parameter) is nn.Parameter
        assert not parameter.is_pinned()
    assert races() == []
    return seen, state, manager


def assert_twins(
    build: Build,
    loop: Loop,
    *,
    share: float = 0.6,
    budget: int | None = None,
    make_optimizer: Callable[[nn.Module], Any] = adamw,
    bandwidth: str = "4GiB/s",
    latency: str = "10us",
    **keywords: Any,
) -> hetero.Manager:
    """Same observations, same parameters, under a budget of ``share`` of the unmanaged peak."""
    seen, state, peak = unmanaged(build, loop, make_optimizer)
    link = {"bandwidth": bandwidth, "latency": latency}
    got, got_state, manager = managed(
        build, loop, budget or int(share * peak), make_optimizer, link=link, **keywords
    )
    assert_same(got, seen, "observed")
    assert_same(got_state, state, "state")
    return manager


def assert_counted(manager: hetero.Manager) -> None:
    """What is counted as it comes and goes is what counting all of it gives."""
    residency, kept = manager._stm.residency, manager._stm.gradients.kept
    living = [tensor for tensor in residency.resident.values() if tensor.stays]
    assert residency._living == {tensor.index: tensor.living_nbytes for tensor in living}
    assert residency.living_bytes == sum(residency._living.values())
    assert kept.nbytes == sum(manager._stm.tensors[index].full_nbytes for index in kept.indices())
    gradients, activations = manager._stm.gradients._memory, manager._stm.activations
    assert gradients.whole_bytes == sum(manager._stm.tensors[x].device_nbytes for x in gradients._entries)
    activations.close_gone()
    accounts = [account for account in activations._live.values() if not account.is_retired]
    assert activations.whole_bytes == sum(account.device_nbytes for account in accounts)


def plain(value: Any) -> Any:
    """A detached copy on the host."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone().cpu().as_subclass(torch.Tensor)
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def assert_same(got: Any, expected: Any, where: str) -> None:
    if isinstance(expected, torch.Tensor):
        assert isinstance(got, torch.Tensor), where
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape), where
        if not same_bits(got, expected):
            raise AssertionError(f"{where}: {(got.double() - expected.double()).abs().max()} apart")
    elif isinstance(expected, list):
        assert len(got) == len(expected), where
        for index, (a, b) in enumerate(zip(got, expected, strict=True)):
            assert_same(a, b, f"{where}[{index}]")
    else:
        assert got == expected, where
