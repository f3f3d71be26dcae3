"""What is made of a parameter in forward, of which torch does not tell it."""

import copy
import functools

import pytest
import torch
from loops import train
from torch import nn
from torch.utils.checkpoint import checkpoint
from twins import assert_same, assert_twins, device, plain

import hetero

WIDTH = 64
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")


class Marked(torch.Tensor):
    """A class of the user's."""


def _sparse(model, x, **more):
    places, values = model.places, model.values
    return torch.sparse.mm(torch.sparse_coo_tensor(places, values, (WIDTH, WIDTH), **more), x.t()).t()


def _sparse_by_name(model, x):
    weights = torch.sparse_coo_tensor(indices=model.places, values=model.values, size=(WIDTH, WIDTH))
    return torch.sparse.mm(weights, x.t()).t()


def _with_copies(model, x):
    twin = copy.deepcopy(model.first)
    assert all(type(p) is nn.Parameter and p.device == x.device for p in twin.parameters())
    return x + twin(x)


def _recomputed(use_reentrant):
    def make(model, x):
        return checkpoint(
            lambda y: y + copy.deepcopy(model.bias) + copy.copy(model.bias), x, use_reentrant=use_reentrant
        )

    return make


MADE = {
    "sparse": _sparse,
    "sparse of double": lambda model, x: _sparse(model, x.double(), dtype=torch.float64).float(),
    "sparse by name": _sparse_by_name,
    "subclass": lambda model, x: x + model.bias.as_subclass(torch.Tensor),
    "subclass of the user's": lambda model, x: (x + model.bias.as_subclass(Marked)).as_subclass(torch.Tensor),
    "copy": lambda model, x: x + copy.copy(model.bias),
    "deep copy": lambda model, x: x + copy.deepcopy(model.bias),
    "deep copy of a module": _with_copies,
    "copies in a checkpoint": _recomputed(False),
    "copies in a reentrant one": _recomputed(True),
}


class Making(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.make = make
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.values = nn.Parameter(torch.randn(4 * WIDTH))
        self.bias = nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("places", torch.randint(0, WIDTH, (2, 4 * WIDTH)))

    def forward(self, x):
        return self.last(self.make(self, self.first(x)).tanh())


@pytest.mark.parametrize("share", [0.8, 4.0])
@pytest.mark.parametrize("named", MADE)
def test_what_is_made_of_parameters_in_forward_is_on_the_device(named, share):
    assert_twins(lambda: Making(MADE[named]), functools.partial(train, steps=5), share=share)


def test_what_is_made_of_parameters_elsewhere_is_at_home():
    model = Making(_sparse)
    with hetero.manage(model, device=device(), device_budget="64MiB"):
        twin, weights = copy.deepcopy(model), torch.sparse_coo_tensor(model.places.cpu(), model.values)
        made = [copy.copy(model.bias), weights.to_dense(), model.bias.as_subclass(torch.Tensor)]
        assert {value.device.type for value in (*made, *twin.parameters())} == {"cpu"}
        assert weights.requires_grad
        assert_same(plain(list(twin.parameters())), plain([p.detach() for p in model.parameters()]), "copies")


def test_a_context_of_a_device_still_says_where_constructors_make_theirs():
    target = device()
    with hetero.manage(nn.Linear(WIDTH, WIDTH), device=target, device_budget="64MiB"), target:
        assert torch.sparse_coo_tensor([[0], [1]], [2.0]).device == target
    with target:
        assert torch.sparse_coo_tensor([[0], [1]], [2.0]).device == target
