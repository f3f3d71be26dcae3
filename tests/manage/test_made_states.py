"""States that the optimizer makes anew in the middle of training: the same numbers, within the budget."""

import pytest
import torch
from accelerators import ON_CUDA, STEPS_AT_HOME
from loops import losses, mlp
from twins import assert_same, managed, unmanaged

from hetero.stm.updates.kernels import as_if_managed

pytestmark = pytest.mark.usefixtures("homes_on_device")

PLENTY = 64 << 20


def pop(optimizer):
    for parameter in optimizer.param_groups[0]["params"][::2]:
        optimizer.state.pop(parameter, None)


def empty(optimizer):
    for parameter in optimizer.param_groups[0]["params"][::2]:
        optimizer.state[parameter].clear()


def turn_on_momentum(optimizer):
    for group in optimizer.param_groups:
        group["momentum"] = 0.9


# -- where everything fits -----------------------------------------------------------------------------


def with_chosen_kernels(optimizer):
    """Unmanaged, with those that are chosen for managed steps where the user leaves it open."""
    inner = optimizer.step

    def step():
        with as_if_managed(optimizer):
            inner()

    optimizer.step = step
    return optimizer


@pytest.mark.skipif(ON_CUDA, reason=STEPS_AT_HOME)
@pytest.mark.parametrize(
    ("momentum", "changes"), [(0.9, [pop]), (0.9, [empty]), (0.0, [turn_on_momentum, pop])]
)
def test_momentum_that_some_parameters_lack_is_made_as_at_home(momentum, changes):
    """Fused kernels take it for all parameters of a call or for none."""

    def loop(model, optimizer, target):
        seen = losses(model, optimizer, target, 7)
        for change in changes:
            change(optimizer)
            seen += losses(model, optimizer, target, 2)
        return seen

    def make_optimizer(model):
        return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=momentum)

    expected, parameters, _ = unmanaged(mlp, loop, lambda model: with_chosen_kernels(make_optimizer(model)))
    got, state, manager = managed(mlp, loop, PLENTY, make_optimizer)
    assert_same(got, expected, "losses")
    assert_same(state, parameters, "parameters")
    assert manager.stats.settled_forwards >= 6
