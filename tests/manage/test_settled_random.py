"""Random loops under a budget that holds everything: settled or not, in and out, the same numbers."""

import gc

import pytest
import torch
from accelerators import races
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from loops import ACTIONS, losses, mixed_loop, mlp
from twins import adamw, assert_same, managed, unmanaged

pytestmark = pytest.mark.usefixtures("homes_on_device")

# A second optimizer keeps parameters at home: `test_settled_changes` has one.
_ACTIONS = tuple(sorted(set(ACTIONS) - {"other step"}))
_PLENTY = 64 << 20


def fused_adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def open_adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def settling(actions):
    """The loop after, and before, some iterations of the plain kind: by the first of them it is settled."""

    def loop(model, optimizer, target):
        before = losses(model, optimizer, target, 6)
        between = mixed_loop(actions)(model, optimizer, target)
        optimizer.zero_grad()
        for p in model.parameters():
            p.requires_grad_(True)
        return [*before, between, *losses(model, optimizer, target, 6)]

    return loop


@settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    actions=st.lists(st.sampled_from(_ACTIONS), min_size=1, max_size=14),
    kernels=st.sampled_from([(adamw, adamw), (fused_adamw, fused_adamw), (open_adamw, fused_adamw)]),
)
def test_loops_that_mix_everything(actions, kernels):
    make, reference = kernels
    loop = settling(actions)
    seen, state, _ = unmanaged(lambda: mlp(depth=1), loop, reference)
    got, got_state, manager = managed(lambda: mlp(depth=1), loop, _PLENTY, make)
    assert_same(got, seen, "observed")
    assert_same(got_state, state, "state")
    assert manager.stats.settled_forwards >= 2
    assert races() == []
    gc.collect()
