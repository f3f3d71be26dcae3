"""Graphs with nodes at home and on the device give the same bits as all on the device, whichever thread is faster."""

import random
import threading
import time
from functools import partial

import pytest
import torch
from accelerators import ON_CUDA
from backward_ends import wait_for_backward_ends
from bits import bits_of
from loops import batch, losses, mlp, square_loss
from node_numbers import number_apart
from torch.utils.checkpoint import checkpoint
from twins import assert_twins, device

import hetero


def _nap(gradient):
    """Of threads that race, another one wins each time."""
    time.sleep(2e-4 * random.random())


def _penalised(penalty):
    def loop(model, optimizer, target):
        seen = []
        for _ in range(5):
            loss = model(batch(target)).square().mean()
            total = loss + penalty(model, loss, target)
            total.backward()
            # A sum of numbers at home is the host's, whose kernels round otherwise.
            totals = [] if ON_CUDA else [total]
            seen.append([loss, *totals, *[p.grad.clone() for p in model.parameters()]])
            optimizer.step()
            optimizer.zero_grad()
        return seen

    return loop


def _gradients(model, loss):
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    for gradient in gradients:
        gradient.register_hook(_nap)
    return gradients


def _at_home(model, loss, target):
    return sum(g.square().sum() for g in _gradients(model, loss)).to(target)


def _on_the_device(model, loss, target):
    return sum(g.to(target).square().sum() for g in _gradients(model, loss))


def _of_values(model, loss, target):
    total = 0.0
    for parameter in model.parameters():
        for part in (parameter.abs().sum(), (parameter * parameter).sum()):
            part.register_hook(_nap)
            total = total + 1e-3 * part
    return total.to(target)


@pytest.mark.parametrize("penalty", [_at_home, _on_the_device, _of_values])
@pytest.mark.parametrize("share", [0.95, 1.3])
def test_a_penalty_gives_the_same_bits_whichever_thread_is_faster(penalty, share):
    assert_twins(lambda: mlp(depth=2), _penalised(penalty), share=share)


def test_a_penalty_gives_the_same_bits_where_parameters_live_on_the_device(homes_on_device):
    assert_twins(lambda: mlp(depth=2), _penalised(_on_the_device), share=1.8)


def test_hooks_of_parameters_count_nodes_as_the_others_do_from_the_first_penalty_on():
    """What they compute in a recorded backward is at home, in the middle of what is on the device."""
    number_apart(device(), backwards_higher=True)

    def loop(model, optimizer, target):
        for p in model.parameters():
            p.register_hook(lambda gradient: gradient * 0.5)
        return _penalised(_on_the_device)(model, optimizer, target)

    assert_twins(lambda: mlp(depth=2), loop, share=1.2)


def test_what_is_recorded_on_the_host_alone_stays_on_its_callers_thread():
    """Whoever waits for it may be on the device's thread."""
    with hetero.manage(mlp(), device=device(), device_budget="4MiB"):
        x, threads = torch.ones(3, requires_grad=True), []
        y = x.square()
        y.register_hook(lambda gradient: threads.append(threading.current_thread()))
        torch.autograd.grad(y.sum(), x, create_graph=True)
        assert threads == [threading.current_thread()]


def test_what_backward_raises_on_the_other_thread_is_raised_here():
    def loop(model, optimizer, target):
        seen = []
        for fails in (False, True, False):
            loss = model(batch(target)).square().mean()
            gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
            total = loss + sum(g.square().sum() for g in gradients).to(target)
            if fails:
                gradients[0].register_hook(lambda gradient: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    total.backward()
                wait_for_backward_ends(target)
            else:
                total.backward()
                optimizer.step()
            optimizer.zero_grad()
            seen.append(total)
        return seen

    assert_twins(lambda: mlp(depth=2), loop, share=1.2)


def test_a_graph_at_home_is_known_until_it_is_gone_and_for_good_once_a_backward_has_met_it():
    model = mlp()
    with hetero.manage(model, device=device(), device_budget="4MiB") as manager:
        looked, written, trained = manager._stm.tensors[:3]
        total = looked.parameter.sum() + 1.0
        assert looked.paths.lead_home
        del total
        assert not looked.paths.lead_home
        buffer = torch.zeros(written.parameter.shape)
        buffer[:].add_(written.parameter)  # the view is gone; its base has the graph
        assert written.paths.lead_home
        del buffer
        assert written.paths.lead_home  # nothing told
        trained.parameter.sum().backward()
        assert trained.paths.lead_home
        assert not looked.paths.lead_home


@pytest.mark.parametrize("budget", [500 << 10, 900 << 10, 64 << 20])
def test_hooks_on_accumulators_see_gradients_that_have_arrived(budget):
    """The accumulator is had from a view whose graph is gone at once, as DistributedDataParallel does it."""

    def loop(model, optimizer, target):
        arrived, seen, held = {}, [], []
        for number, p in enumerate(model.parameters()):

            def note(gradients, number=number):
                arrived[number] = bits_of(gradients[0])

            held.append(p.expand_as(p).grad_fn.next_functions[0][0])
            held[-1].register_prehook(note)
        for _ in range(8):
            seen += [*losses(model, optimizer, target, 1), *(arrived[number] for number in sorted(arrived))]
        return seen

    assert_twins(mlp, loop, budget=budget)


@pytest.mark.parametrize("budget", [500 << 10, 900 << 10, 64 << 20])
def test_a_penalty_of_what_was_written_into_a_buffer(budget):
    def loop(model, optimizer, target):
        seen = []
        for _ in range(8):
            weight = next(model.parameters())
            buffer = torch.zeros(weight.shape, device=weight.device)
            buffer[:] = weight
            loss = square_loss(model, target)
            (loss + buffer.square().sum().to(target)).backward()
            seen.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
        return seen

    assert_twins(mlp, loop, budget=budget)


class _Recomputed(torch.autograd.Function):
    """A backward within a backward that nobody knows of before, as of an adjoint."""

    @staticmethod
    def forward(ctx, call, x):
        ctx.call, ctx.x = call, x.detach()
        with torch.no_grad():
            return call(x)

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.x.requires_grad_()
        with torch.enable_grad():
            y = ctx.call(x)
        torch.autograd.backward(y, gradient)
        return None, x.grad


class _Reused(torch.nn.Module):
    """One weight is used in the part that is computed again, and twice outside of it."""

    def __init__(self, recompute):
        super().__init__()
        self.recompute = recompute
        self.reused, self.inner, self.outer = (torch.nn.Linear(64, 64) for _ in range(3))
        self.last = torch.nn.Linear(64, 64)

    def forward(self, x):
        def part(x):
            return self.inner(self.reused(x).relu()).tanh()

        return self.last(self.reused(self.outer(self.reused(self.recompute(part, x.requires_grad_())))))


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("recompute", [partial(checkpoint, use_reentrant=True), _Recomputed.apply])
@pytest.mark.parametrize("share", [0.8, 1.2])
def test_a_weight_within_a_nested_backward_and_outside_of_it_gets_both_gradients(
    recompute, share, micro_batches
):
    """Whichever of the two threads that accumulate them is faster: here the caller's is late."""

    def loop(model, optimizer, target):
        model.last.weight.register_hook(lambda gradient: time.sleep(5e-3))
        seen = []
        for _ in range(5):
            for _ in range(micro_batches):
                loss = model(batch(target)).square().mean()
                loss.backward()
                seen.append(loss)
            seen.append([p.grad.clone() for p in model.parameters()])
            optimizer.step()
            optimizer.zero_grad()
        return seen

    assert_twins(lambda: _Reused(recompute), loop, share=share)


class _Slow(torch.autograd.Function):
    """A node of the device's thread that takes its time; ``events`` tells when it is there."""

    @staticmethod
    def forward(ctx, x, events):
        ctx.events = events
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        begun, done = ctx.events
        begun.set()
        time.sleep(0.2)
        done.set()
        return gradient, None


class _Interrupted(_Slow):
    """A node of the caller's thread that is interrupted while the other one is within `_Slow`."""

    @staticmethod
    def backward(ctx, gradient):
        assert ctx.events[0].wait(timeout=10)
        raise KeyboardInterrupt


def test_who_is_interrupted_in_backward_finds_it_over():
    model, events = mlp(), (threading.Event(), threading.Event())
    at_home = torch.ones(3, requires_grad=True)
    with hetero.manage(model, device=device(), device_budget="1MiB") as manager:
        on_device = _Slow.apply(model(batch(manager.device)), events).sum()
        with pytest.raises(KeyboardInterrupt):
            torch.autograd.backward([on_device, _Interrupted.apply(at_home, events).sum()])
        assert events[1].is_set()
        losses(model, torch.optim.SGD(model.parameters(), lr=0.1), manager.device, 3)  # it can go on
