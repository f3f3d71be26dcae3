"""``torch.func`` on a managed model: what it gives unmanaged."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from loops import backward, losses, mlp
from torch import nn
from torch.func import functional_call, grad, vmap
from twins import assert_twins, device

import hetero


def trained_between(look):
    def loop(model, optimizer, target):
        seen = []
        for _ in range(4):
            backward(model, target)
            optimizer.step()
            optimizer.zero_grad()
            seen.append(look(model, torch.randn(6, 64).to(target)))
        return seen

    return loop


def replaced(model, every=1):
    return {name: p.detach() for name, p in list(model.named_parameters())[::every]}


def on_device(parameters, like):
    return {name: p.to(like.device) for name, p in parameters.items()}


def test_a_call_with_other_parameters():
    def look(model, x):
        halves = {name: 0.5 * p for name, p in replaced(model).items()}
        return functional_call(model, on_device(halves, x), (x,))

    assert_twins(mlp, trained_between(look))


def test_a_call_with_the_managed_parameters_themselves():
    assert_twins(
        mlp, trained_between(lambda model, x: functional_call(model, dict(model.named_parameters()), (x,)))
    )


def test_gradients_by_transformation():
    def look(model, x):
        given = on_device(replaced(model), x)
        return list(grad(lambda p: functional_call(model, p, (x,)).square().mean())(given).values())

    assert_twins(mlp, trained_between(look), share=2.0)  # with a copy of all parameters of the caller's own


@pytest.mark.parametrize("transform", [grad, vmap])
def test_copies_within_a_transform_of_what_is_no_models(transform):
    target = device()
    weight = torch.randn(8, 8)

    def of(x):
        return (x.to(target) @ weight.to(target)).cpu().square().sum()

    x = torch.randn(4, 8, 8)
    expected = transform(of)(x)
    with hetero.manage(mlp(), device=target, device_budget="16MiB"):
        assert torch.equal(transform(of)(x), expected)


def test_gradients_by_transformation_after_a_write_that_a_kept_view_has_to_follow():
    class Shows(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(64, 64)

        def forward(self, x):
            return self.linear(x), self.linear.weight.t()

    def loop(model, optimizer, target):
        seen = []
        for _ in range(4):
            x = torch.randn(6, 64).to(target)
            out, view = model(x)
            out.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            given = {name: p.clone() for name, p in on_device(replaced(model), x).items()}
            model.linear.weight.data.view(-1).data.mul_(0.9)  # no version tells
            of_these = grad(lambda p: functional_call(model, p, (x,))[0].square().mean())  # noqa: B023
            seen.append(list(of_these(given).values()))
            del view
        return seen

    assert_twins(Shows, loop, share=2.0)


def test_a_transform_over_the_models_own_parameters_is_refused_and_changes_nothing():
    target = device()
    model = mlp()
    with hetero.manage(model, device=target, device_budget="16MiB"):
        x = torch.ones(2, 64).to(target)
        before = model(x)
        given = on_device(replaced(model, every=3), x)
        with pytest.raises(hetero.ManageError, match=r"torch\.func .* all parameters"):
            grad(lambda p: functional_call(model, p, (x,)).square().mean())(given)
        with pytest.raises(hetero.ManageError, match="autograd"):
            vmap(model)(x)
        assert torch.equal(model(x), before)


def test_gradients_of_each_sample():
    def look(model, x):
        given = on_device(replaced(model), x)
        of_one = grad(lambda p, row: functional_call(model, p, (row[None],)).square().mean())
        return list(vmap(of_one, in_dims=(None, 0))(given, x).values())

    assert_twins(mlp, trained_between(look), share=2.0)


def test_gradients_of_several_outputs_at_once_are_refused_and_training_goes_on():
    refused = []

    def loop(model, optimizer, target):
        seen = []
        for _ in range(4):
            outputs = model(torch.randn(6, 64).to(target)).mean(0)[:3]
            if any(p.device != target for p in model.parameters()):
                with pytest.raises(hetero.errors.ManageError, match="one output's at a time") as error:
                    torch.autograd.grad(
                        outputs,
                        [model[0].weight],
                        torch.eye(3).to(target),
                        is_grads_batched=True,
                        retain_graph=True,
                    )
                refused.append(str(error.value))
            outputs.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(outputs)
        return seen

    assert_twins(mlp, loop, share=0.6)
    assert len(refused) == 4


def _jacobian_penalty(model, optimizer, target):
    """By gradients of all outputs at once, which are differentiated again."""
    seen = []
    for _ in range(5):
        x = torch.randn(2, 64).to(target)
        made = torch.autograd.functional.jacobian(model, x, create_graph=True, vectorize=True)
        loss = made.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.detach())
    return seen


@pytest.mark.parametrize("share", [0.9, 1.2])
def test_batched_gradients_that_are_differentiated_again(share):
    assert_twins(mlp, _jacobian_penalty, share=share)


def test_batched_gradients_that_have_nothing_to_do_with_the_model():
    target = device()
    weight = torch.randn(4, 4, device=target)

    def jacobian(x):
        return torch.autograd.functional.jacobian(
            lambda x: (x @ weight).tanh(), x, create_graph=True, vectorize=True
        )

    x = torch.randn(4, device=target)
    expected = jacobian(x)
    with hetero.manage(mlp(), device=target, device_budget="16MiB"):
        assert torch.equal(jacobian(x), expected)


class Maps(nn.Module):
    """Its forward is a function of one sample, or of one of a row of them, for all."""

    def __init__(self, randomness="error", depth=1):
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)
        self.frozen = nn.Parameter(torch.randn(64), requires_grad=False)
        self.randomness, self.depth = randomness, depth

    def forward(self, x):
        one = self.of_one
        for _ in range(self.depth):
            one = vmap(one, randomness=self.randomness)
        return one(x.unflatten(0, (-1,) + (2,) * (self.depth - 1))).reshape(x.shape)

    def of_one(self, row):
        hidden = self.first(row).relu() * self.frozen @ self.last.weight
        return F.dropout(self.last(hidden), 0.0 if self.randomness == "error" else 0.5)


@pytest.mark.parametrize("share", [0.6, 4.0])
@pytest.mark.parametrize("build", [Maps, partial(Maps, "different"), partial(Maps, depth=2)])
def test_vmap_within_the_models_forward(build, share):
    assert_twins(build, partial(losses, steps=6), share=share)
