"""Hooks on parameters that compute with parameters find them where the gradient is: at home, or on the device."""

import pytest
from loops import losses, mlp
from settling import PLENTY
from twins import assert_twins

ALIKE = {
    "weight decay": lambda p: lambda g: g + 1e-2 * p.detach(),
    "data": lambda p: lambda g: g + 1e-2 * p.data,
    "sign": lambda p: lambda g: g + 1e-2 * p.sign(),
    "added": lambda p: lambda g: g.add(p, alpha=1e-2),
    "norm": lambda p: lambda g: g * p.norm(),
    "square": lambda p: lambda g: g * (p * p).mean(),
    "none": lambda p: lambda g: None,
}


def _each(make, parameters):
    return [p.register_hook(make(p)) for p in parameters]


@pytest.mark.parametrize("budget", [400 << 10, 600 << 10, PLENTY])
@pytest.mark.parametrize("make", ALIKE.values(), ids=ALIKE.keys())
def test_a_hook_computes_with_its_parameter(make, budget):
    def loop(model, optimizer, target):
        seen = losses(model, optimizer, target, 3)
        handles = _each(make, model.parameters())
        seen += losses(model, optimizer, target, 6)
        for handle in handles:
            handle.remove()
        return seen + losses(model, optimizer, target, 3)

    assert_twins(mlp, loop, budget=budget)


@pytest.mark.parametrize("budget", [400 << 10, PLENTY])
def test_hooks_from_before_are_the_users_own_again_afterwards(budget):
    made = []

    def build():
        model = mlp()
        made[:] = model, [ALIKE["sign"](p) for p in model.parameters()]
        for p, hook in zip(model.parameters(), made[1], strict=True):
            p.register_hook(hook)
        return model

    def loop(model, optimizer, target):
        return losses(model, optimizer, target, 6)

    assert_twins(build, loop, budget=budget)
    model, hooks = made
    assert [list(p._backward_hooks.values()) for p in model.parameters()] == [[hook] for hook in hooks]


def test_a_hook_scales_another_parameters_gradient():
    def loop(model, optimizer, target):
        first, last = next(iter(model.parameters())), list(model.parameters())[-2]

        def scale(gradient):
            last.grad.mul_(last.norm())  # it has come before

        first.register_hook(scale)
        return losses(model, optimizer, target, 6)

    assert_twins(mlp, loop, budget=400 << 10)
    assert_twins(mlp, loop, budget=PLENTY)
