"""Semantics of autograd that a fetch node in the middle could break: each as without hetero."""

import gc
import types
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from bits import bits_of
from loops import batch, losses, mlp, train
from torch import nn
from torch.torch_version import TorchVersion
from twins import assert_twins, device

import hetero
from hetero.stm.copies.residency import Residency


def test_plain_training():
    assert_twins(mlp, train)


def test_autograd_grad_on_parameters():
    def loop(model, optimizer, target):
        seen = []
        for _ in range(3):
            loss = model(batch(target)).square().mean()
            grads = torch.autograd.grad(loss, list(model.parameters()))
            seen.append([g.clone() for g in grads])
            for p, g in zip(model.parameters(), grads, strict=True):
                p.grad = g
            optimizer.step()
        return seen

    assert_twins(mlp, loop)


def test_autograd_grad_of_one_parameter_leaves_the_others():
    def loop(model, optimizer, target):
        loss = model(batch(target)).square().mean()
        (g,) = torch.autograd.grad(loss, [model[4].weight])
        return [g, [p.grad is None for p in model.parameters()]]

    assert_twins(mlp, loop)


def test_tensor_hooks_see_and_change_gradients():
    def loop(model, optimizer, target):
        # One list each: hooks of homes run on another thread than the device's backward, and in an order of its own.
        norms = [[] for _ in model.parameters()]
        handles = [
            p.register_hook(lambda g, mine=mine: (mine.append(bits_of(g)), g * 0.5)[1])
            for p, mine in zip(model.parameters(), norms, strict=True)
        ]
        seen = train(model, optimizer, target)
        for handle in handles:
            handle.remove()
        return [seen, norms, train(model, optimizer, target, 1)]

    assert_twins(mlp, loop)


def test_post_accumulate_hooks_registered_while_managed():
    def loop(model, optimizer, target):
        order = []
        for name, p in model.named_parameters():
            p.register_post_accumulate_grad_hook(lambda p, name=name: order.append((name, bits_of(p.grad))))
        return [train(model, optimizer, target), sorted(order)]

    assert_twins(mlp, loop)


def test_optimizer_step_in_backward():
    def loop(model, optimizer, target):
        optimizers = {p: torch.optim.Adam([p], lr=1e-2, foreach=False) for p in model.parameters()}

        def step(p):
            optimizers[p].step()
            optimizers[p].zero_grad()

        # The closure, the optimizers and the parameters hold each other through C++: unhook, or they leak.
        handles = [p.register_post_accumulate_grad_hook(step) for p in model.parameters()]
        seen = []
        for _ in range(4):
            loss = model(batch(target)).square().mean()
            loss.backward()
            seen.append(loss)
        for handle in handles:
            handle.remove()
        return seen

    assert_twins(mlp, loop)


def halve_data(p, kept):
    p.data.mul_(0.5)


def halve_a_view_of_data(p, kept):
    p.data.view(-1)[1:].mul_(0.5)


def halve_a_view(p, kept):
    p.view(-1).data.mul_(0.5)


def replace_data(p, kept):
    p.data = p.data - 0.1 * p.grad


def step_where_it_lives(p, kept):
    with torch.no_grad():
        p.add_(p.grad.to(p.device), alpha=-0.1)
        p.copy_(p.cpu())  # whose device the gradient has as well


def keep_data_and_halve_what_was_kept(p, kept):
    for data in kept:
        data.mul_(0.99)
    kept.append(p.data)


@pytest.mark.parametrize("share", [1.5, 0.5])
@pytest.mark.parametrize("steps_too", [False, True])
@pytest.mark.parametrize(
    "write",
    [
        halve_data,
        halve_a_view_of_data,
        halve_a_view,
        replace_data,
        step_where_it_lives,
        keep_data_and_halve_what_was_kept,
    ],
)
def test_what_a_post_accumulate_hook_writes_reaches_the_next_forward(write, steps_too, share):
    """As LOMO's does, or any other step that is made in backward."""

    def loop(model, optimizer, target):
        kept = []

        def hook(p):
            write(p, kept)
            if not steps_too:
                p.grad = None

        handle = model[2].weight.register_post_accumulate_grad_hook(hook)
        seen = []
        for _ in range(9):
            loss = model(batch(target)).square().mean()
            loss.backward()
            if steps_too:
                optimizer.step()
            optimizer.zero_grad()
            seen.append(loss)
        handle.remove()
        kept.clear()
        return seen

    assert_twins(mlp, loop, share=share)


def test_double_backward():
    def loss_of(model, target):
        x = batch(target).requires_grad_()
        (gx,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return (gx.norm() - 1).square()

    assert_twins(mlp, partial(train, loss_of=loss_of), share=0.9)


def test_gradients_of_gradients_with_respect_to_parameters():
    def loop(model, optimizer, target):
        x = batch(target)
        grads = torch.autograd.grad(model(x).square().mean(), list(model.parameters()), create_graph=True)
        penalty = sum(g.square().sum() for g in grads)
        penalty.backward()
        for parameter in model.parameters():
            seen.append(parameter.grad.clone().cpu())
            parameter.grad = None
        return [penalty.item()]

    seen: list[torch.Tensor] = []
    assert_twins(mlp, loop, share=0.95)
    half = len(seen) // 2
    for got, expected in zip(seen[half:], seen[:half], strict=True):
        assert torch.equal(got, expected)


class InnerStep(nn.Module):
    """A step of gradient descent within the forward, which backward goes through."""

    def __init__(self):
        super().__init__()
        self.inner, self.scale, self.outer = (
            nn.Linear(64, 64),
            nn.Parameter(torch.ones(64)),
            nn.Linear(64, 64),
        )

    def forward(self, x):
        weights = self.inner.weight, self.scale
        inner = (self.inner(x.detach()) * self.scale).square().mean()
        weight, scale = (w - 0.1 * g for w, g in zip(weights, self.gradients(inner, weights), strict=True))
        return self.outer(F.linear(x, weight, self.inner.bias) * scale)

    def gradients(self, loss, weights):
        return torch.autograd.grad(loss, weights, create_graph=True)


class InnerStepByName(InnerStep):
    def gradients(self, loss, weights):
        return torch.autograd.grad(loss, dict(enumerate(weights)), create_graph=True).values()


@pytest.mark.parametrize("share", [0.6, 3.0])
@pytest.mark.parametrize(
    "kind",
    [
        InnerStep,
        pytest.param(
            InnerStepByName,
            marks=pytest.mark.skipif(TorchVersion(torch.__version__) < "2.13", reason="torch takes no dict"),
        ),
    ],
)
def test_an_inner_step_within_the_forward(kind, share):
    assert_twins(kind, train, share=share)


def test_retain_graph_and_a_second_backward():
    def loop(model, optimizer, target):
        seen = []
        for _ in range(3):
            loss = model(batch(target)).square().mean()
            loss.backward(retain_graph=True)
            seen.append([p.grad.clone() for p in model.parameters()])
            loss.backward()
            seen.append([p.grad for p in model.parameters()])
            optimizer.step()
            optimizer.zero_grad()
        return seen

    assert_twins(mlp, loop)


def test_several_forwards_before_one_backward():
    def loop(model, optimizer, target):
        seen = []
        for _ in range(3):
            losses = [model(batch(target)).square().mean() for _ in range(3)]
            sum(losses).backward()
            seen.append([*losses, *[p.grad for p in model.parameters()]])
            optimizer.step()
            optimizer.zero_grad()
        return seen

    assert_twins(mlp, loop)


def test_several_losses_backward_one_after_the_other():
    def loop(model, optimizer, target):
        seen = []
        for _ in range(3):
            losses = [model(batch(target)).square().mean() for _ in range(2)]
            for loss in reversed(losses):
                loss.backward()
            seen.append([p.grad for p in model.parameters()])
            optimizer.step()
            optimizer.zero_grad()
        return seen

    assert_twins(mlp, loop)


def test_a_loss_that_uses_parameters_outside_the_model():
    def loss_of(model, target):
        decay = sum(p.square().sum() for p in model.parameters())
        return model(batch(target)).square().mean() + 1e-3 * decay

    assert_twins(mlp, partial(train, loss_of=loss_of))


def test_a_parameter_used_on_the_device_outside_the_model():
    def loss_of(model, target):
        y = model(batch(target))
        return F.linear(y, model[0].weight).square().mean() + (y @ model[2].weight).mean()

    assert_twins(mlp, partial(train, loss_of=loss_of))


def test_a_submodule_called_directly():
    def loss_of(model, target):
        return model[4](batch(target)).square().mean() + model[0](batch(target)).mean()

    assert_twins(mlp, partial(train, loss_of=loss_of), share=0.8)


class Coder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = mlp(depth=2)
        self.decoder = mlp(depth=2)
        self.scale = nn.Parameter(torch.ones(64))

    def encode(self, x):
        return self.encoder(x) * self.scale

    def forward(self, x):
        return self.decoder(self.encode(x))


def test_a_method_other_than_forward():
    def loop(model, optimizer, target):
        seen = []
        for _ in range(3):
            loss = model.encode(batch(target)).square().mean()
            loss.backward()
            seen.append([loss, *[p.grad for p in model.parameters() if p.grad is not None]])
            optimizer.step()
            optimizer.zero_grad()
            loss = model(batch(target)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss)
        return seen

    assert_twins(Coder, loop, share=0.8)


def test_two_managed_models_whose_gradients_flow_through_each_other():
    target = device()

    def run(manage):
        torch.manual_seed(0)
        first, second = mlp(depth=2), mlp(depth=2)
        if not manage:
            first, second = first.to(target), second.to(target)
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, foreach=False) for m in (first, second)]
        managers = []
        budget = torch.accelerator.memory_allocated() + (600 << 10)
        if manage:
            for model, optimizer in zip((first, second), optimizers, strict=True):
                managers.append(hetero.manage(model, optimizer, device=target, device_budget=budget))
        torch.manual_seed(1)
        seen = []
        for _ in range(3):
            loss = second(first(batch(target))).square().mean() + first(second(batch(target))).mean()
            loss.backward()
            seen.append(
                [loss.item(), *[p.grad.cpu().clone() for m in (first, second) for p in m.parameters()]]
            )
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for manager in managers:
            manager.close()
        return seen

    expected = run(manage=False)
    gc.collect()
    got = run(manage=True)
    for a, b in zip(got, expected, strict=True):
        assert a[0] == b[0]
        assert all(torch.equal(x, y) for x, y in zip(a[1:], b[1:], strict=True))


class _Adjoint(torch.autograd.Function):
    """Three steps of ``x + f(x) / 10``, whose gradients are found again in backward, as an ODE's are."""

    @staticmethod
    def forward(ctx, f, x, *parameters):
        ctx.f = f
        for _ in range(3):
            x = x + f(x) / 10
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        (x,), parameters = ctx.saved_tensors, list(ctx.f.parameters())
        total = [torch.zeros_like(p, device=gradient.device) for p in parameters]
        for _ in range(3):
            with torch.enable_grad():
                before = x.detach().requires_grad_()
                change = ctx.f(before) / 10
                inner, *more = torch.autograd.grad(change, [before, *parameters], gradient)
            x, gradient = x - change.detach(), gradient + inner
            total = [one + other.to(one.device) for one, other in zip(total, more, strict=True)]
        return None, gradient, *total


class Adjoint(nn.Module):
    def __init__(self):
        super().__init__()
        self.f, self.out = mlp(depth=2), mlp(depth=2)

    def forward(self, x):
        return self.out(_Adjoint.apply(self.f, x, *self.f.parameters()))


@pytest.mark.parametrize("places", ["homes_on_device", "speculating", None])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_gradients_taken_within_a_backward_are_not_those_it_accumulates(places, micro_batches, request):
    if places is not None:
        request.getfixturevalue(places)

    loop = partial(losses, steps=8, micro_batches=micro_batches)
    on_device = places == "homes_on_device"
    manager = assert_twins(Adjoint, loop, share=0.8, device_homes=on_device)
    assert bool(manager._stm.plans.device_homes) == on_device


class Tied(nn.Module):
    """One weight used three times and evicted in between: the order of additions shows in the last bit."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(64, 64)
        self.between = nn.ModuleList([mlp(depth=1) for _ in range(2)])

    def forward(self, x):
        x = self.shared(x)
        for block in self.between:
            x = self.shared(block(x))
        return x


def test_a_weight_used_three_times_adds_its_gradients_in_the_same_order(monkeypatch):
    fetched = []
    fetch = Residency._fetch
    monkeypatch.setattr(Residency, "_fetch", lambda self, t: (fetched.append(t.name), fetch(self, t)))
    assert_twins(Tied, partial(train, steps=3), budget=150 << 10)
    assert fetched.count("shared.weight") > 2 * 3  # more than once a forward and once a backward


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g @ w.t(), x.t() @ g


class KeepsReference(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.x, ctx.w = x, w
        return x @ w

    @staticmethod
    def backward(ctx, g):
        return g @ ctx.w.t(), ctx.x.t() @ g


class Custom(nn.Module):
    function: type[torch.autograd.Function] = Scale

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(64, 64) / 8) for _ in range(6)])

    def forward(self, x):
        for weight in self.weights:
            x = torch.tanh(self.function.apply(x, weight))
        return x


class CustomKeeping(Custom):
    function = KeepsReference


def test_custom_functions_that_take_parameters():
    assert_twins(Custom, train)


scale = Scale.apply


def test_a_custom_function_whose_apply_was_taken_before():
    """As a module's head has it. Since torch 2.15 it is the C function, which nobody can stand in for."""

    class Taken(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(64, 64) / 8)

        def forward(self, x):
            return scale(x, self.w)

    if not isinstance(scale, types.BuiltinMethodType):
        assert_twins(Taken, train)
        return
    model, target = Taken(), device()
    with hetero.manage(model, device=target, device_budget="1MiB"):
        loss = model(batch(target)).square().mean()
        with pytest.raises(RuntimeError, match="invalid gradient") as raised:
            loss.backward()
        assert any("call MyFunction.apply(...)" in note for note in raised.value.__notes__)


def test_custom_functions_that_keep_a_parameter_in_ctx():
    assert_twins(CustomKeeping, train, share=0.95)


def test_in_place_edit_of_a_saved_parameter_is_the_same_error():
    def loop(model, optimizer, target):
        loss = model(batch(target)).square().mean()
        with torch.no_grad():
            model[2].weight.add_(1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        return [model[2].weight]

    assert_twins(mlp, loop)


def test_in_place_edit_of_a_saved_activation_is_the_same_error():
    class Bad(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x):
            y = torch.exp(self.a(x))
            z = self.b(y)
            y.mul_(2)
            return z

    def loop(model, optimizer, target):
        loss = model(batch(target)).sum()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        return [loss]

    assert_twins(Bad, loop, share=0.95)


def test_edit_of_parameters_through_data_between_steps():
    def loop(model, optimizer, target):
        seen = []
        for _ in range(4):
            seen.append(train(model, optimizer, target, 1))
            for p in model.parameters():
                p.data.clamp_(-0.05, 0.05)
        return seen

    assert_twins(mlp, loop)


class Normalised(nn.Module):
    """Writes to its own weight inside forward."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(6)])

    def forward(self, x):
        for layer in self.layers:
            with torch.no_grad():
                layer.weight.div_(layer.weight.norm())
                layer.bias.data.clamp_(-0.01, 0.01)
            x = layer(x)
        return x


def test_in_place_writes_inside_forward_reach_home():
    def loop(model, optimizer, target):
        seen = train(model, optimizer, target)
        return [seen, list(model.parameters())]

    assert_twins(Normalised, loop, share=0.7)


def test_in_place_write_to_a_leaf_is_refused():
    class Bad(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64, 64))

        def forward(self, x):
            self.weight.mul_(2)
            return x @ self.weight

    def loop(model, optimizer, target):
        with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
            model(batch(target))
        return [model.weight]

    assert_twins(Bad, loop, share=1.5)


def test_casts_under_autocast_do_not_stay_until_backward():
    def stack():
        return nn.Sequential(*[nn.Linear(128, 128) for _ in range(16)])

    def loss_of(model, target):
        with torch.autocast(target.type, dtype=torch.bfloat16):
            return model(batch(target, 4, 128)).float().square().mean()

    casts = 16 * 128 * 128 * 2
    assert_twins(stack, partial(train, loss_of=loss_of), budget=casts * 3 // 4)


def test_a_cast_that_was_written_is_saved_as_it_is():
    class Halved(nn.Module):
        def __init__(self):
            super().__init__()
            self.weights = nn.ParameterList([nn.Parameter(torch.randn(64, 64) / 8) for _ in range(4)])

        def forward(self, x):
            for weight in self.weights:
                low = weight.to(torch.bfloat16)
                with torch.no_grad():
                    low.mul_(0.5)
                x = torch.tanh(x.to(torch.bfloat16) @ low).float()
            return x

    assert_twins(Halved, train, share=0.9)


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="torch has no grad_dtype")
@pytest.mark.parametrize("share", [0.4, 0.7])
def test_gradients_that_autograd_casts_at_home(share):
    def loop(model, optimizer, target):
        for parameter in model.parameters():
            parameter.grad_dtype = torch.float32
        seen = []
        for _ in range(5):
            model(batch(target, 8, 128).to(torch.bfloat16)).float().square().mean().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    assert parameter.grad.dtype is torch.float32
                    seen.append(parameter.grad.clone())
                    parameter.sub_((parameter.grad * 1e-2).to(parameter.dtype))
                    parameter.grad = None
        return seen

    assert_twins(lambda: mlp(128).to(torch.bfloat16), loop, share=share)


@pytest.mark.parametrize("share", [0.7, 4.0])
@pytest.mark.parametrize("steps_within", [False, True])
@pytest.mark.parametrize("looks", [False, True])
def test_backwards_in_inference_mode_and_out_of_it_in_turns(looks, steps_within, share):
    def loop(model, optimizer, target):
        seen = []
        for step in range(10):
            loss = model(batch(target)).square().mean()
            seen.append(loss)
            is_inference = torch.inference_mode(step % 2 == 1)
            with is_inference:
                loss.backward()
                if steps_within:
                    optimizer.step()
            if looks:
                seen += [p.grad.is_inference() for p in model.parameters()]
            if not steps_within:
                optimizer.step()
            optimizer.zero_grad()
        return seen

    assert_twins(mlp, loop, share=share)
