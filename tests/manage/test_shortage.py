"""A budget that is too small is told one that is not."""

import gc
from types import SimpleNamespace

import pytest
import torch
from accelerators import GAPS
from backward_ends import wait_for_backward_ends
from torch import nn
from twins import adamw, device

import hetero
from hetero.devices import Accelerator
from hetero.stm.copies.shortage import least_bytes, no_room

WIDTH, ROWS = 128, 512
BUDGET = 3 << 20


def job():
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())])
    return model, adamw(model)


def steps(model, optimizer, target, count):
    for _ in range(count):
        model(torch.randn(ROWS, WIDTH).to(target)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def named(error):
    """The number of bytes that the message ends with."""
    return int(str(error.value).split("(")[-1].split(" bytes")[0])


def error_beside(held, target):
    model, optimizer = job()
    with hetero.manage(model, optimizer, device=target, device_budget=BUDGET, device_homes=False) as manager:
        steps(model, optimizer, target, 4)
        # Copies that the last step's updates have renewed by now would be no operands to make room for.
        manager._stm.home_access.finish_updates()
        manager._stm.relief.relieve()
        theirs = torch.zeros(held, dtype=torch.uint8, device=target)
        with pytest.raises(hetero.BudgetError, match=r"at least .* for operands") as error:
            steps(model, optimizer, target, 1)
        least = named(error)
    wait_for_backward_ends(target)
    return theirs, least


SHORT = pytest.mark.parametrize("short", [100 << 10, 20 << 10])


@SHORT
def test_what_was_measured_trains_with_the_budget_that_the_message_names(short):
    target = device()
    gc.collect()
    theirs, least = error_beside(BUDGET - torch.accelerator.memory_allocated() - short, target)
    gc.collect()
    model, optimizer = job()
    with hetero.manage(model, optimizer, device=target, device_budget=least):
        steps(model, optimizer, target, 4)
    del theirs


@pytest.mark.skipif(GAPS > 0, reason="a budget below the size of a segment refuses nothing there")
@SHORT
def test_that_budget_is_hardly_more_than_it_must_be(short):
    target = device()
    gc.collect()
    theirs, least = error_beside(BUDGET - torch.accelerator.memory_allocated() - short, target)
    gc.collect()
    # Without two of the activations, where one can be done without (what backward begins with finds room when it
    # fails), there is no room for what operators allocate.
    model, optimizer = job()
    with (
        hetero.manage(model, optimizer, device=target, device_budget=least - 2 * ROWS * WIDTH * 4),
        pytest.raises((hetero.BudgetError, torch.OutOfMemoryError)),
    ):
        steps(model, optimizer, target, 4)
    del theirs


def test_where_nothing_was_measured_the_message_says_that_its_number_is_not_enough():
    target = device()
    gc.collect()
    base = torch.accelerator.memory_allocated()
    model, optimizer = job()
    theirs = torch.zeros((256 << 10) - base, dtype=torch.uint8, device=target)
    x = torch.randn(ROWS, WIDTH).to(target)
    with (
        hetero.manage(model, optimizer, device=target, device_budget=256 << 10),
        pytest.raises(hetero.BudgetError, match=r"more than .* comes on top.*hetero plan") as error,
    ):
        model(x)
    allocated = torch.accelerator.memory_allocated()
    assert named(error) >= allocated + model[0].weight.nbytes + model[0].bias.nbytes
    del theirs


@pytest.mark.parametrize(
    ("tried", "asked"),
    [("2.00 MiB", 512), ("20.00 MiB", 1 << 20), ("22.00 MiB", 20 << 20), ("1.50 GiB", (1536 - 2) << 20)],
)
def test_of_cudas_allocator_it_is_known_what_was_asked_for_at_least(tried, asked):
    # It names the segment that it has tried to have, and a budget that has room for the tensor is not passed by it.
    accelerator = Accelerator.__new__(Accelerator)
    accelerator.device = torch.device("cuda", 0)
    accelerator.used_bytes = lambda: 3 << 20
    error = torch.OutOfMemoryError(
        f"CUDA out of memory. Tried to allocate {tried}. GPU 0 has a total capacity of 139.81 GiB of which 139.00 GiB "
        "is free. 4.00 MiB allowed; Of the allocated memory 3.00 MiB is allocated by PyTorch, and 1.00 MiB is reserved "
        "by PyTorch but unallocated."
    )
    assert least_bytes(accelerator, error) == (3 << 20) + asked


@pytest.mark.parametrize("used", [1184890, 1179700, 1188000])
def test_where_memory_has_no_gaps_what_was_refused_is_beyond_the_budget_though_digits_are_rounded(used):
    # In use now: nothing, for the operator has given back what it had.
    accelerator = SimpleNamespace(device=torch.device("cpu"), used_bytes=lambda: 0, leaves_gaps=False)
    wanted = 144 << 10
    budget = used + wanted - 1
    error = torch.OutOfMemoryError(
        f"out of memory: tried to allocate 144.00 KiB, {used / (1 << 20):.2f} MiB in use of 1.27 MiB"
    )
    told = no_room(accelerator, budget, "matmul", error, held=0, saved=0, others=0, enough=None)
    assert "for this operator alone" in str(told)
    assert (
        int(str(told).split("raise device_budget to more than")[1].split("(")[1].split(" bytes")[0]) > budget
    )
