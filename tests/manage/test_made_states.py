"""States that the optimizer makes anew in the middle of training: the same numbers, within the budget."""

import pytest
import torch
from accelerators import ON_CUDA, STEPS_AT_HOME
from loops import losses, mlp
from residents import living, managed_mlp
from twins import adamw, assert_same, assert_twins, managed, unmanaged

from hetero.cli.jobs import as_if_managed

pytestmark = pytest.mark.usefixtures("homes_on_device")

PLENTY = 64 << 20


def pop(optimizer):
    for parameter in optimizer.param_groups[0]["params"][::2]:
        optimizer.state.pop(parameter, None)


def empty(optimizer):
    for parameter in optimizer.param_groups[0]["params"][::2]:
        optimizer.state[parameter].clear()


def empty_all(optimizer):
    for entry in optimizer.state.values():
        entry.clear()


def clear(optimizer):
    optimizer.state.clear()


def turn_on_momentum(optimizer):
    optimizer.param_groups[0]["momentum"] = 0.9


def turn_off_momentum(optimizer):
    optimizer.param_groups[0]["momentum"] = 0.0


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=1e-2, foreach=False)


def fused_adam(model):
    return torch.optim.Adam(model.parameters(), lr=1e-2, fused=True)


# -- memory --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "share", [0.55, 0.7, 0.8, 0.9]
)  # the last of SGD is enough for all, without momentum
@pytest.mark.parametrize(
    ("make_optimizer", "change"),
    [
        (adamw, clear),
        (adamw, empty_all),
        (fused_adam, clear),
        (fused_adam, empty_all),
        (sgd, turn_on_momentum),
    ],
)
def test_there_is_room_for_them(make_optimizer, change, share):
    """Whether parameters live on the device when their states go, or would all fit there without them."""

    def loop(model, optimizer, target):
        seen = losses(model, optimizer, target, 5)
        change(optimizer)
        return seen + losses(model, optimizer, target, 7)

    assert_twins(mlp, loop, share=share, make_optimizer=make_optimizer)


@pytest.mark.parametrize(
    ("make_optimizer", "change"), [(adamw, empty_all), (fused_adam, empty_all), (sgd, turn_on_momentum)]
)
def test_they_are_made_at_home_and_follow_the_parameters(make_optimizer, change):
    model, optimizer, manager, target = managed_mlp(budget="1100KiB", make_optimizer=make_optimizer)
    manager._stm.settled.forbid()
    with manager:
        losses(model, optimizer, target, 6)
        assert living(manager)
        change(optimizer)
        losses(model, optimizer, target, 1)
        assert not living(manager)
        losses(model, optimizer, target, 6)
        assert living(manager)


@pytest.mark.parametrize("change", [clear, empty_all])
def test_no_homes_are_chosen_before_they_are_made(change):
    """Where something else has homes chosen anew just then: updates that begin in backward from there on."""
    model, optimizer, manager, target = managed_mlp(budget="1100KiB")
    manager._stm.settled.forbid()
    early = False
    with manager:
        manager._stm.home_choice.updates_early = lambda: early
        losses(model, optimizer, target, 6)
        assert living(manager)
        change(optimizer)
        early = True
        losses(model, optimizer, target, 1)
        assert not living(manager)
        losses(model, optimizer, target, 6)
        assert living(manager)


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
@pytest.mark.parametrize("changes", [[pop], [empty], [turn_off_momentum, pop, turn_on_momentum]])
def test_momentum_that_some_parameters_lack_is_made_as_at_home(changes):
    """Fused kernels take it for all parameters of a call or for none."""

    def loop(model, optimizer, target):
        seen = losses(model, optimizer, target, 7)
        for change in changes:
            change(optimizer)
            seen += losses(model, optimizer, target, 2)
        return seen

    def make_optimizer(model):
        return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)

    expected, parameters, _ = unmanaged(mlp, loop, lambda model: with_chosen_kernels(make_optimizer(model)))
    got, state, manager = managed(mlp, loop, PLENTY, make_optimizer)
    assert_same(got, expected, "losses")
    assert_same(state, parameters, "parameters")
    assert manager.stats.settled_forwards >= 6
