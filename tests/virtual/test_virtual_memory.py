"""Capped memory, exact statistics, poison, freed storages, pinned memory."""

import mmap
from collections.abc import Callable

import pytest
import torch

from hetero.devices.virtual import (
    host_register,
    host_unregister,
    memory_limit,
    offer_slots,
    set_link,
    set_memory_limit,
    virtual_device,
    withdraw_slots,
)
from hetero.errors import ConfigError

MiB = 2**20


def allocated() -> int:
    return torch.accelerator.memory_allocated()


def peak_above(before: int) -> int:
    return torch.accelerator.max_memory_allocated() - before


def test_sizes_are_rounded_to_512_bytes_and_counted(device: torch.device) -> None:
    before = allocated()
    small, odd = torch.empty(1, device=device), torch.empty(129, device=device)
    assert allocated() - before == 512 + 1024
    assert torch.virtual.memory_allocated() == allocated()
    del small, odd
    assert allocated() == before


def test_an_operator_counts_its_output_once_and_nothing_else(device: torch.device) -> None:
    x = torch.randn(MiB // 4, device=device)
    before = allocated()
    torch.accelerator.reset_peak_memory_stats()
    y = x + 1
    assert peak_above(before) == MiB
    y.add_(x).mul_(2)
    assert peak_above(before) == MiB
    z = torch.cat([x, y])
    assert peak_above(before) == 3 * MiB
    torch.mm(x.view(512, 512), y.view(512, 512), out=x.view(512, 512).clone())
    assert peak_above(before) == 4 * MiB
    assert z.shape == (MiB // 2,)


def test_the_cap_raises_outofmemory_with_the_numbers_and_changes_nothing(device: torch.device) -> None:
    before = allocated()
    with pytest.raises(
        torch.OutOfMemoryError, match=r"tried to allocate 1\.00 GiB, .* in use of 512\.00 MiB \(.* free\)"
    ):
        torch.empty(256 * MiB, device=device)
    x = torch.ones(50 * MiB, device=device)
    with pytest.raises(torch.OutOfMemoryError):
        torch.cat([x, x])
    assert x.sum().item() == 50 * MiB
    del x
    assert allocated() == before
    assert torch.accelerator.memory_stats()["num_ooms"] >= 2


@pytest.mark.parametrize("product", [torch.bmm, lambda x, y: torch.baddbmm(x, x, y)])
def test_a_product_that_finds_no_memory_fails_and_the_next_one_has_the_same_bits(
    device: torch.device, product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> None:
    x = torch.randn(8, 64, 64, device=device, dtype=torch.bfloat16)
    y = torch.randn(64, 64, device=device, dtype=torch.bfloat16).expand(8, 64, 64)
    expected = product(x, y).cpu()
    refused = 0
    # With room for the result, and not for what oneDNN copies, ATen would switch that off in the whole process.
    for room in range(x.nbytes, 4 * x.nbytes, x.nbytes // 2):
        set_memory_limit(allocated() + room)
        try:
            got = product(x, y).cpu()
        except torch.OutOfMemoryError:
            refused += 1
        else:
            assert torch.equal(got, expected)
        finally:
            set_memory_limit("512MiB")
        assert torch.backends.mkldnn.enabled
    assert refused < 6
    assert torch.equal(product(x, y).cpu(), expected)


def test_memory_is_nan_when_fresh_and_when_reused(device: torch.device) -> None:
    x = torch.empty(1000, device=device)
    assert x.isnan().all()
    x.fill_(3)
    del x
    assert torch.empty(1000, device=device).isnan().all()
    assert torch.empty(1000, device=device, dtype=torch.bfloat16).isnan().all()
    assert (torch.empty(1000, device=device, dtype=torch.int64) == -1).all()


def test_the_limit_can_move_but_not_below_what_is_allocated(device: torch.device) -> None:
    x = torch.empty(2 * MiB, device=device)
    with pytest.raises(ConfigError, match=r"below the .* allocated: free tensors first"):
        virtual_device("1MiB")
    assert memory_limit() == 512 * MiB
    set_memory_limit("64MiB")
    free, total = torch.accelerator.get_memory_info()
    assert total == 64 * MiB
    assert free == 64 * MiB - allocated()
    assert torch.virtual.mem_get_info() == (free, total)
    torch.virtual.set_per_process_memory_fraction(0.5)
    assert memory_limit() == 32 * MiB
    assert torch.virtual.get_per_process_memory_fraction() == 0.5
    # As on CUDA, where a cap on the process does not make the device smaller.
    assert torch.virtual.mem_get_info()[1] == 64 * MiB
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(8 * MiB, device=device)
    torch.virtual.set_per_process_memory_fraction(1.0)
    assert memory_limit() == 64 * MiB
    assert x.numel() == 2 * MiB


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: virtual_device("20G"), "ambiguous"),
        (lambda: virtual_device("0B"), "some memory"),
        (lambda: virtual_device(bandwidth="fast"), "bytes per second"),
        (lambda: set_link(bandwidth=0), "positive"),
        (lambda: set_link(latency="-1us"), "expected a number"),
        (lambda: host_register(4096, 0), "positive"),
        (lambda: host_unregister(4096), "never registered"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(device: torch.device, call: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call()  # type: ignore[operator]


def test_a_freed_storage_gives_its_memory_back_and_raises_when_used(device: torch.device) -> None:
    x = torch.arange(4.0, device=device)
    before = allocated()
    x.untyped_storage().resize_(0)
    assert allocated() == before - 512
    uses = [
        lambda: x.sum(),
        lambda: x + 1,
        lambda: x.cpu(),
        lambda: x.clone(),
        lambda: x.copy_(torch.ones(4)),
        lambda: x[1].item(),
        lambda: x.view(2, 2) @ torch.ones(2, 2, device=device),
    ]
    for use in uses:
        with pytest.raises(
            RuntimeError, match=r"tensor Float.* freed by resize_|out of bounds for storage of size 0"
        ):
            use()


def test_a_storage_grows_with_its_content_and_a_poisoned_tail(device: torch.device) -> None:
    x = torch.arange(4.0, device=device)
    storage = x.untyped_storage()
    storage.resize_(32)
    whole = torch.tensor([], device=device).set_(storage)
    assert torch.equal(whole[:4].cpu(), torch.arange(4.0))
    assert whole[4:].isnan().all()
    storage.resize_(0)
    storage.resize_(16)
    assert x.isnan().all()


def test_pinned_memory_is_recognised_and_ordinary_memory_is_not(device: torch.device) -> None:
    pinned = torch.randn(10).pin_memory()
    assert pinned.is_pinned()
    assert pinned[3:].is_pinned()
    assert torch.empty(3, pin_memory=True).is_pinned()
    assert not torch.empty(3).is_pinned()


def test_registered_memory_is_pinned_until_it_is_unregistered(device: torch.device) -> None:
    memory = torch.frombuffer(mmap.mmap(-1, MiB), dtype=torch.float32)
    assert not memory.is_pinned()
    host_register(memory.data_ptr(), MiB)
    assert memory.is_pinned()
    assert memory[1000:2000].is_pinned()
    with pytest.raises(ConfigError, match="already pinned"):
        host_register(memory.data_ptr() + 512, 4096)
    host_unregister(memory.data_ptr())
    assert not memory.is_pinned()


def test_a_recorded_stream_keeps_the_memory_until_it_has_passed(slow_device: torch.device) -> None:
    x = torch.randn(MiB, device=slow_device)
    host = torch.empty(MiB, pin_memory=True)
    down = torch.Stream(slow_device)
    down.wait_stream(torch.accelerator.current_stream())
    with down:
        host.copy_(x, non_blocking=True)
    before = allocated()
    x.record_stream(down)
    del x
    assert allocated() == before
    down.synchronize()
    assert allocated() == before - 4 * MiB


def test_what_a_recorded_stream_waited_for_keeps_the_memory_too(slow_device: torch.device) -> None:
    x = torch.randn(MiB, device=slow_device)
    host = torch.empty(MiB, pin_memory=True)
    down, other = torch.Stream(slow_device), torch.Stream(slow_device)
    down.wait_stream(torch.accelerator.current_stream())
    with down:
        host.copy_(x, non_blocking=True)
    other.wait_stream(down)
    before = allocated()
    x.record_stream(other)
    del x
    assert allocated() == before
    other.synchronize()
    assert allocated() == before - 4 * MiB


def test_an_offered_slot_is_handed_out_once_and_costs_no_memory(device: torch.device) -> None:
    base = torch.empty(MiB, dtype=torch.uint8, device=device)
    first, before = base.data_ptr(), allocated()
    offer_slots(first, [(512, 4000, 0), (8192, 4000, 0)])
    x = torch.full((1000,), 3.0, device=device)
    y = x + 1
    z = y * 2  # no slot is left
    assert (x.data_ptr() - first, y.data_ptr() - first) == (512, 8192)
    assert allocated() - before == 4096
    assert withdraw_slots() == {x.data_ptr(), y.data_ptr()}
    assert torch.equal(z.cpu(), torch.full((1000,), 8.0))
    del base, y  # a slot in use keeps the memory that it lies in
    assert torch.equal(x.cpu(), torch.full((1000,), 3.0))
    assert withdraw_slots() == set()


def test_an_offer_passes_over_earlier_allocations_and_other_sizes(device: torch.device) -> None:
    base = torch.empty(MiB, dtype=torch.uint8, device=device)
    offer_slots(base.data_ptr(), [(0, 4000, 1)])
    made = [torch.empty(count, device=device) for count in (1000, 999, 1000, 1000)]
    inside = [base.data_ptr() <= t.data_ptr() < base.data_ptr() + MiB for t in made]
    assert inside == [False, False, True, False]
    address = made[2].data_ptr()
    del made
    assert address not in withdraw_slots()


def test_what_is_withdrawn_is_not_taken(device: torch.device) -> None:
    base = torch.empty(MiB, dtype=torch.uint8, device=device)
    offer_slots(base.data_ptr(), [(0, 4000, 0)])
    assert withdraw_slots() == set()
    assert torch.empty(1000, device=device).data_ptr() != base.data_ptr()


def test_slots_outside_a_block_are_refused(device: torch.device) -> None:
    base = torch.empty(MiB, dtype=torch.uint8, device=device)
    with pytest.raises(ConfigError, match="not within the block"):
        offer_slots(base.data_ptr(), [(MiB - 512, 1024, 0)])
    with pytest.raises(ConfigError, match="no device block begins"):
        offer_slots(base.data_ptr() + 512, [(0, 512, 0)])
    withdraw_slots()
