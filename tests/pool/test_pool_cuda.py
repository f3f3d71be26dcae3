"""The simulated caching allocator against the one in torch.cuda, segment by segment; needs a GPU."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from hetero.pool.allocators import AllocationEvent, CachingSettings, CudaCachingAllocator, simulate

MIB = 2**20

# Runs in a process of its own: the settings are read once, and the allocator must be fresh.
REPLAY = """
import json, sys, torch
events = json.load(sys.stdin)
torch.cuda.init()
held, rows, addresses = {}, [], []
for action, name, nbytes in events:
    if action == "alloc":
        held[name] = torch.cuda.memory.caching_allocator_alloc(nbytes, 0)
    else:
        torch.cuda.memory.caching_allocator_delete(held.pop(name))
    rows.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    if len(rows) < 2 or rows[-1][1] > rows[-2][1]:
        addresses += {s["address"] for s in torch.cuda.memory_snapshot()} - set(addresses)
segments = [
    (s["total_size"], [(b["size"], b["state"] == "active_allocated") for b in s["blocks"]])
    for s in torch.cuda.memory_snapshot()
]
print(json.dumps({"rows": rows, "segments": segments, "addresses": addresses}))
"""

SETTINGS = {
    "": CachingSettings(),
    "max_split_size_mb:64": CachingSettings(max_split_size=64 * MIB),
    "roundup_power2_divisions:4": CachingSettings(roundup_power2_divisions=4),
    "expandable_segments:True": CachingSettings(expandable_segments=True),
}


class Placed(CudaCachingAllocator):
    """Its segments lie where the driver has put them: of equal blocks torch takes the one with the lowest address."""

    def __init__(self, settings, addresses):
        super().__init__(settings)
        self._addresses = iter(addresses)

    def _take_addresses(self, nbytes):
        return next(self._addresses)


def random_events(seed):
    """Small, medium and large requests, all of different sizes, unless they are rounded up."""
    rng = np.random.default_rng(seed)
    ranges = [(1, MIB), (MIB, 10 * MIB), (10 * MIB, 90 * MIB)]
    sizes = np.unique(np.concatenate([rng.integers(low, high, 100) for low, high in ranges]))
    rng.shuffle(sizes)
    live, events = [], []
    for name, nbytes in enumerate(sizes.tolist()):
        events.append(AllocationEvent(action="alloc", id=name, nbytes=nbytes))
        live.append((name, nbytes))
        while len(live) > 30 or (live and rng.random() < 0.45):
            gone, freed = live.pop(int(rng.integers(len(live))))
            events.append(AllocationEvent(action="free", id=gone, nbytes=freed))
    return events


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("conf", SETTINGS)
def test_the_simulation_is_torch_s_allocator_segment_by_segment(conf, seed):
    events = random_events(seed)
    done = subprocess.run(
        [sys.executable, "-c", REPLAY],
        input=json.dumps([(e.action, e.id, e.nbytes) for e in events]),
        env={**os.environ, "PYTORCH_CUDA_ALLOC_CONF": conf},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    real = json.loads(done.stdout)
    expandable = SETTINGS[conf].expandable_segments
    allocator = (
        CudaCachingAllocator(SETTINGS[conf]) if expandable else Placed(SETTINGS[conf], real["addresses"])
    )
    usage = simulate(events, allocator)
    rows = list(zip(usage.provided.tolist(), usage.reserved.tolist(), strict=True))
    assert [tuple(row) for row in real["rows"]] == rows
    if not expandable:  # those are listed by mapped ranges, not by segments
        expected = sorted((total, [tuple(block) for block in blocks]) for total, blocks in real["segments"])
        assert sorted((total, list(blocks)) for total, blocks in allocator.segments) == expected


def test_the_events_reach_every_kind_of_segment():
    # What the comparison is worth: both pools, splits, reuse.
    allocator = CudaCachingAllocator()
    usage = simulate(random_events(0), allocator)
    totals = [total for total, _ in allocator.segments]
    assert 2 * MIB in totals
    assert 20 * MIB in totals
    assert max(totals) > 20 * MIB
    assert any(len(blocks) > 2 for _, blocks in allocator.segments)
    assert usage.peak_reserved < sum(e.nbytes for e in random_events(0) if e.action == "alloc") / 4
