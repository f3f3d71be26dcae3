"""Micro-batches: what they add to gradients at home is added behind backward, with the bits of autograd."""

import gc

import numpy as np
import pytest
import torch
from accelerators import ON_CUDA
from bits import bits_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lateness import managed_mlp, pending, stopped
from loops import backward, batch, mixed_loop, mlp, two_optimizers, two_steps
from racing import listening
from torch import nn
from twins import adamw, assert_same, assert_twins, at_home, device, plain

import hetero
from hetero.devices import Wait
from hetero.stm.activations.slots import HostSlots
from hetero.stm.gradients import additions

SLOW = {"bandwidth": "64MiB/s", "latency": "200us"}


def ring_of(manager):
    return manager._stm.gradients.additions._ring


def micro_batches(count, steps=4, clips=False):
    def loop(model, optimizer, target):
        seen = []
        for _ in range(steps):
            for _ in range(count):
                loss = model(batch(target)).square().mean() / count
                loss.backward()
                seen.append(loss)
            if clips:
                seen.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-2))
            optimizer.step()
            optimizer.zero_grad()
        return seen

    return loop


def test_backward_waits_for_no_gradient_and_reads_none():
    model, _, manager, target = managed_mlp()
    expected = at_home(
        lambda: mlp(depth=2), lambda m, o, t: [backward(m, t) for _ in range(4)] + list(gradients(m))
    )
    with manager:
        torch.manual_seed(1)
        backward(model, target)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                manager._stm.gradients, "wait", lambda tensor: pytest.fail(f"{tensor.name} was waited for")
            )
            for _ in range(3):
                backward(model, target)
        assert_same(plain([None] * 4 + list(gradients(model))), expected, "gradients")
        assert ring_of(manager).numel() >= sum(p.nbytes for p in model.parameters())


def gradients(model):
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("keywords", [{}, {"device_homes": False}, {"speculate": True}])
def test_sums_are_those_of_the_unmanaged_run(keywords, clips):
    assert_twins(mlp, micro_batches(4, clips=clips), **SLOW, **keywords)


def convolutions():
    model = nn.Sequential(
        nn.Conv2d(4, 8, 3), nn.GELU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(8 * 16, 64)
    )
    return model.to(memory_format=torch.channels_last)


class Pictures(nn.Module):
    """Also a weight that is used transposed, one in float64, an expanded one and one without elements."""

    def __init__(self):
        super().__init__()
        self.inner = convolutions()
        self.turned = nn.Parameter(torch.randn(32, 64).t())
        self.wide = nn.Parameter(torch.randn(32, dtype=torch.float64))
        self.empty = nn.Parameter(torch.zeros(0))

    def forward(self, x):
        return self.inner(x.view(-1, 4, 8, 2).repeat(1, 1, 1, 4)) @ self.turned * self.wide + self.empty.sum()


def test_layouts_and_types():
    assert_twins(Pictures, micro_batches(3), device_homes=False, budget=1 << 20, **SLOW)


def test_low_precision_is_added_in_the_type_of_home():
    def run(limit):
        with pytest.MonkeyPatch.context() as patch:
            if limit:  # autograd adds
                patch.setattr(additions.Additions, "begin", lambda self, *_: None)
            torch.manual_seed(0)
            model, target = mlp(), device(**SLOW)
            optimizer = adamw(model)
            with hetero.manage(
                model, optimizer, device=target, device_budget="4MiB", precision=torch.bfloat16
            ) as manager:
                torch.manual_seed(1)
                seen = plain(micro_batches(4)(model, optimizer, target))
                assert (ring_of(manager) is None) == limit
            return [seen, [p.detach() for p in model.parameters()]]

    assert_same(run(False), run(True), "seen")


@pytest.mark.parametrize("late", ["ring", "budget"])
def test_where_the_ring_is_small_or_there_is_none(monkeypatch, late):
    monkeypatch.setattr(additions, "_RING_BYTES", 1)
    keywords = {"host_budget": sum(p.nbytes for p in mlp().parameters()) * 4} if late == "budget" else {}
    seen = []
    original = additions.Additions._ring_for

    def ring_for(self, nbytes):
        ring = original(self, nbytes)
        seen.append(None if ring is None else ring.numel())
        return ring

    monkeypatch.setattr(additions.Additions, "_ring_for", ring_for)
    assert_twins(mlp, micro_batches(4), device_homes=False, activations=False, **SLOW, **keywords)
    largest = max(p.nbytes for p in mlp().parameters())
    assert set(seen) == {None if late == "budget" else largest}


def test_a_backward_asks_for_a_ring_once(monkeypatch):
    asked = []
    monkeypatch.setattr(HostSlots, "reserve", lambda self, nbytes: asked.append(nbytes))
    model, _, manager, target = managed_mlp()
    with manager:
        for _ in range(3):
            backward(model, target)
    assert len(asked) == 2  # there was nothing to be added in the first


def test_looks_and_writes_between_micro_batches():
    def loop(model, optimizer, target):
        seen, weight = [], model[0].weight
        held = None
        for number in range(12):
            backward(model, target)
            if number == 1:
                seen.append(weight.grad.clone())
            elif number == 2:
                held = weight.grad.view(-1)  # autograd adds to what somebody holds
            elif number == 4:
                seen.append(held.clone())
                held = None
                weight.grad.data.mul_(0.5)
            elif number == 5:
                weight.grad = torch.ones_like(weight)
            elif number == 6:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
            elif number == 7:
                torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)
            elif number == 8:
                weight.grad = None
            elif number == 9:
                seen += torch.autograd.grad(model(batch(target)).sum(), [weight])
            elif number == 10:
                optimizer.zero_grad(set_to_none=False)
        return [*seen, *gradients(model)]

    assert_twins(mlp, loop, **SLOW)


@pytest.mark.parametrize("way", ["micro-batch", "clip", "clip value", "step"])
def test_a_gradient_in_memory_of_numpys_is_never_late(way):
    model, optimizer, manager, target = managed_mlp()
    with manager:
        two_steps(model, optimizer, target)
        weight = model[0].weight
        array = np.ones(tuple(weight.shape), np.float32)
        with stopped(manager):
            weight.grad = torch.from_numpy(array)
            if way == "micro-batch":
                backward(model, target)
            elif way == "clip":
                torch.nn.utils.clip_grad_norm_([weight], 1e-2)
            elif way == "clip value":
                torch.nn.utils.clip_grad_value_([weight], 1e-2)
            else:
                optimizer.step()
                assert "0.weight" not in pending(manager)
            assert (array == 1).all() == (way == "step")
        seen = array.copy()
        assert np.array_equal(weight.grad.numpy(), seen)


def test_looks_in_inference_mode(monkeypatch):
    monkeypatch.setattr(additions.Additions, "flush", lambda self: None)  # whoever looks comes first

    def loop(model, optimizer, target):
        seen = []
        for _ in range(2):
            backward(model, target)
            backward(model, target)
            with torch.inference_mode():
                seen += [bits_of(p.grad) for p in model.parameters()]
        return [*seen, *gradients(model)]

    assert_twins(mlp, loop, device_homes=False, **SLOW)


def test_what_is_dropped_is_not_added_to_what_takes_its_place():
    def loop(model, optimizer, target):
        for _ in range(3):
            backward(model, target)
            backward(model, target)
            for parameter in model.parameters():
                parameter.grad = None
            optimizer.zero_grad()
            backward(model, target)
        return [p.grad for p in model.parameters()]

    assert_twins(mlp, loop, device_homes=False, **SLOW)


@pytest.mark.parametrize("homes", [False, True])
def test_graphs_that_are_kept_and_used_again(homes):
    def loop(model, optimizer, target):
        seen, kept = [], []
        for number in range(14):
            loss = model(batch(target)).square().mean()
            if number % 4 == 3:  # through this graph and an older one, in one backward
                torch.autograd.backward([loss, kept[-1]], retain_graph=True)
            else:
                loss.backward(retain_graph=number % 4 == 2)
            if number == 6:
                loss.backward(retain_graph=True)
            kept.append(loss)
            if number % 4 != 2:
                optimizer.step()
                optimizer.zero_grad()
            seen.append(loss)
        return seen

    def loop_without_steps_between(model, optimizer, target):
        kept = [model(batch(target)).square().mean() for _ in range(3)]
        for losses in (kept[:1], kept[1:], [kept[0] * 2, kept[2]]):
            torch.autograd.backward(losses, retain_graph=True)
        return [*gradients(model), *kept]

    for each in (loop, loop_without_steps_between):
        assert_twins(mlp, each, device_homes=homes, **SLOW)


@pytest.mark.parametrize("kind", ["accumulated", "tensor", "removed"])
def test_hooks_see_each_gradient(kind):
    def loop(model, optimizer, target):
        seen, weight = [], model[2].weight
        for number in range(4):
            if number == 2:
                if kind == "accumulated":
                    weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
                else:
                    handle = weight.register_hook(lambda g: seen.append(g.clone()))
                    if kind == "removed":
                        handle.remove()
            backward(model, target)
        return [*seen, *gradients(model)]

    assert_twins(mlp, loop, **SLOW)


def test_an_error_in_backward_leaves_whole_sums():
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, gradient):
            raise ValueError("backward")

    def loop(model, optimizer, target):
        backward(model, target)
        with pytest.raises(ValueError, match="backward"):
            model[4:](Fails.apply(model[:4](batch(target)))).square().mean().backward()
        seen = [p.grad.clone() for p in model.parameters()]
        optimizer.zero_grad()
        backward(model, target)
        backward(model, target)
        return [*seen, *gradients(model)]

    assert_twins(mlp, loop, **SLOW)


def test_memory_on_the_host_does_not_grow():
    model, optimizer, manager, target = managed_mlp()
    with manager:
        loop, used = micro_batches(3, steps=3), []
        for _ in range(5):
            loop(model, optimizer, target)
            gc.collect()
            used.append((manager._stm.ledger.host_bytes, manager._stm.activations._slots._arena.nbytes))
        assert len(set(used[1:])) == 1


@pytest.mark.skipif(ON_CUDA, reason="only the virtual accelerator detects races")
@pytest.mark.parametrize("left_out", [False, True])
def test_adding_what_has_not_arrived_is_a_race(left_out):
    model, _, manager, target = managed_mlp()
    device(**SLOW)
    backward(model, target)
    manager._stm.gradients.wait_all(manager._stm.tensors)
    if left_out:
        manager._stm.engine.left_out = frozenset({Wait.HOST_AFTER_DOWN})
    with listening(manager) as said:
        backward(model, target)
        gradients(model)
    assert ("host" in said.text) == left_out


ONES = (
    "micro-batch",
    "step",
    "clip",
    "clip value",
    "zero",
    "zero in place",
    "read gradient",
    "scale gradients",
)


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    actions=st.lists(
        st.sampled_from([*("micro-batch",) * 4, *ONES, "hold", "let go", "freeze"]), max_size=16
    ),
    ring=st.sampled_from([1, 1 << 16, 1 << 28]),
)
def test_random_loops(monkeypatch, actions, ring):
    monkeypatch.setattr(additions, "_RING_BYTES", ring)
    assert_twins(
        lambda: mlp(depth=2), mixed_loop(actions), make_optimizer=two_optimizers, budget=4 << 20, **SLOW
    )
