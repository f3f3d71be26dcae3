"""Parameters that are made of managed ones."""

import pytest
import torch
from accelerators import ON_CUDA, ON_HOST
from loops import losses, mlp
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
