"""Parameters that are made of managed ones."""

import pytest
import torch
from accelerators import ON_CUDA, ON_HOST
from loops import batch, losses, mlp
from settling import PLENTY, managed_mlp, settle, step
from torch import nn
from torch.nn.utils import parametrizations
from twins import assert_twins, device

import hetero


def test_a_parameter_of_a_managed_one_is_ordinary_and_shares_its_memory():
    own = vars(nn.Parameter)["__new__"]
    target = device()
    model = mlp()
    with hetero.manage(model, device=target, device_budget="16MiB"):
        weight = model[0].weight
        made = nn.Parameter(weight)
        frozen = nn.Parameter(weight, requires_grad=False)
        assert type(made) is nn.Parameter
        assert made.requires_grad
        assert not frozen.requires_grad
        with torch.no_grad():
            weight.mul_(2.0)
        assert torch.equal(made, weight)
    assert vars(nn.Parameter)["__new__"] is own


@pytest.mark.skipif(ON_CUDA, reason=ON_HOST + ": the norm that it begins with is of what is at home")
def test_weights_parametrized_in_the_middle_of_training():
    def loop(model, optimizer, target):
        seen = []
        for number in range(6):
            if number == 3:
                known = {id(p) for p in model.parameters()}
                parametrizations.weight_norm(model[0])
                model[0].parametrizations.to(target)
                optimizer.add_param_group({"params": [p for p in model.parameters() if id(p) not in known]})
            seen += losses(model, optimizer, target, 1)
        return seen

    assert_twins(mlp, loop, share=0.9)


@pytest.mark.parametrize("share", [0.56, 0.57, 0.58])
@pytest.mark.parametrize("fused", [None, True])
def test_layers_that_are_added_in_the_middle_of_training(fused, share):
    """They are nobody's, on the device. What their step allocates there finds room."""

    def make_optimizer(model):
        return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, fused=fused)

    def loop(model, optimizer, target):
        seen = []
        for number in range(12):
            seen += losses(model, optimizer, target, 1)
            if number in (3, 6):
                added = nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 64)).to(target)
                optimizer.add_param_group({"params": added.parameters()})
                model.append(added)
        return seen

    assert_twins(lambda: mlp(depth=4), loop, share=share, make_optimizer=make_optimizer)


class Adapted(nn.Module):
    """A linear layer with an adapter of low rank (LoRA)."""

    def __init__(self, layer, target):
        super().__init__()
        self.layer = layer
        self.down = nn.Parameter(torch.randn(4, layer.in_features).to(target) / 8)
        self.up = nn.Parameter(torch.zeros(layer.out_features, 4).to(target))

    def forward(self, x):
        return self.layer(x) + x @ self.down.t() @ self.up.t()


def mostly_frozen():
    model = mlp()
    model.requires_grad_(False)
    model[-1].requires_grad_(True)
    return model


@pytest.mark.parametrize("has_optimizer_of_its_own", [False, True])
@pytest.mark.parametrize("share", [0.5, 0.75, 0.85, 1.1])
def test_an_adapter_that_is_added_makes_another_model_of_it(share, has_optimizer_of_its_own):
    """What the layers behind it save had not to be saved before."""

    def loop(model, optimizer, target):
        optimizers, seen = [optimizer], []
        for number in range(10):
            if number == 5:
                model[0] = adapted = Adapted(model[0], target)
                more = [adapted.down, adapted.up]
                if has_optimizer_of_its_own:
                    optimizers.append(torch.optim.AdamW(more, lr=1e-2))
                else:
                    optimizer.add_param_group({"params": more})
            loss = model(batch(target, 64)).square().mean()
            loss.backward()
            for each in optimizers:
                each.step()
                each.zero_grad()
            seen.append(loss.detach())
        return seen

    assert_twins(mostly_frozen, loop, share=share)


@pytest.mark.parametrize("has_optimizer_of_its_own", [False, True])
def test_a_model_settles_again_with_its_adapter(has_optimizer_of_its_own):
    """Also where nothing else is trained any more, and no step of ours ends an iteration."""
    model, optimizer, manager, target = managed_mlp(PLENTY, build=mostly_frozen)
    settle(model, optimizer, manager, target)
    model[0] = adapted = Adapted(model[0], target)
    more = [adapted.down, adapted.up]
    if has_optimizer_of_its_own:
        model[-1].requires_grad_(False)
        optimizer = torch.optim.AdamW(more, lr=1e-2)
    else:
        optimizer.add_param_group({"params": more})
    step(model, optimizer, target)
    assert not manager.plan.everything_fits
    settle(model, optimizer, manager, target)
    manager.close()


def test_who_makes_an_optimizer_anew_makes_no_other_model():
    model, optimizer, manager, target = managed_mlp(PLENTY, build=mostly_frozen)
    model[0] = adapted = Adapted(model[0], target)
    for _ in range(8):
        other = torch.optim.AdamW([adapted.down, adapted.up], lr=1e-2)
        step(model, optimizer, target)
        other.step()
        other.zero_grad()
    assert manager.plan.everything_fits
    manager.close()
