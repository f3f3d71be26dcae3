"""Memory in segments: the numbers of the simulated caching allocator, on tensors of a device."""

import gc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hetero
from hetero.devices import virtual
from hetero.errors import BudgetError
from hetero.pool.allocators import CudaCachingAllocator

KIB, MIB = 1 << 10, 1 << 20
SIZES = st.one_of(st.integers(1, 4 * KIB), st.integers(1, 2 * MIB), st.integers(1, 13 * MIB))
# Take so much, give back the n-th of what is held, or drop what is cached.
ACTIONS = st.lists(st.one_of(SIZES, st.integers(-20, -1), st.just(0)), max_size=40)
MEMORY = 70 * MIB


@pytest.fixture(scope="module")
def device():
    return hetero.virtual_device(memory="256MiB")


@given(actions=ACTIONS)
def test_segments_and_blocks_are_those_of_the_simulated_allocator(device, actions):
    gc.collect()
    apart = torch.virtual.memory_allocated()
    virtual.set_memory_limit(apart + MEMORY)
    virtual.set_in_segments(True)
    torch.virtual.empty_cache()
    simulated, held = CudaCachingAllocator(device_nbytes=MEMORY), {}
    try:
        for number, action in enumerate(actions):
            if action > 0:
                try:
                    simulated.allocate(number, action)
                except BudgetError:
                    with pytest.raises(torch.OutOfMemoryError):
                        torch.empty(action, dtype=torch.uint8, device=device)
                else:
                    held[number] = torch.empty(action, dtype=torch.uint8, device=device)
            elif action == 0:
                simulated.empty_cache()
                torch.virtual.empty_cache()
            elif held:
                name = sorted(held)[action % len(held)]
                simulated.free(name)
                del held[name]
            assert torch.virtual.memory_allocated() - apart == simulated.provided
            assert torch.virtual.memory_reserved() - apart == simulated.reserved
            large = [tensor.nbytes for tensor in held.values() if tensor.nbytes > 1 << 20]
            stats = torch.virtual.memory_stats()
            assert stats["requested_bytes.large_pool.current"] == sum(large)
            more = stats["allocated_bytes.large_pool.current"] - sum(large)
            assert 0 <= more <= len(large) * ((1 << 20) + 511)  # to 512 bytes, and what is not split
            free, total = torch.virtual.mem_get_info()
            assert total - free == apart + simulated.reserved
    finally:
        held.clear()
        virtual.set_in_segments(False)
        virtual.set_memory_limit("256MiB")


def test_a_stream_has_segments_of_its_own(device):
    virtual.set_in_segments(True)
    try:
        torch.virtual.empty_cache()
        before = torch.virtual.memory_reserved()
        side = torch.Stream(device=device)
        kept = torch.empty(12 * MIB, dtype=torch.uint8, device=device)
        del kept
        with side:
            other = torch.empty(12 * MIB, dtype=torch.uint8, device=device)
        assert torch.virtual.memory_reserved() - before == 24 * MIB
        del other
    finally:
        torch.virtual.empty_cache()
        virtual.set_in_segments(False)
    assert torch.virtual.memory_reserved() == torch.virtual.memory_allocated()


def test_a_limit_below_what_is_reserved_refuses_new_segments_only(device):
    virtual.set_in_segments(True)
    try:
        held = torch.empty(MIB // 2, dtype=torch.uint8, device=device)
        virtual.set_memory_limit(KIB)
        beside = torch.empty(MIB, dtype=torch.uint8, device=device)
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(MIB, dtype=torch.uint8, device=device)
        with pytest.raises(hetero.ConfigError, match="above the limit"):
            virtual.set_in_segments(False)
        del held, beside
    finally:
        virtual.set_memory_limit("256MiB")
        virtual.set_in_segments(False)
