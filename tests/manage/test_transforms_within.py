"""Transforms of ``torch.func`` within the model's forward."""

import contextlib
from functools import partial

import pytest
import torch
from loops import batch, losses, mlp
from torch import nn
from torch.func import functional_call, grad, jacrev, vjp, vmap
from torch.utils.checkpoint import checkpoint
from twins import adamw, assert_same, assert_twins, device, plain

import hetero


class Within(nn.Module):
    """``transform(layer, x)``: what it does in its middle."""

    def __init__(self, transform, compiled=False):
        super().__init__()
        self.before, self.layer, self.after = mlp(depth=2), nn.Linear(64, 64), mlp(depth=2)
        self.transform = transform
        if compiled:
            self.compile(backend="eager")

    def forward(self, x):
        return self.after(self.transform(self.layer, self.before(x)))


def through_backward(layer, x):
    _, pull_back = vjp(lambda x: torch.tanh(layer(x)), x)
    return x + pull_back(torch.ones_like(x))[0]


def energy(x):
    return (x**3).sum()


def loss_of(layer, parameters, x):
    return functional_call(layer, parameters, x).square().mean()


def inner_step(layer, x, taken=lambda p: p):
    """A gradient step within forward, through which the outer loss is differentiated."""
    parameters = {name: taken(p) for name, p in layer.named_parameters()}
    slopes = grad(loss_of, argnums=1)(layer, parameters, x)
    return functional_call(layer, {name: p - slopes[name] for name, p in parameters.items()}, x)


def of_each_row(layer, x):
    slopes = vmap(grad(partial(loss_of, layer)), in_dims=(None, 0))(dict(layer.named_parameters()), x)
    x = x + slopes["weight"].sum(-1) + slopes["bias"]
    del slopes
    # Autograd's thread of the device holds what a backward has returned until it comes to the next one, or waits for
    # it: by chance up to here. 8 gradients of the weight are 16 % of the budget.
    return x + grad(energy)(x)


TRANSFORMS = {
    "grad of what is saved": lambda layer, x: layer(x) + grad(energy)(x),
    "grad of what is detached": lambda layer, x: layer(x) + grad(energy)(x.detach()),
    "grad through the layer": lambda layer, x: x + grad(lambda x: torch.tanh(layer(x)).sum())(x),
    "of each row": lambda layer, x: x + vmap(grad(lambda x: torch.tanh(layer(x)).sum()))(x),
    "grad of grad": lambda layer, x: layer(x) + grad(lambda x: grad(energy)(x).sum())(x),
    "vjp": through_backward,
    "jacrev": lambda layer, x: layer(x) + vmap(jacrev(torch.sin))(x).sum(-1),
    "step of parameters": inner_step,
    "step of copies": partial(inner_step, taken=torch.clone),
    "step of constants": partial(inner_step, taken=torch.detach),
    "of parameters, for each row": of_each_row,
    "over rows of a parameter": lambda layer, x: x + vmap(lambda w, b: x @ w + b)(layer.weight, layer.bias).T,
    "checkpointed": lambda layer, x: checkpoint(inner_step, layer, x, use_reentrant=True),
}


def train(model, optimizer, target):
    return losses(model, optimizer, target, 8)


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("share", [0.45, 0.7, 3.0])
def test_within_the_models_forward(transform, share):
    assert_twins(lambda: Within(TRANSFORMS[transform]), train, share=share)


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("share", [0.7, 3.0])
def test_under_autocast(transform, share):
    """Which casts the weight within the transform anew, and outside of it once."""

    def twice(layer, x):
        return layer(x) + TRANSFORMS[transform](layer, x) + layer(x)

    class Autocast(Within):
        def forward(self, x):
            with torch.autocast(x.device.type, torch.bfloat16):
                return super().forward(x)

    assert_twins(lambda: Autocast(twice), train, share=share)


@pytest.mark.skipif(
    torch.__version__.startswith("2.11"), reason="Dynamo wants what a transform wraps to be leaves"
)
# Dynamo looks at the gradients of its inputs, be they leaves or not, managed or not.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("transform", ["grad of what is saved", "grad through the layer", "vjp"])
@pytest.mark.parametrize("share", [0.7, 3.0])
def test_within_what_is_compiled(transform, share):
    assert_twins(lambda: Within(TRANSFORMS[transform], compiled=True), train, share=share)


def test_hooks_of_the_callers_are_refused_as_ever_and_training_goes_on():
    def loop(model, optimizer, target):
        seen = train(model, optimizer, target)
        with pytest.raises(RuntimeError, match="saved tensor hooks"), torch.autograd.graph.save_on_cpu():
            model(batch(target))
        return seen + train(model, optimizer, target)

    assert_twins(lambda: Within(TRANSFORMS["vjp"]), loop, share=0.7)


def test_within_a_model_that_another_one_calls():
    """Both have hooks on then."""

    class Outer(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.body, self.inner = mlp(), [inner]

        def forward(self, x):
            return self.body(self.inner[0](x))

    def run(target, **keywords):
        torch.manual_seed(0)
        inner = Within(TRANSFORMS["grad through the layer"])
        models = [inner, Outer(inner)]
        optimizers = [adamw(model) for model in models]
        with contextlib.ExitStack() as stack:
            for model, optimizer in zip(models, optimizers, strict=True):
                if keywords:
                    stack.enter_context(hetero.manage(model, optimizer, device=target, **keywords))
                else:
                    model.to(target)
            seen = []
            for _ in range(6):
                loss = models[1](batch(target)).square().mean()
                loss.backward()
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
                seen.append(loss)
            return plain(seen)

    target = device()
    assert_same(run(target, device_budget="2MiB"), run(target), "losses")


def test_what_is_saved_after_a_transform_may_leave_again():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.within, self.after = Within(TRANSFORMS["vjp"]), mlp(depth=8)

        def forward(self, x):
            return self.after(self.within(x))

    def loop(model, optimizer, target):
        seen = []
        for _ in range(6):
            loss = model(batch(target, rows=512)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss)
        return seen

    assert assert_twins(Model, loop, share=0.4).stats.activation_out_bytes > 0
