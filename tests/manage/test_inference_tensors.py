"""Inference tensors that are given to parameters, ``p.data = x`` within `torch.inference_mode`, as a perturbation does
that trains without gradients (MeZO): numbers, and what autograd says of such a parameter then, are as without us."""

import contextlib

import pytest
import torch
from loops import batch, losses, mlp, train
from settling import PLENTY, is_intercepted, managed_mlp, settle
from torch import nn
from twins import adamw, assert_twins, device

import hetero
from hetero.stm.tensors.inference import has_counter, make_inference, make_ordinary, ordinary_alias

# Of the device: what is intercepted, where parameters leave, and what settles. The loops run long enough for that.
BUDGETS = pytest.mark.parametrize("budget", [None, PLENTY], ids=["moves", "fits"])


def evaluate(model, target):
    with torch.inference_mode():
        return model(batch(target)).sum()


def perturb(model, scale=1e-2):
    with torch.inference_mode():
        for p in model.parameters():
            p.data = p.data + scale * torch.randn(p.shape).to(p.device)


def settled_loop(loop):
    """``loop``, after iterations in which those settle that fit."""

    def settling(model, optimizer, target):
        seen = losses(model, optimizer, target, steps=6)
        seen += [evaluate(model, target) for _ in range(4)]
        return [*seen, *loop(model, optimizer, target)]

    return settling


@contextlib.contextmanager
def errors_noted(seen):
    try:
        yield
    except RuntimeError as error:
        seen.append(str(error))


def perturbed(model, optimizer, target):
    seen = []
    for _ in range(3):
        perturb(model)
        seen.append(evaluate(model, target))
        perturb(model, -1e-2)
        seen.append(evaluate(model, target))
    return seen


def written_to(model, optimizer, target):
    """In all ways, of which nobody counts some."""
    perturb(model)
    seen = [evaluate(model, target)]
    for mode in (torch.inference_mode, torch.no_grad):
        for add in (
            lambda p: p.add_(0.1),
            lambda p: p.data.add_(0.1),
            lambda p: torch._foreach_add_([p], 0.1),
            lambda p: p.detach().mul_(1.1),
        ):
            with mode():
                for p in model.parameters():
                    add(p)
                seen.append(model(batch(target)).sum())
    return seen


def aliased(model, optimizer, target):
    seen = []
    with torch.inference_mode():
        p = next(model.parameters())
        p.data = kept = p.data + 0.1
        for _ in range(2):
            seen.append(evaluate(model, target))
            kept.mul_(1.1)
        seen.append(evaluate(model, target))
        p.add_(1.0)
        seen.append(kept)
        p.data.add_(1.0)
        seen.append(kept)
    return [*seen, evaluate(model, target)]


def trained_then(model, optimizer, target):
    """Some are such, others are not: what is recorded is as it is, and what cannot be saved is refused."""
    seen = []
    with torch.inference_mode():
        model[0].bias.data = model[0].bias.data + 0.5
    seen += train(model, optimizer, target)
    with torch.inference_mode():
        model[4].weight.data = model[4].weight.data + 0.5
    with errors_noted(seen):
        train(model, optimizer, target)
    seen.append([p.is_inference() for p in model.parameters()])
    with torch.no_grad():
        for p in model.parameters():
            p.data = p.data.clone()
    seen.append([p.is_inference() for p in model.parameters()])
    optimizer.zero_grad()
    return [*seen, *losses(model, optimizer, target, steps=6)]


def set_instead(model, optimizer, target):
    """``p.set_(x)``, unlike ``p.data = x``, makes no inference tensor of ``p``."""
    with torch.inference_mode():
        given = [p.data + 0.1 for p in model.parameters()]
        for p, x in zip(model.parameters(), given, strict=True):
            p.set_(x)
    return [[p.is_inference() for p in model.parameters()], *losses(model, optimizer, target, steps=2)]


def of_numbers(model, optimizer, target):
    """Autograd records what is done with it and an ordinary number."""
    seen = []
    perturb(model)
    weight = model[0].weight
    with errors_noted(seen):
        (weight * weight).sum().backward()
    (weight * 2.0).sum().backward()
    return [*seen, weight.grad, weight.is_inference(), weight.requires_grad]


@BUDGETS
@pytest.mark.parametrize("loop", [perturbed, written_to, aliased, trained_then, set_instead, of_numbers])
def test_given_to_parameters(loop, budget):
    manager = assert_twins(mlp, settled_loop(loop), budget=budget)
    assert (manager.stats.settled_forwards > 0) == (budget is not None)


@pytest.mark.parametrize("settles", [False, True])
def test_a_parameter_stays_one_when_management_ends(settles):
    model, optimizer, manager, target = managed_mlp()
    if settles:
        settle(model, optimizer, manager, target)
    assert is_intercepted(model) != settles
    with torch.inference_mode():
        model[0].weight.data = model[0].weight.data + 1.0
        expected = model[0].weight.cpu().clone()
    manager.close()
    assert [p.is_inference() for p in model.parameters()] == [
        p is model[0].weight for p in model.parameters()
    ]
    assert torch.equal(model[0].weight, expected)
    x = torch.randn(8, 64, requires_grad=True)
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        model(x)
    with torch.no_grad():
        model[0].weight.data = model[0].weight.data.clone()
    model(x).sum().backward()
    assert model[0].weight.grad is not None


def test_given_with_precision():
    def run(mode):
        target = device()
        torch.manual_seed(0)
        model = mlp()
        seen = []
        with hetero.manage(model, device=target, device_budget="1MiB", precision=torch.bfloat16):
            for _ in range(3):
                with mode():
                    for p in model.parameters():
                        p.data = p.data + 1e-2 * torch.randn(p.shape)
                    seen.append(model(batch(target)).sum().item())
        return seen

    assert run(torch.inference_mode) == run(torch.no_grad)


class WithBuffer(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(64, 64))
        with torch.inference_mode():
            self.register_buffer("scale", torch.full((64,), 2.0))

    def forward(self, x):
        return super().forward(x) * self.scale


def test_a_buffer_that_was_made_in_inference_mode():
    """As after ``model.to(device)``, it is an ordinary one on the device. A model that is managed while tensors are
    there whose writes nobody counts is none of theirs."""
    with torch.inference_mode():
        uncounted = torch.ones(3)
    uncounted.data = torch.ones(3)
    assert not uncounted.is_inference()
    assert not has_counter(uncounted)
    assert_twins(WithBuffer, lambda *of: losses(*of, steps=6), budget=PLENTY, make_optimizer=adamw)


def test_become_and_cease_to_be_one_in_their_own_memory():
    parameter = nn.Parameter(torch.arange(6.0).view(2, 3).t())
    alias, address, version = parameter.detach(), parameter.data_ptr(), parameter._version
    make_inference(parameter)
    assert parameter.is_inference()
    assert (parameter.data_ptr(), parameter.stride(), parameter._version) == (address, (1, 3), version)
    make_ordinary(parameter)
    alias.add_(1.0)
    assert not parameter.is_inference()
    assert (parameter.data_ptr(), parameter.stride(), parameter._version) == (address, (1, 3), version + 1)
    with torch.inference_mode():
        made = torch.ones(3)[1:]
    ordinary = ordinary_alias(made)
    version = ordinary._version
    ordinary.add_(1.0)
    assert ordinary._version == version + 1
    assert not has_counter(made)
    assert made.tolist() == [2.0, 2.0]
