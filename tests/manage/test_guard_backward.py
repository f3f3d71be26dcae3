"""A guard that is needed in the middle of a backward, which runs on a thread of autograd's."""

import gc
import threading

import pytest
import torch
from accelerators import ON_CUDA, device
from torch import nn
from twins import assert_twins

import hetero
from hetero.devices import virtual
from hetero.stm.interception.onethread import run_on_device_thread
from hetero.stm.running.guard import arm, formulas_kept, guarded
from hetero.stm.running.retry import Retry

NUMBERS = 1 << 14


@pytest.mark.skipif(ON_CUDA, reason="sets the limit of a device's memory")
@pytest.mark.parametrize("armed", [False, True])
def test_nodes_that_are_still_to_come_are_tried_again_once_it_is_armed(armed):
    target = device(memory="256MiB")
    gc.collect()
    threads, relieved = [], []

    def relieve():
        relieved.append(threading.get_ident())
        virtual.set_memory_limit("256MiB")
        return 1

    def becomes_short(gradient):
        threads.append(threading.get_ident())
        # The present node's gradient and the one that exp makes of it fit; no more.
        virtual.set_memory_limit(torch.virtual.memory_allocated())
        if armed:
            arm(relieve)

    x = torch.linspace(0, 1, NUMBERS).to(target).requires_grad_()
    middle = x.exp()
    y = middle.sin().cos()
    middle.register_hook(becomes_short)
    try:
        with guarded(Retry(relieve), at_once=False), formulas_kept([loss := y.sum()]):
            if armed:
                loss.backward()
            else:
                with pytest.raises(torch.OutOfMemoryError):
                    loss.backward()
    finally:
        virtual.set_memory_limit("256MiB")
    assert threads != [threading.get_ident()]
    assert relieved == (threads if armed else [])
    if armed:
        at_home = x.detach().cpu().requires_grad_()
        at_home.exp().sin().cos().sum().backward()
        assert torch.equal(x.grad.cpu(), at_home.grad)


class Nested(torch.autograd.Function):
    """``function``, whose backward is one of its own within the one that runs, as a reentrant checkpoint's."""

    @staticmethod
    def forward(ctx, x, function):
        ctx.save_for_backward(x)
        ctx.function = function
        return function(x.detach())

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.function(x)
        with formulas_kept([y]):
            y.backward(gradient)
        return x.grad, None


@pytest.mark.skipif(ON_CUDA, reason="sets the limit of a device's memory")
@pytest.mark.parametrize("on_device_thread", [False, True])
@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize("is_first", [False, True])
def test_they_are_wherever_it_runs_and_whichever_model_needs_it(on_device_thread, is_nested, is_first):
    """``is_first``: of two models, that of the outer guard."""
    target = device(memory="256MiB")
    gc.collect()
    relieved = []

    def relieve():
        relieved.append(threading.get_ident())
        virtual.set_memory_limit("256MiB")
        return 1

    def idle():
        return 0

    def becomes_short(gradient):
        virtual.set_memory_limit(torch.virtual.memory_allocated())
        arm(relieve)

    def function(x):
        middle = x.exp()
        if middle.requires_grad:
            middle.register_hook(becomes_short)
        return middle.sin().cos()

    x = torch.linspace(0, 1, NUMBERS).to(target).requires_grad_()
    loss = (Nested.apply(x, function) if is_nested else function(x)).sum()

    def run():
        with formulas_kept([loss]):
            loss.backward()

    first, second = Retry(relieve if is_first else idle), Retry(idle if is_first else relieve)
    try:
        with guarded(first, at_once=False), guarded(second, at_once=False):
            if on_device_thread:
                run_on_device_thread(target, run, captures=False)
            else:
                run()
    finally:
        virtual.set_memory_limit("256MiB")
    assert len(relieved) > 0
    at_home = x.detach().cpu().requires_grad_()
    at_home.exp().sin().cos().sum().backward()
    assert torch.equal(x.grad.cpu(), at_home.grad)


@pytest.mark.skipif(ON_CUDA, reason="sets the limit of a device's memory")
def test_a_recurrent_layers_backward_is_tried_again_at_its_first_operator():
    target = device(memory="256MiB")
    gc.collect()
    relieved = []

    def relieve():
        relieved.append(1)
        virtual.set_memory_limit(
            virtual.memory_limit() + 4096
        )  # for what is made before that one, and no more
        return 4096

    layer = nn.GRU(64, 64)
    x = torch.randn(3, 8, 64)
    layer(x)[0].sum().backward()
    expected = [p.grad for p in layer.parameters()]
    layer.zero_grad()
    y = layer.to(target)(x.to(target))[0]
    y.register_hook(lambda gradient: virtual.set_memory_limit(torch.virtual.memory_allocated()))
    try:
        with guarded(Retry(relieve), at_once=True):
            y.sum().backward()
    finally:
        virtual.set_memory_limit("256MiB")
    assert len(relieved) > 0
    assert all(torch.equal(p.grad.cpu(), e) for p, e in zip(layer.parameters(), expected, strict=True))


def test_what_backward_keeps_in_a_planned_iteration_makes_copies_leave():
    class Keeping(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(12))
            self.keeps = False
            self.kept = []

        def keep(self, gradient):
            self.kept.append(gradient.new_zeros(16 << 10))

        def forward(self, x):
            self.kept.clear()
            for layer in self.layers:
                x = layer(x).tanh().prod(1, keepdim=True).expand(-1, 128) + x
                if self.keeps:
                    x.register_hook(self.keep)
            return x

    def loop(model, optimizer, target):
        seen = []
        for step in range(8):
            model.keeps = step in (4, 5)
            loss = model(torch.randn(16, 128).to(target)).square().mean()
            loss.backward()
            seen.append(loss)
            optimizer.step()
            optimizer.zero_grad()
        return seen

    with pytest.MonkeyPatch.context() as patch:
        armed = []
        original = hetero.stm.running.guard._arm_nodes
        patch.setattr(
            hetero.stm.running.guard, "_arm_nodes", lambda *args: (armed.append(1), original(*args))
        )
        assert_twins(Keeping, loop, budget=1600 << 10, device_homes=False)
    assert armed
