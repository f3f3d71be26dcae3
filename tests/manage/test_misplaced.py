"""A forward that meets tensors of the host says which they are."""

import pytest
import torch
from loops import mlp
from torch import nn
from torch.func import functional_call, grad
from twins import device

import hetero


def note_of(call):
    with pytest.raises(RuntimeError) as caught:
        call()
    notes = getattr(caught.value, "__notes__", [])
    assert len(notes) == 1, notes
    return notes[0]


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, batch, factor=1.0):
        out = self.inner(batch["x"]) * self.scale
        return out * factor


def test_an_input_on_the_host_is_named():
    target = device()
    with hetero.manage(mlp(), device=target, device_budget="16MiB") as manager:
        note = note_of(lambda: manager._model(torch.ones(2, 64)))
    assert "argument 0: move inputs to manager.device" in note
    assert str(target) in note


def test_inputs_within_containers_and_by_name_are_named():
    target = device()
    model = Named()
    with hetero.manage(model, device=target, device_budget="16MiB"):
        there, here = torch.ones(2, 8).to(target), torch.ones(2, 8)
        assert "argument batch['x']:" in note_of(lambda: model(batch={"x": here}))
        assert "argument factor:" in note_of(lambda: model({"x": there}, factor=here))
        model({"x": there}, factor=torch.tensor(2.0))  # a number may be anywhere


def test_what_was_added_to_the_model_on_the_host_is_named_and_works_on_the_device():
    target = device()
    model = Named()
    with hetero.manage(model, device=target, device_budget="16MiB") as manager:
        batch = {"x": torch.ones(2, 8).to(target)}
        before = model(batch)
        model.inner = nn.Sequential(model.inner, nn.Linear(8, 8))
        note = note_of(lambda: model(batch))
        assert (
            "parameter inner.1.weight (not managed: it came after hetero.manage, or by functional_call)"
            in note
        )
        assert "manage again" in note
        model.inner[1].to(manager.device)
        model.scale = torch.ones(8)
        assert "buffer scale:" in note_of(lambda: model(batch))
        model.scale = model.scale.to(manager.device)
        model.inner = model.inner[0]
        assert torch.equal(model(batch), before)


def test_parameters_that_are_given_to_functional_call_on_the_host_are_named():
    target = device()
    model = Named()
    with hetero.manage(model, device=target, device_budget="16MiB"):
        batch = {"x": torch.ones(2, 8).to(target)}
        given = {name: 0.5 * p.detach() for name, p in model.named_parameters()}
        by_grad = grad(lambda p: functional_call(model, p, (batch,)).sum())
        for call in (lambda: functional_call(model, given, (batch,)), lambda: by_grad(given)):
            note = note_of(call)
            assert "parameter inner.weight (not managed" in note
            assert "functional_call, on manager.device" in note


def test_other_errors_are_left_as_they_are():
    target = device()
    with hetero.manage(mlp(), device=target, device_budget="16MiB") as manager:
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
            manager._model(torch.ones(2, 63).to(target))
        assert not hasattr(caught.value, "__notes__")
