"""Optimizers of other libraries and of one's own whose class says ``steps_parameters_independently = True``: stepped on
the device where their parameters live there, though nobody knows what their steps take."""

import pickle
import random
from functools import partial

import numpy as np
import pytest
import torch
from accelerators import GAPS, ON_CUDA, STEPS_AT_HOME
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from loops import ACTIONS, backward, losses, mixed_loop, mlp
from residents import assert_nothing_moves, living, managed_mlp, step
from twins import assert_same, assert_twins, device, plain

import hetero

pytestmark = [
    pytest.mark.usefixtures("homes_on_device", "late_queue"),
    pytest.mark.skipif(ON_CUDA, reason=STEPS_AT_HOME),
]
PLENTY = 64 << 20
EXAMPLES = 15


class Declared(torch.optim.Optimizer):
    """What `update` does to each parameter that has a gradient."""

    def __init__(self, params, lr=1e-3, weight_decay=0.1):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, parameter.grad, self.state[parameter], group)


class Lion(Declared):
    """As it is published: through ``.data``, in place."""

    steps_parameters_independently = True

    def update(self, parameter, gradient, state, group):
        parameter.data.mul_(1 - group["lr"] * group["weight_decay"])
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter)
        average = state["exp_avg"]
        change = average.clone().mul_(0.9).add(gradient, alpha=0.1).sign_()
        parameter.add_(change, alpha=-group["lr"])
        average.mul_(0.99).add_(gradient, alpha=0.01)


class Signs(Declared):
    """Without states."""

    steps_parameters_independently = True

    def update(self, parameter, gradient, state, group):
        parameter.sub_(gradient.sign(), alpha=group["lr"])


class WritesToGradients(Declared):
    """As optimizers did in the past, where no version tells of it."""

    steps_parameters_independently = True

    def update(self, parameter, gradient, state, group):
        gradient.data.add_(parameter.data, alpha=group["weight_decay"])
        parameter.data.add_(gradient.data, alpha=-group["lr"])


class MakesStatesLate(Declared):
    """As lookahead does, and what computes a basis now and then."""

    steps_parameters_independently = True

    def update(self, parameter, gradient, state, group):
        state["count"] = state.get("count", 0) + 1
        parameter.sub_(gradient, alpha=group["lr"])
        if state["count"] == 5:
            state["slow"] = parameter.clone()
        if state["count"] > 5 and state["count"] % 2 == 0:
            parameter.lerp_(state["slow"], 0.5)
            state["slow"] = parameter.clone()


class TakesMuch(Lion):
    """More than anybody would think, when everything has been written already."""

    steps_parameters_independently = True

    def update(self, parameter, gradient, state, group):
        super().update(parameter, gradient, state, group)
        gradient.mul_(2)
        parameter.add_(torch.stack([parameter] * 200).mean(0), alpha=1e-3)


class Fails(Lion):
    """Once, when everything has been written already."""

    steps_parameters_independently = True
    fails = False

    def update(self, parameter, gradient, state, group):
        super().update(parameter, gradient, state, group)
        if self.fails and parameter.shape == (64, 128):
            raise ArithmeticError("not this one")


class Draws(Declared):
    """As Langevin dynamics do, and what rounds stochastically: from all generators there are."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, lr)
        self.own = torch.Generator().manual_seed(0)
        self.python, self.legacy, self.numpy = (
            random.Random(0),
            np.random.RandomState(0),
            np.random.default_rng(0),
        )

    def update(self, parameter, gradient, state, group):
        state["seen"] = gradient.clone()
        own = torch.randn(gradient.shape, generator=self.own).to(gradient.device)
        sum_of_all = random.random() + np.random.rand()
        sum_of_all += self.python.random() + self.legacy.rand() + float(self.numpy.random())
        parameter.sub_(gradient + own, alpha=group["lr"] * sum_of_all)
        parameter.add_(torch.randn(gradient.shape).to(gradient.device), alpha=group["lr"])


class DrawsAndSaysNothingOfIt(Draws):
    steps_parameters_independently = True


KINDS = [Lion, Signs, WritesToGradients, MakesStatesLate]


def looking(model, optimizer, target):
    """Now and then at gradients, after the step."""
    seen = losses(model, optimizer, target, 8)
    for _ in range(3):
        loss = model(torch.randn(8, 64).to(target)).square().mean()
        loss.backward()
        optimizer.step()
        seen.append([p.grad.clone() for p in model.parameters()])
        optimizer.zero_grad()
        seen.append(losses(model, optimizer, target, 4))
    return seen


@pytest.mark.parametrize("share", [0.5, 0.8, 4.0])
@pytest.mark.parametrize("kind", [*KINDS, TakesMuch])
def test_the_numbers_are_the_same(kind, share):
    assert_twins(mlp, looking, share=share, make_optimizer=lambda model: kind(model.parameters()))


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from([*KINDS, TakesMuch]),
    actions=st.lists(st.sampled_from(ACTIONS), min_size=6, max_size=24),
    share=st.sampled_from([0.6, 1.0, 1.6]),
)
def test_any_loop(kind, actions, share):
    def with_another(model):
        optimizer = kind(model.parameters())
        optimizer.other = torch.optim.SGD(list(model.parameters())[:3], lr=1e-2, foreach=False)
        return optimizer

    lead = ["micro-batch", "step", "zero"] * 3
    assert_twins(
        lambda: mlp(depth=2), mixed_loop([*lead, *actions]), share=share, make_optimizer=with_another
    )


@pytest.mark.parametrize("kind", KINDS)
def test_where_everything_fits_nothing_moves(kind):
    model, optimizer, manager, target = managed_mlp(PLENTY, lambda model: kind(model.parameters()))
    with manager:
        for _ in range(8):
            step(model, optimizer, target)
        assert living(manager) == {name for name, _ in model.named_parameters()}
        assert_nothing_moves(manager, lambda: step(model, optimizer, target))


def test_what_takes_too_much_is_undone_and_goes_home_for_good():
    model, optimizer, manager, target = managed_mlp(3 << 20, lambda model: TakesMuch(model.parameters()))
    moves = 0
    with manager:
        for _ in range(12):
            step(model, optimizer, target)
            moves += bool(living(manager))
        home = living(manager)
        for _ in range(4):
            step(model, optimizer, target)
        assert living(manager) == home
        assert {name for name, p in model.named_parameters() if p.dim() > 1}.isdisjoint(home)
        assert manager.stats.peak_device_bytes <= (3 << 20) + GAPS
    assert moves > 0


def test_an_update_that_raises_leaves_what_was_there():
    model, optimizer, manager, target = managed_mlp(PLENTY, lambda model: Fails(model.parameters()))

    def of_what_raises():
        wanted = [p for p in model.parameters() if p.shape == (64, 128)]
        return plain([tensor for p in wanted for tensor in (p, optimizer.state[p]["exp_avg"])])

    with manager:
        losses(model, optimizer, target, 6)
        before = of_what_raises()
        losses(model, optimizer, target, 1)  # which brings back the states that we have looked at
        assert living(manager) == {name for name, _ in model.named_parameters()}
        between = of_what_raises()
        assert not any(map(torch.equal, before, between))
        backward(model, target)
        optimizer.fails = True
        with pytest.raises(ArithmeticError):
            optimizer.step()
        assert_same(of_what_raises(), between, "of what raises")
        optimizer.fails = False
        losses(model, optimizer, target, 3)
        assert not any(map(torch.equal, between, of_what_raises()))


def test_states_that_are_made_late_are_counted():
    model, optimizer, manager, target = managed_mlp(PLENTY, lambda model: MakesStatesLate(model.parameters()))
    with manager:
        for _ in range(8):
            step(model, optimizer, target)
        size = sum(-(-p.nbytes // 512) * 512 for p in model.parameters())
        assert manager.stats.by_kind["device"]["optimizer_state"] == size


class Undeclared(Lion):
    """Of which nothing is known: what its base says is not said of it."""


@pytest.mark.parametrize(("kind", "tells"), [(Undeclared, True), (Lion, False), (torch.optim.AdamW, False)])
def test_the_plan_tells_how_to_say_so(kind, tells):
    model, optimizer, manager, target = managed_mlp(PLENTY, lambda model: kind(model.parameters()))
    with manager:
        for _ in range(4):
            step(model, optimizer, target)
        plan = manager.plan
        assert plan.undeclared_optimizer == ("Undeclared" if tells else None)
        assert ("Undeclared.steps_parameters_independently = True" in " ".join(str(plan).split())) is tells
        assert bool(living(manager)) is not tells


def numbers_of(optimizer):
    """Where all generators are that a step may draw from."""
    states = torch.get_rng_state(), optimizer.own.get_state()
    others = np.random.get_state(), optimizer.python, optimizer.legacy, optimizer.numpy
    return [state.tolist() for state in states], random.getstate(), pickle.dumps(others)


def test_an_optimizer_that_draws_draws_the_numbers_of_the_unmanaged_run():
    def build():
        random.seed(0)
        np.random.seed(0)
        return mlp()

    def make_optimizer(model):
        return Draws(model.parameters())

    assert_twins(build, partial(losses, steps=4), make_optimizer=make_optimizer)
    optimizer = make_optimizer(model := mlp())
    before = numbers_of(optimizer)
    with hetero.manage(model, optimizer, device=device(), device_budget="1MiB"):
        assert numbers_of(optimizer) == before


def test_one_that_draws_is_refused_if_it_is_said_to_step_parameters_independently():
    model = mlp()
    optimizer = DrawsAndSaysNothingOfIt(model.parameters())
    before = numbers_of(optimizer)
    with pytest.raises(hetero.ManageError, match=r"DrawsAndSaysNothingOfIt says .* draws random numbers"):
        hetero.manage(model, optimizer, device=device(), device_budget="1MiB")
    assert numbers_of(optimizer) == before
    assert type(model[0].weight) is torch.nn.Parameter
