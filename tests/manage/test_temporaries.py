"""What an update on the device allocates for a while is no more than is kept free for it."""

import inspect
import itertools

import pytest
import torch
from twins import device

from hetero.stm.temporaries import temporaries

NUMBERS = 1 << 16
STEPS = 8  # RAdam's kernel changes at the sixth
KINDS = (
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.ASGD,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)
CHOICES = {
    "lr": (0.1, torch.tensor(0.1)),
    "weight_decay": (0.0, 0.1),
    "maximize": (False, True),
    "amsgrad": (False, True),
    "decoupled_weight_decay": (False, True),
    "centered": (False, True),
    "momentum": (0.0, 0.9),
    "nesterov": (False, True),
}
KERNELS = ({}, {"foreach": False}, {"foreach": True}, {"fused": True})


def _settings(kind):
    known = inspect.signature(kind).parameters
    names = [name for name in CHOICES if name in known]
    for values in itertools.product(*(CHOICES[name] for name in names)):
        given = dict(zip(names, values, strict=True))
        for kernels in KERNELS:
            tensor_in_foreach = isinstance(given["lr"], torch.Tensor) and kernels.get("foreach") is not False
            if kernels.keys() - known.keys() or (given.get("nesterov") and not given["momentum"]):
                continue
            if tensor_in_foreach:  # torch refuses it, or warns
                continue
            yield {**given, **kernels}


def _most(optimizer, parameter):
    """Bytes that a step allocates at most beside what was there, once states exist."""
    target, most = parameter.device, 0
    for step in range(STEPS):
        parameter.grad = torch.randn(NUMBERS).to(target)
        before = torch.accelerator.memory_allocated()
        torch.accelerator.reset_peak_memory_stats()
        optimizer.step()
        if step:  # the first one makes states as well
            most = max(most, torch.accelerator.max_memory_allocated() - before)
    return most


@pytest.mark.parametrize("kind", KINDS)
def test_an_update_on_the_device_takes_no_more_than_is_kept_free(kind):
    target = device()
    small = 64 << 10  # numbers, rounded up to blocks
    for settings in _settings(kind):
        parameter = torch.nn.Parameter(torch.randn(NUMBERS).to(target))
        optimizer = kind([parameter], **settings)
        kept = temporaries(optimizer, optimizer.param_groups[0]) * parameter.nbytes
        assert _most(optimizer, parameter) <= kept + small, settings


def test_what_is_kept_free_for_adam_is_what_it_takes():
    """A third more of a large embedding's bytes, kept free in vain, would be a third less of others that live there."""
    target = device()
    for settings, number in (
        ({"foreach": False}, 2),
        ({"foreach": False, "maximize": True}, 3),
        ({"fused": True}, 0),
    ):
        parameter = torch.nn.Parameter(torch.randn(NUMBERS).to(target))
        optimizer = torch.optim.AdamW([parameter], **settings)
        assert temporaries(optimizer, optimizer.param_groups[0]) == number
        assert _most(optimizer, parameter) >= number * parameter.nbytes
