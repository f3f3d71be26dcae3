"""`hetero.autograd.outside_inference`: what is made within it, wherever it is entered."""

import contextlib

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hetero.autograd import outside_inference, recording


def made():
    """What tells how autograd sees tensors that are made here."""
    leaf = torch.zeros(4, requires_grad=True)
    product = leaf * 2
    bare = product.detach()
    bare.add_(1)
    return {
        "leaf is for inference": leaf.is_inference(),
        "is recorded": product.requires_grad,
        "counts writes": bare.is_inference() or bare._version == 1,
        "knows views": leaf[:2]._is_view(),
    }


def directly(look):
    return look()


def in_a_mode(look):
    """Below autograd."""
    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if not seen:
                seen.append(None)
                seen[0] = look()
            return func(*args, **(kwargs or {}))

    with Mode():
        torch.ones(2)
    return seen[0]


def in_a_function(look, *, backward=False):
    seen = []

    class Asked(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            if not backward:
                seen.append(look())
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            if backward:
                seen.append(look())
            return gradient

    with torch.inference_mode(False), torch.enable_grad():
        Asked.apply(torch.ones(2, requires_grad=True)).sum().backward()
    return seen[0]


def in_backward(look):
    return in_a_function(look, backward=True)


def where_a_tensor_is_saved(look):
    seen = []

    def pack(tensor):
        if not seen:
            seen.append(None)
            seen[0] = look()
        return tensor

    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x),
    ):
        torch.ones(2, requires_grad=True).exp()
    return seen[0]


def below_autograd(look):
    with torch._C._AutoDispatchBelowAutograd():
        return look()


PLACES = (directly, in_a_mode, in_a_function, in_backward, where_a_tensor_is_saved, below_autograd)
MODES = (contextlib.nullcontext, torch.inference_mode, torch.no_grad)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("place", PLACES)
def test_what_is_made_can_be_trained_with(place, mode):
    def look():
        with outside_inference(), recording():
            return made()

    def look_by_torch():
        with torch.inference_mode(False), torch.enable_grad():
            return made()

    with mode():
        assert place(look) == place(look_by_torch)


@pytest.mark.parametrize("mode", MODES)
def test_modes_are_as_before_afterwards(mode):
    with mode():
        before = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        with outside_inference(), recording():
            assert not torch.is_inference_mode_enabled()
            assert torch.is_grad_enabled()
        assert (torch.is_inference_mode_enabled(), torch.is_grad_enabled()) == before


def test_it_is_not_made_where_it_does_nothing():
    assert outside_inference() is outside_inference() is recording()
