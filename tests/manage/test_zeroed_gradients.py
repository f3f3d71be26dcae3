"""Gradients that are made zero, instead of taken away: ``zero_grad(set_to_none=False)``."""

import pytest
import torch
from loops import mlp, square_loss
from residents import managed_mlp
from torch import nn
from twins import adamw, assert_twins


def layered(depth):
    """Of matrices that all are large beside activations."""
    return nn.Sequential(
        *[
            m
            for _ in range(depth)
            for m in (nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.LayerNorm(64))
        ]
    )


def _sgd(model):
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, foreach=False)


def _by(model, optimizer, zero, number):
    match zero:
        case "optimizer":
            optimizer.zero_grad(set_to_none=False)
        case "model":
            model.zero_grad(set_to_none=False)
        case "in turns":
            optimizer.zero_grad(set_to_none=number % 2 == 0)


def _loop(zero, *, micro=1, clip=False):
    def loop(model, optimizer, target):
        seen = []
        for number in range(18):
            for _ in range(micro):
                loss = square_loss(model, target)
                loss.backward()
            if clip:
                seen.append(nn.utils.clip_grad_norm_(model.parameters(), 1e-2))
            if number % 5 == 3:
                seen.append([p.grad.cpu().clone() for p in model.parameters()])
            optimizer.step()
            _by(model, optimizer, zero, number)
            if number % 7 == 2:
                seen.append([None if p.grad is None else p.grad.cpu().clone() for p in model.parameters()])
            if number % 6 == 1:  # with gradients of zero, or none
                optimizer.step()
            if number % 6 == 5:  # before anybody has used what it was
                square_loss(model, target).backward()
                _by(model, optimizer, zero, number)
            seen.append(loss.detach())
        return seen

    return loop


@pytest.mark.parametrize("share", [0.5, 0.7, 0.9, 1.5])
@pytest.mark.parametrize("how", [{}, {"micro": 2}, {"clip": True}])
@pytest.mark.parametrize("zero", ["optimizer", "model", "in turns"])
@pytest.mark.parametrize("make_optimizer", [adamw, _sgd])
def test_they_are_as_unmanaged(make_optimizer, zero, how, share):
    assert_twins(lambda: mlp(depth=3), _loop(zero, **how), share=share, make_optimizer=make_optimizer)


@pytest.mark.parametrize("zero", ["optimizer", "model"])
def test_those_of_parameters_on_the_device_stay_there(zero):
    model, optimizer, manager, target = managed_mlp(1160 << 10)
    with manager:
        for number in range(10):
            square_loss(model, target).backward()
            there = [tensor for tensor in manager._stm.tensors if tensor.stays]
            kept = [tensor for tensor in there if manager._stm.gradients.is_kept(tensor)]
            optimizer.step()
            _by(model, optimizer, zero, number)
        assert manager.stats.settled_forwards == 0
        assert len(kept) == len(there) > 0


@pytest.mark.parametrize("share", [0.5, 0.6, 0.75, 0.85])
def test_what_is_zero_at_some_times_takes_no_memory_twice(share):
    """Nobody looks: zeros are still to be written where the gradient is, when the next one comes."""

    def loop(model, optimizer, target):
        seen = []
        for number in range(14):
            loss = square_loss(model, target)
            loss.backward()
            optimizer.step()
            _by(model, optimizer, "in turns", number)
            seen.append(loss.detach())
        return seen

    def make_optimizer(model):
        return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

    link = {"bandwidth": "100GiB/s", "latency": "1us"}
    assert_twins(lambda: layered(depth=6), loop, share=share, make_optimizer=make_optimizer, **link)


class ReadOnly(torch.optim.Optimizer):
    """A wrapper whose groups nobody can set."""

    param_groups = property(lambda self: self.base.param_groups)
    state = property(lambda self: self.base.state)
    defaults = property(lambda self: self.base.defaults)

    def __init__(self, base):
        self.base = base
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = {}, {}

    def step(self, closure=None):
        return self.base.step(closure)


def test_a_wrapper_whose_groups_are_its_own():
    def loop(model, optimizer, target):
        wrapper, seen = ReadOnly(optimizer), []
        for _ in range(6):
            seen.append(square_loss(model, target))
            seen[-1].backward()
            wrapper.step()
            wrapper.zero_grad(set_to_none=False)
        return [loss.detach() for loss in seen]

    assert_twins(mlp, loop, share=0.8)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_part_of_a_graph_and_nothing_at_all():
    def loop(model, optimizer, target):
        seen = []
        for _ in range(4):
            loss = square_loss(model, target)
            loss.backward(create_graph=True)
            model[0].weight.grad = None
            optimizer.zero_grad(set_to_none=False)
            seen += [
                p.grad is None or (p.grad.requires_grad, p.grad.abs().sum().item())
                for p in model.parameters()
            ]
            model.zero_grad()
            optimizer.step()
        return seen

    assert_twins(lambda: mlp(depth=1), loop, share=1.0)
