"""Wrappers that reduce gradients read them below interception: around a managed model they are refused."""

import pytest
import torch
from loops import batch, mlp
from sharded import one_rank
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from twins import adamw, device

import hetero


@pytest.mark.parametrize("wrapper", [DataParallel, DistributedDataParallel])
@pytest.mark.parametrize("around", ["the model", "what it is a part of"])
def test_around_a_managed_model_they_are_not_made(wrapper, around):
    one_rank()
    model = mlp(depth=1)
    with hetero.manage(model, adamw(model), device=device(), device_budget="1MiB"):
        with pytest.raises(hetero.ManageError, match=f"{wrapper.__name__} around a managed model"):
            wrapper(model if around == "the model" else nn.Sequential(model, nn.GELU()))
        assert wrapper(nn.Linear(2, 2)).module is not None


def test_one_from_before_may_only_evaluate():
    one_rank()
    target, model = device(), mlp(depth=1)
    wrapper = DistributedDataParallel(model)
    optimizer = adamw(model)
    with hetero.manage(model, optimizer, device=target, device_budget="1MiB"):
        with pytest.raises(hetero.ManageError, match="call the model itself"):
            wrapper(batch(target))
        model(batch(target)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        x = batch(target)
        with torch.no_grad():
            assert torch.equal(wrapper(x), model(x))
    wrapper(batch(torch.device("cpu"))).square().mean().backward()  # and afterwards it is as it was
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("scripted", [torch.jit.script, lambda model: nn.Sequential(torch.jit.script(model))])
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_what_torchscript_runs_cannot_be_managed(scripted):
    with pytest.raises(hetero.ManageError, match="Linear is a TorchScript module"):
        hetero.manage(scripted(nn.Linear(4, 4)), device=device())
