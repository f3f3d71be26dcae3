"""Homes written, read and replaced behind the device copies' backs: found by review, each silently wrong once."""

import copy
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from loops import backward, batch, mlp, train
from torch import nn
from twins import adamw, assert_same, assert_twins, device, plain, unmanaged

import hetero
from hetero.stm.gradients.offload import Gradients


def steps(change):
    def loop(model, optimizer, target):
        seen = []
        for _ in range(3):
            seen.append(train(model, optimizer, target, 1))
            seen.append(change(model, optimizer, target))
        return seen

    return loop


def test_writes_with_a_device_operand_outside_a_forward_reach_home():
    def change(model, optimizer, target):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.ones(p.shape).to(target), alpha=1e-3)
            return [p.clone() for p in model.parameters()]

    assert_twins(mlp, steps(change))


def test_a_write_between_backward_and_step_is_not_lost():
    def loop(model, optimizer, target):
        for _ in range(3):
            model(batch(target)).square().mean().backward()
            with torch.no_grad():
                model[4].weight.mul_(torch.full((1,), 0.5).to(target))
            optimizer.step()
            optimizer.zero_grad()
        return list(model.parameters())

    assert_twins(mlp, loop)


def late_gradients(loop, build=mlp):
    """On a link so slow that a gradient that nobody waits for is not there yet."""
    assert_twins(build, loop, bandwidth="20MiB/s", latency="5ms")


@pytest.mark.parametrize("kind", ["to", "copy_", "old graph"])
def test_other_paths_to_a_parameter_wait_for_its_gradient(kind):
    def loop(model, optimizer, target):
        weight = model[0].weight
        old = 1e-3 * weight.sum()
        seen = []
        for _ in range(3):
            loss = model(batch(target)).square().mean()
            if kind == "to":
                loss = loss + 1e-3 * weight.to(target).square().sum()
            elif kind == "copy_":
                loss = loss + 1e-3 * torch.zeros(weight.shape).to(target).copy_(weight).square().sum()
            else:
                loss = loss + old.to(target)
            loss.backward(retain_graph=True)
            seen.append([p.grad for p in model.parameters()])
            optimizer.step()
            optimizer.zero_grad()
        return seen

    late_gradients(loop)


def test_autograd_grad_of_parameters_within_a_backward():
    class Recompute(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, module, *parameters):
            ctx.x, ctx.module, ctx.parameters = x.detach(), module, parameters
            return module(x)

        @staticmethod
        def backward(ctx, g):
            with torch.enable_grad():
                x = ctx.x.requires_grad_()
                parameters = list(ctx.module.parameters())
                grads = torch.autograd.grad(ctx.module(x), (x, *parameters), g)
            return grads[0], None, *[2 * grad for grad in grads[1:]]

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = mlp(depth=2), mlp(depth=2)

        def forward(self, x):
            return Recompute.apply(self.first(x), self.second, *self.second.parameters())

    def loop(model, optimizer, target):
        seen = []
        for _ in range(3):
            x = batch(target).requires_grad_()
            loss = model(x).square().mean()
            grads = torch.autograd.grad(loss, list(model.parameters()))
            seen.append([2 * g.cpu() for g in grads])
        return seen

    late_gradients(loop, Net)


def test_data_kept_in_forward_and_written_later():
    class Codebook(nn.Module):
        def __init__(self):
            super().__init__()
            self.book = nn.Parameter(torch.randn(64, 64) / 8, requires_grad=False)
            self.body = mlp()

        def forward(self, x):
            data = self.book.data
            x = self.body(F.linear(x, data))
            data.mul_(0.9)
            return x

    assert_twins(Codebook, steps(lambda m, o, t: m.book.clone()))


def test_set_gives_the_parameter_another_home():
    def change(model, optimizer, target):
        with torch.no_grad():
            model[2].weight.set_(model[2].weight * 0.5)
        return model[2].weight.clone()

    assert_twins(mlp, steps(change))


def test_data_set_to_a_slice_of_a_flat_tensor():
    def loop(model, optimizer, target):
        flat = torch.cat([p.detach().flatten() for p in model.parameters()])
        begin = 0
        for p in model.parameters():
            p.data = flat[begin : begin + p.numel()].view_as(p)
            begin += p.numel()
        seen = []
        for _ in range(3):
            with torch.no_grad():
                seen.append(model(batch(target)).clone())
            flat.mul_(0.9)
        return seen

    assert_twins(mlp, loop)


def test_a_cast_to_another_layout_is_no_plain_cast():
    class Convolution(nn.Module):
        def __init__(self):
            super().__init__()
            self.weights = nn.ParameterList([nn.Parameter(torch.randn(8, 8, 3, 3) / 8) for _ in range(4)])

        def forward(self, x):
            for weight in self.weights:
                low = weight.to(torch.bfloat16, memory_format=torch.channels_last)
                x = torch.tanh(F.conv2d(x.to(torch.bfloat16), low, padding=1))
            return x.float()

    def loop(model, optimizer, target):
        seen = []
        for _ in range(3):
            x = torch.randn(2, 8, 6, 6).to(target).requires_grad_()
            model(x).square().mean().backward()
            seen.append([x.grad, *[p.grad for p in model.parameters()]])
            optimizer.step()
            optimizer.zero_grad()
        return seen

    assert_twins(Convolution, loop, share=0.9)


def test_two_parameters_over_the_same_memory_are_refused():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = nn.Parameter(model[0].weight.data, requires_grad=False)
    with pytest.raises(hetero.ManageError, match="over the same memory"):
        hetero.manage(model, None, device=device(), device_budget="1MiB")


def test_attention_in_inference_takes_the_same_fused_kernel():
    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.MultiheadAttention(32, 4, batch_first=True) for _ in range(3)])

        def forward(self, x):
            for layer in self.layers:
                x = layer(x, x, x, need_weights=False)[0]
            return x

    def loop(model, optimizer, target):
        seen = []
        for _ in range(3):
            x = torch.randn(2, 5, 32).to(target)
            model.train()(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                seen.append(model.eval()(x).clone())
        return seen

    assert_twins(Encoder, loop, share=0.8)


def test_backward_after_close_finishes_a_graph_made_before():
    target = device()
    torch.manual_seed(0)
    model = mlp(depth=2)
    x = batch(target)
    twin = copy.deepcopy(model).to(target)
    expected = torch.autograd.grad(twin(x).square().mean(), list(twin.parameters()))
    manager = hetero.manage(model, None, device=target, device_budget="8MiB")
    loss = model(x).square().mean()
    manager.close()
    loss.backward()
    assert all(torch.equal(p.grad, e.cpu()) for p, e in zip(model.parameters(), expected, strict=True))


def test_a_manager_dropped_without_close_goes_with_its_model():
    target = device()
    gc.collect()
    before = torch.accelerator.memory_allocated()
    model = mlp(depth=2)
    manager = hetero.manage(model, None, device=target, device_budget=before + (200 << 10))
    model(batch(target)).square().mean().backward()  # measured: under a cap on the whole process
    gone = weakref.ref(manager)
    del model, manager
    gc.collect()
    assert gone() is None
    assert torch.accelerator.memory_allocated() == before
    assert torch.empty(1 << 20, device=target).numel() == 1 << 20  # no cap is left behind
    assert "_announced" not in torch.autograd._engine_run_backward.__name__


def test_managed_within_inference_mode_trains_afterwards():
    def loop(model, optimizer, target):
        return [p.is_inference() for p in model.parameters()] + train(model, optimizer, target)

    seen, state, peak = unmanaged(mlp, loop)
    target = device()
    torch.manual_seed(0)
    model = mlp()
    optimizer = adamw(model)
    with torch.inference_mode():
        manager = hetero.manage(model, optimizer, device=target, device_budget=peak)
    torch.manual_seed(1)
    assert_same(plain(loop(model, optimizer, target)), seen, "observed")
    with torch.inference_mode():
        manager.close()
    assert_same([p.detach() for p in model.parameters()], state, "state")
    assert not any(p.is_inference() for p in model.parameters())


def test_an_evaluation_on_a_stream_of_its_own():
    def loop(model, optimizer, target):
        seen = []
        side = torch.Stream(device=target)
        for _ in range(4):
            seen += train(model, optimizer, target, 1)
            x = batch(target)
            side.wait_event(torch.accelerator.current_stream().record_event())
            with side, torch.no_grad():
                y = model(x).clone()
            torch.accelerator.current_stream().wait_event(side.record_event())
            seen.append(y)
        return seen

    assert_twins(mlp, loop)


def test_gradients_come_on_the_stream_of_their_forward_whatever_an_evaluation_ran_on(monkeypatch):
    streams = []
    hand_over = Gradients.hand_over

    def noted(*given, **named):
        streams.append(torch.accelerator.current_stream())
        return hand_over(*given, **named)

    monkeypatch.setattr(Gradients, "hand_over", noted)

    def loop(model, optimizer, target):
        side = torch.Stream(device=target)
        for _ in range(3):
            side.wait_stream(torch.accelerator.current_stream())
            with side, torch.no_grad():
                model(batch(target))
            torch.accelerator.current_stream().wait_stream(side)
            streams.clear()
            backward(model, target)
            optimizer.step()
            assert set(streams) <= {torch.accelerator.current_stream()}
            optimizer.zero_grad()
        return list(model.parameters())

    assert_twins(mlp, loop)
    assert streams


def test_writes_to_the_vector_that_parameters_were_made_of_are_writes_to_parameters():
    def loop(model, optimizer, target):
        seen = []
        for _ in range(3):
            vector = nn.utils.parameters_to_vector(model.parameters()).detach() * 0.9
            nn.utils.vector_to_parameters(vector, model.parameters())
            for _ in range(2):
                loss = model(batch(target)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                seen.append(loss)
                with torch.no_grad():
                    seen.append(model(batch(target)))  # copies are made
                    vector.mul_(0.5)
                    seen.append(model(batch(target)))
        return seen

    assert_twins(mlp, loop, share=0.9)
