"""Whole loops whose updates are done later compute what they would if each were done at once."""

import copy
import threading

import pytest
import torch
from backward_ends import wait_for_backward_ends
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from loops import ACTIONS, backward, batch, losses, mixed_loop, mlp, train, two_optimizers, two_steps
from torch import nn
from torch.utils.checkpoint import checkpoint
from twins import adamw, assert_same, assert_twins, device, plain, unmanaged

import hetero

pytestmark = pytest.mark.usefixtures("late_queue")


def test_two_optimizers_on_one_model():
    def make(model):
        first = torch.optim.AdamW(list(model.parameters())[:4], lr=1e-2, foreach=False)
        first.other = torch.optim.SGD(list(model.parameters())[4:], lr=1e-1, momentum=0.9, foreach=False)
        return first

    def loop(model, optimizer, target):
        seen = []
        for step in range(6):
            loss = model(batch(target)).square().mean()
            loss.backward()
            optimizer.step()
            if step % 2:
                optimizer.other.step()
                optimizer.other.zero_grad()
            optimizer.zero_grad()
            seen.append(loss)
        return seen

    assert_twins(mlp, loop, make_optimizer=make)


@pytest.mark.parametrize("share", [0.8, 1.0])
def test_parameters_as_arguments_of_a_checkpoint(share):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(64, 64)
            self.weight, self.bias = nn.Parameter(torch.randn(64, 64)), nn.Parameter(torch.randn(64))

        def forward(self, x):
            def inner(x, weight, bias):
                return torch.sigmoid(x @ weight + bias)

            return checkpoint(inner, self.linear(x), self.weight, self.bias, use_reentrant=False)

    def loop(model, optimizer, target):
        seen = losses(model, optimizer, target, 6)
        vector = torch.nn.utils.parameters_to_vector(model.parameters())
        torch.nn.utils.vector_to_parameters(
            vector.detach() * 0.9, model.parameters()
        )  # homes begin within others' memory
        seen += losses(model, optimizer, target, 2)
        for _ in range(3):  # outside of the model's forward
            middle = checkpoint(lambda x, w: x @ w, batch(target), model.weight, use_reentrant=False)
            middle.square().mean().backward()
            seen.append(middle)
            optimizer.step()
            optimizer.zero_grad()
        return seen

    assert_twins(Net, loop, share=share)


def test_two_optimizers_on_the_same_parameters():
    def make(model):
        optimizer = adamw(model)
        optimizer.other = torch.optim.SGD(model.parameters(), lr=1e-2, fused=True)
        return optimizer

    def loop(model, optimizer, target):
        seen = []
        for _ in range(5):
            loss = model(batch(target)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.other.step()
            optimizer.zero_grad()
            seen.append(loss)
        return seen

    assert_twins(mlp, loop, make_optimizer=make)


def test_frozen_then_unfrozen_layers_and_parameters_without_gradient():
    class Partial(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = mlp(depth=3)
            self.unused = nn.Linear(4, 4)

        def forward(self, x):
            return self.body(x)

    def loop(model, optimizer, target):
        seen = []
        for step in range(9):
            if step % 3 == 0:
                for p in model.body[2].parameters():
                    p.requires_grad_(step == 3)
            loss = model(batch(target)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss)
        return seen

    def make(model):
        return torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)

    assert_twins(Partial, loop, make_optimizer=make)


def test_a_graph_from_before_the_step_is_refused_after_it_as_ever():
    def loop(model, optimizer, target):
        two_steps(model, optimizer, target)
        loss = model(batch(target)).square().mean()
        backward(model, target)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        wait_for_backward_ends(target)
        optimizer.zero_grad()
        penalty = sum(p.square().sum() for p in model.parameters())
        backward(model, target)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            penalty.backward()
        return []

    assert_twins(lambda: mlp(depth=2), loop, share=0.9)


def test_step_hooks_run_once_on_the_users_thread_and_see_the_finished_step():
    def loop(model, optimizer, target):
        seen = []
        me = threading.get_ident()

        def before(optimizer, args, kwargs):
            assert threading.get_ident() == me
            assert len(optimizer.param_groups[0]["params"]) == len(list(model.parameters()))
            for p in model.parameters():
                p.grad.mul_(0.5)
            seen.append([p.grad for p in model.parameters()])

        def after(optimizer, args, kwargs):
            assert threading.get_ident() == me
            assert len(optimizer.param_groups[0]["params"]) == len(list(model.parameters()))
            seen.append([p.detach().clone() for p in model.parameters()])

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)
        two_steps(model, optimizer, target)
        two_steps(model, optimizer, target)
        assert len(seen) == 8
        return seen

    assert_twins(mlp, loop, share=0.9)


def test_load_state_dict_between_steps():
    def loop(model, optimizer, target):
        two_steps(model, optimizer, target)
        saved = copy.deepcopy(optimizer.state_dict())
        weights = copy.deepcopy(model.state_dict())
        two_steps(model, optimizer, target)
        optimizer.load_state_dict(saved)
        two_steps(model, optimizer, target)
        model.load_state_dict(weights)
        optimizer.state.clear()
        two_steps(model, optimizer, target)
        return [optimizer.state[p]["step"] for p in model.parameters()]

    assert_twins(mlp, loop, share=0.9)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(actions=st.lists(st.sampled_from(ACTIONS), min_size=4, max_size=24), share=st.sampled_from([0.5, 0.9]))
def test_any_loop(actions, share):
    assert_twins(lambda: mlp(depth=2), mixed_loop(actions), share=share, make_optimizer=two_optimizers)


def test_the_same_without_deferral():
    """The switch that benchmarks use."""
    expected, _, _ = unmanaged(mlp, lambda m, o, t: train(m, o, t, 4))
    target = device()
    torch.manual_seed(0)
    model = mlp()
    optimizer = adamw(model)
    with hetero.manage(model, optimizer, device=target, device_budget="4MiB") as manager:
        manager._host_step.defers = False
        torch.manual_seed(1)
        assert_same(plain(train(model, optimizer, target, 4)), expected, "loss")
        assert manager._host_step.queued == 0


def test_a_state_held_across_close_is_not_stale_under_the_next_manager():
    target = device()
    torch.manual_seed(0)
    model = mlp()
    optimizer = adamw(model)
    with hetero.manage(model, optimizer, device=target, device_budget="4MiB"):
        two_steps(model, optimizer, target)
        held = optimizer.state
    with hetero.manage(model, optimizer, device=target, device_budget="4MiB"):
        two_steps(model, optimizer, target)
        two_steps(model, optimizer, target)
        assert optimizer.state[model[0].weight]["step"] == 6
    assert len(held) == len(list(model.parameters()))
