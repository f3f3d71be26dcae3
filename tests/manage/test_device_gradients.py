"""Gradients of parameters that live on the device: clipped, read, returned, and of backwards that fail."""

import gc
import threading

import pytest
import torch
from accelerators import GAPS
from backward_ends import wait_for_backward_ends
from loops import backward, batch, losses, mlp, train
from residents import living, managed_mlp, step
from torch import nn
from twins import assert_twins

pytestmark = pytest.mark.usefixtures("homes_on_device", "late_queue")


def test_gradients_that_somebody_holds_are_stepped_and_then_planned_at_home():
    manager = assert_twins(mlp, lambda m, o, t: train(m, o, t, 8), share=1.5)
    assert not manager._stm.plans.device_homes


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_clipping_accumulation_and_reading(norm_type):
    def loop(model, optimizer, target):
        seen = []
        for number in range(8):
            for rows in (8, 5, 3):
                backward(model, target, rows)
            seen.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-2, norm_type))
            if number == 5:
                seen.append([p.grad.clone() for p in model.parameters()])
            optimizer.step()
            if number == 6:
                seen.append([p.grad.clone() for p in model.parameters()])
            optimizer.zero_grad(set_to_none=number % 3 > 0)
        return seen

    assert_twins(mlp, loop, share=1.2)


def test_clipping_twice_and_gradients_shared_by_two_parameters():
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = (nn.Parameter(torch.ones(64)) for _ in range(2))
            self.last = nn.Linear(64, 64)

        def forward(self, x):
            return self.last(x + (self.first + self.second))

    def loop(model, optimizer, target):
        seen = []
        for _ in range(7):
            backward(model, target)
            for part in (list(model.parameters())[:1], list(model.parameters())):
                seen.append(torch.nn.utils.clip_grad_norm_(part, 1e-2))
            optimizer.step()
            optimizer.zero_grad()
        return seen

    assert_twins(Sum, loop, budget=4 << 20)


def test_grad_scaler_plain_and_with_a_fused_optimizer():
    def loop(model, optimizer, target):
        scaler = torch.amp.GradScaler(target.type, init_scale=256.0, growth_interval=2)
        seen = []
        for number in range(9):
            loss = model(batch(target)).square().mean()
            scaler.scale(loss * (float("inf") if number == 5 else 1.0)).backward()
            if number % 2:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            seen.append([loss, scaler.get_scale()])
        return seen

    assert_twins(mlp, loop, share=1.2)
    assert_twins(
        mlp, loop, share=1.2, make_optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True)
    )


def unscaled_in_the_step(model, optimizer, target, *, looks=True):
    """The usual loop in mixed precision: nobody calls ``unscale_``, and fused kernels do it, in ``p.grad`` itself."""
    scaler = torch.amp.GradScaler(target.type, init_scale=192.0, growth_factor=3.0, growth_interval=2)
    seen = []
    for number in range(9):
        loss = model(batch(target)).square().mean()
        scaler.scale(loss * (float("inf") if number in (1, 6) else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        seen.append([loss.detach(), scaler.get_scale()])
        if looks and number % 3:
            seen.append([p.grad for p in model.parameters()])
        optimizer.zero_grad()
    return seen


@pytest.mark.parametrize("share", [0.6, 1.0, 1.2])
@pytest.mark.parametrize(
    "make",
    [
        lambda ps: torch.optim.AdamW(ps, lr=1e-2, fused=True),
        lambda ps: torch.optim.Adam(ps, lr=1e-2, amsgrad=True, fused=True),
        lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9, nesterov=True, fused=True),
    ],
    ids=["AdamW", "amsgrad", "nesterov"],
)
def test_kernels_that_unscale_by_themselves_do_so_on_the_device(make, share):
    assert_twins(
        mlp, unscaled_in_the_step, share=share, make_optimizer=lambda model: make(model.parameters())
    )


def test_everything_comes_to_live_on_the_device_where_kernels_unscale_by_themselves():
    model, optimizer, manager, target = managed_mlp(
        "64MiB", make_optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True)
    )
    with manager:
        unscaled_in_the_step(model, optimizer, target, looks=False)
        assert manager.plan.everything_fits


def test_a_graph_from_before_a_step_is_refused_as_autograd_does():
    model, optimizer, manager, target = managed_mlp("64MiB")
    with manager:
        for _ in range(5):
            step(model, optimizer, target)
        loss = model(batch(target)).square().mean()
        loss.backward(retain_graph=True)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("goes_on", ["device", "home"])
def test_a_backward_that_fails_before_autograd_has_a_gradient_leaves_no_trace(goes_on):
    def fail(*gradients):
        raise ValueError("in between")

    model, optimizer, manager, target = managed_mlp("64MiB")
    manager._stm.settled.forbid()  # where everything fits, autograd has gradients of its own
    with manager:
        for _ in range(5):
            step(model, optimizer, target)
        last = model[-1].weight
        assert last._hetero.stays
        used = torch.accelerator.memory_allocated()
        x = batch(target)
        loss = model(x).square().mean()
        hook = last._hetero.identity.grad_fn.register_hook(fail)
        with pytest.raises(ValueError, match="in between"):
            loss.backward()
        hook.remove()
        del loss
        assert last.grad is None
        optimizer.zero_grad()
        wait_for_backward_ends(target)
        gc.collect()
        assert torch.accelerator.memory_allocated() == used + x.nbytes
        if goes_on == "home":  # the next gradient is not kept on the device
            last.register_hook(lambda gradient: None)
        model(x).square().mean().backward()
        got = [p.grad.clone() for p in model.parameters()]
        optimizer.zero_grad()
        expected = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
        assert all(map(torch.equal, got, expected))


def test_a_backward_that_fails_beside_gradients_of_an_earlier_one():
    """They come home, once, although nothing of ours asked for them."""

    def fail(gradient):
        raise ValueError("in between")

    model, optimizer, manager, target = managed_mlp("64MiB")
    manager._stm.settled.forbid()  # where everything fits, autograd has gradients of its own
    with manager:
        for _ in range(5):
            step(model, optimizer, target)
        x = batch(target)
        model(x).square().mean().backward()
        middle = model[:8](x)
        middle.register_hook(fail)
        with pytest.raises(ValueError, match="in between"):
            model[8:](middle).square().mean().backward()
        optimizer.zero_grad()
        assert living(manager)


def test_gradients_that_are_returned_while_another_thread_accumulates():
    """`keeps` is about all backwards that run: one that returns gradients must get them."""

    class Wait(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, here, there):
            ctx.here, ctx.there = here, there
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            ctx.here.set()
            assert ctx.there.wait(30)
            return gradient, None, None

    first, optimizer, manager, target = managed_mlp("64MiB")
    with manager:
        for _ in range(5):
            step(first, optimizer, target)
        x = batch(target)
        expected = torch.autograd.grad(first(x).square().mean(), list(first.parameters()))
        returns, accumulates, done = (threading.Event() for _ in range(3))

        def other():
            assert returns.wait(30)
            Wait.apply(torch.ones(3, requires_grad=True), accumulates, done).sum().backward()

        thread = threading.Thread(target=other)
        thread.start()
        loss = Wait.apply(first(x), returns, accumulates).square().mean()
        got = torch.autograd.grad(loss, list(first.parameters()))
        done.set()
        thread.join()
        assert all(map(torch.equal, got, expected))


@pytest.mark.parametrize("more", [4 << 10, 16 << 10, 28 << 10])
def test_gradients_that_stay_find_room_beside_what_the_caller_has_come_to_hold(more):
    """Everything lives there, so the schedule asks for nothing, and nobody looks at each moment."""
    model, optimizer, manager, target = managed_mlp(
        "1250KiB", lambda m: torch.optim.AdamW(m.parameters(), fused=True)
    )
    manager._stm.settled.forbid()
    with manager:
        losses(model, optimizer, target, 10)
        assert living(manager) == {name for name, _ in model.named_parameters()}
        torch.accelerator.reset_peak_memory_stats()
        losses(model, optimizer, target, 1)
        room = manager.config.device_budget - torch.accelerator.max_memory_allocated()
        held = torch.empty(room + more, dtype=torch.uint8, device=target)
        losses(model, optimizer, target, 1)
        assert torch.accelerator.max_memory_allocated() <= manager.config.device_budget + GAPS
        del held
