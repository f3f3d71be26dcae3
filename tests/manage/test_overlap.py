"""Tensors of a model over the same bytes are found exactly, and refused before anything is changed."""

import pytest
import torch
from accelerators import device
from hypothesis import given
from hypothesis import strategies as st
from loops import losses
from torch import nn
from twins import assert_twins

import hetero
from hetero.stm.tensors.overlap import first_overlap


class Two(nn.Module):
    """Of one weight, and of what ``second`` makes of it."""

    def __init__(self, second):
        super().__init__()
        self.a = nn.Parameter(torch.randn(64, 64))
        second(self)

    def forward(self, x):
        return x @ self.a + (x @ self.b.reshape(64, -1)).mean()


def _buffer(view):
    def make(module):
        module.register_buffer("b", view(module.a.data))

    return make


def _parameter(view):
    def make(module):
        module.b = nn.Parameter(view(module.a.data))

    return make


VIEWS = {
    "all of it": lambda data: data,
    "transposed": lambda data: data.t(),
    "flat": lambda data: data.view(-1),
    "some columns": lambda data: data[:, 3:5],
    "one row": lambda data: data[7:8].t(),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("second", [_buffer, _parameter])
def test_what_shares_a_parameters_memory_is_refused_and_nothing_has_changed(second, view):
    model = Two(second(VIEWS[view]))
    address = model.a.data_ptr(), model.b.data_ptr()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(hetero.ManageError, match=r"over the same memory \(\d+ bytes\)"):
        hetero.manage(model, optimizer, device=device(), device_budget="4MiB")
    assert type(model.a) is nn.Parameter
    assert (model.a.data_ptr(), model.b.data_ptr()) == address


def test_the_refusal_names_both_and_says_how_many_bytes():
    model = Two(_buffer(VIEWS["some columns"]))
    with pytest.raises(hetero.ManageError, match=r"buffer b and parameter a .* \(512 bytes\)"):
        hetero.manage(model, None, device=device(), device_budget="4MiB")


class Slices(nn.Module):
    """Parameters that are slices of one storage, side by side."""

    def __init__(self, split):
        super().__init__()
        self.a, self.b = map(nn.Parameter, split(torch.randn(64, 128)))

    def forward(self, x):
        return torch.tanh(x @ self.a.reshape(64, 64)) @ self.b.reshape(64, 64)


SPLITS = {
    "columns": lambda flat: (flat[:, :64], flat[:, 64:]),
    "halves": lambda flat: (flat.view(-1)[:4096], flat.view(-1)[4096:]),
    "every other": lambda flat: (flat[:, ::2], flat[:, 1::2]),
}


@pytest.mark.parametrize("split", SPLITS)
def test_slices_of_one_storage_train_to_the_same_bits(split):
    assert_twins(lambda: Slices(SPLITS[split]), lambda *given: losses(*given, steps=6), share=0.9)


@st.composite
def _pairs(draw):
    flat = torch.zeros(24, dtype=torch.float32)
    pair = []
    for _ in range(2):
        rows, columns = draw(st.integers(1, 4)), draw(st.integers(1, 4))
        strides = draw(st.integers(0, 4)), draw(st.integers(0, 3))
        last = (rows - 1) * strides[0] + (columns - 1) * strides[1]
        offset = draw(st.integers(0, 23 - min(last, 23)))
        if last + offset < 24:
            pair.append(flat.as_strided((rows, columns), strides, offset))
    return flat, pair


@given(_pairs())
def test_overlaps_are_found_exactly_for_any_strides(drawn):
    flat, pair = drawn
    if len(pair) < 2:
        return
    first, second = pair
    first.fill_(1)
    touched = flat.clone()
    flat.zero_()
    second.fill_(1)
    shared = 4 * int((touched * flat).sum())
    found = first_overlap([("first", first), ("second", second)])
    assert (0 if found is None else found[2]) == shared
