"""Every wait of the stream discipline is needed, and the race detector misses none of them."""

import gc

import pytest
import torch
from accelerators import ON_CUDA
from loops import mlp, train
from racing import listening
from twins import adamw, device

import hetero
from hetero.devices import Wait, virtual
from hetero.errors import StreamRaceError

pytestmark = pytest.mark.skipif(ON_CUDA, reason="only the virtual accelerator detects races")


def run(left_out: frozenset[Wait], *, steps: int = 3) -> str:
    """Train with waits left out; what the detector said, or ''."""
    # A slow link, so that copies are still pending when somebody forgets to wait.
    target = device(bandwidth="256MiB/s", latency="50us")
    gc.collect()
    virtual.clear_races()
    torch.manual_seed(0)
    model = mlp(depth=3)
    optimizer = adamw(model)
    budget = torch.accelerator.memory_allocated() + (420 << 10)
    manager = hetero.manage(model, optimizer, device=target, device_budget=budget)
    manager._stm.engine.left_out = left_out
    with listening(manager) as said:
        train(model, optimizer, target, steps)
    return said.text


@pytest.mark.parametrize("wait", [w for w in Wait if w is not Wait.HOST_AFTER_UP])
def test_a_missing_wait_is_a_race_every_time(wait):
    for _ in range(3):
        assert "stream" in run(frozenset({wait}))


def test_with_all_waits_there_is_no_race():
    assert run(frozenset(), steps=5) == ""


@pytest.mark.parametrize("left_out", [False, True])
def test_a_home_is_not_written_while_a_copy_reads_it(left_out):
    target = device(bandwidth="64MiB/s", latency="1ms")
    virtual.clear_races()
    model = mlp(depth=1)
    before = [p.detach().clone() for p in model.parameters()]
    budget = torch.accelerator.memory_allocated() + (1 << 20)
    manager = hetero.manage(model, None, device=target, device_budget=budget)
    stm = manager._stm
    assert stm.residency.prefetch(stm.tensors[0], limit=budget)  # a copy that no operator ever waits for
    if left_out:
        stm.engine.left_out = frozenset({Wait.HOST_AFTER_UP})
        with pytest.raises(StreamRaceError, match="host"):
            stm.residency.uploads.wait_all()
        stm.engine.left_out = frozenset()
    else:
        stm.residency.uploads.wait_all()
    torch.accelerator.synchronize()
    virtual.clear_races()
    manager.close()
    assert [torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True)] == [True] * len(
        before
    )
