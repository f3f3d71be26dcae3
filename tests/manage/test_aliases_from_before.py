"""Who shares memory with parameters before they are managed is told that it will no longer."""

import copy
import warnings

import pytest
import torch
from loops import mlp
from settling import managed_mlp
from torch import nn
from torch.nn.utils import parametrizations
from twins import adamw

ALIASES = {
    "data": lambda model: [p.data for p in model.parameters()],
    "flat views": lambda model: [p.detach().view(-1) for p in model.parameters()],
    "states": lambda model: model.state_dict(),
    "of an optimizer": lambda model: vars(adamw(model)).setdefault(
        "copies", [p.data for p in model.parameters()]
    ),
    "with a graph": lambda model: model[0].weight.T,
    "an attribute": lambda model: setattr(model, "first", model[0].weight.data),
    "another parameter": lambda model: nn.Parameter(model[0].weight.data),
}


@pytest.mark.parametrize("taken", ALIASES.values(), ids=ALIASES.keys())
def test_an_alias_from_before_is_warned_of(taken):
    held = []

    def build():
        model = mlp()
        held.append(taken(model))
        return model

    with pytest.warns(
        RuntimeWarning, match=r"parameters share memory with tensors from before .manage. .*0\.weight"
    ):
        _, _, manager, _ = managed_mlp(build=build)
    manager.close()


def _tied():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model[1].weight = model[0].weight
    return model


def _loaded(assign):
    model = mlp()
    model.load_state_dict(copy.deepcopy(mlp().state_dict()), assign=assign)
    return model


NONE = {
    "tied": _tied,
    "loaded": lambda: _loaded(False),
    "assigned": lambda: _loaded(True),
    "recurrent": lambda: nn.LSTM(64, 64),
    "batch norm": lambda: nn.BatchNorm1d(64),
    "spectral norm": lambda: nn.utils.spectral_norm(nn.Linear(64, 64)),
    "parametrized": lambda: parametrizations.orthogonal(nn.Linear(64, 64)),
    "sparse buffer": lambda: _with_buffer(torch.eye(64).to_sparse()),
}


def _with_buffer(buffer):
    model = mlp()
    model.register_buffer("kept", buffer)
    return model


@pytest.mark.parametrize("build", NONE.values(), ids=NONE.keys())
def test_where_nobody_has_one_nobody_is_warned(build):
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        _, _, manager, _ = managed_mlp(build=build)
    manager.close()
