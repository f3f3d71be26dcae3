"""Every wait that orders a saved tensor's way out and back is needed, and the race detector misses none of them."""

import gc

import pytest
import torch
from accelerators import ON_CUDA
from blocks import ROWS, WIDTH, deep, shed_all
from racing import listening
from twins import device

import hetero
from hetero.devices import Wait, virtual

pytestmark = pytest.mark.skipif(ON_CUDA, reason="only the virtual accelerator detects races")


def run(left_out: frozenset[Wait]) -> str:
    """Let all saved tensors leave and come back with waits left out; what the detector said, or ''."""
    target = device(bandwidth="512MiB/s", latency="20us")
    gc.collect()
    virtual.clear_races()
    torch.manual_seed(0)
    model = deep(3).requires_grad_(False)  # no gradient of a parameter, whose copies would race as well
    manager = hetero.manage(model, device=target, device_budget="32MiB", device_homes=False)
    with listening(manager) as said:
        three_turns(model, manager, target, left_out)
    return said.text


def three_turns(model, manager, target, left_out):
    for turn in range(3):  # the second has a plan, under which everything is resident and stays
        x = torch.randn(ROWS, WIDTH).to(target).requires_grad_()
        loss = model(x).square().sum()
        if turn == 2:
            manager._stm.engine.left_out = left_out
            assert shed_all(manager) > 0
            for _ in range(8):
                torch.ones(ROWS, 2 * WIDTH, device=target)  # written where saved tensors were
        loss.backward()
        torch.accelerator.synchronize()


@pytest.mark.parametrize(
    "wait",
    [
        Wait.DOWN_AFTER_COMPUTE,
        Wait.FREE_AFTER_DOWN,
        Wait.UP_AFTER_ALLOCATION,
        Wait.COMPUTE_AFTER_UP,
    ],
)
def test_a_missing_wait_is_a_race_every_time(wait):
    for _ in range(2):
        assert "stream" in run(frozenset({wait}))


def test_with_all_waits_there_is_no_race():
    assert run(frozenset()) == ""
