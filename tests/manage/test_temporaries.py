"""What an update on the device allocates for a while is no more than is kept free for it."""

import inspect
import itertools

import pytest
import torch
from accelerators import GAPS, ON_CUDA
from equality import fresh_memory, peak_memory
from settling import is_intercepted, managed_mlp
from settling import step as train_once
from torch.torch_version import TorchVersion
from twins import device

from hetero.stm.step.ownstep import step_bytes
from hetero.stm.updates.optimizers import ELEMENTWISE
from hetero.stm.updates.temporaries import temporaries

REFUSES_ADAGRAD = (
    ON_CUDA and TorchVersion(torch.__version__) < "2.13"
)  # where everything has always been there
STEPS_ON_DEVICE = True  # what its own kernels take is the matter
NUMBERS = 1 << 16
STEPS = 8  # RAdam's kernel changes at the sixth
KINDS = sorted(ELEMENTWISE, key=lambda kind: kind.__name__)
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
SMALL = 64 << 10  # bytes: numbers, rounded up to blocks
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
            if kind is torch.optim.Adagrad and kernels.get("fused") and REFUSES_ADAGRAD:
                continue
            yield {**given, **kernels}


def _most(optimizer, *parameters, steps=STEPS):
    """Bytes that a step allocates at most beside what was there, once states exist."""
    most = 0
    for step in range(steps):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, dtype=parameter.dtype).to(parameter.device)
        before = torch.accelerator.memory_allocated()
        torch.accelerator.reset_peak_memory_stats()
        optimizer.step()
        if step:  # the first one makes states as well
            most = max(most, torch.accelerator.max_memory_allocated() - before)
    return most


def _kept(optimizer, parameter):
    return temporaries(optimizer, optimizer.param_groups[0], parameter, parameter.nbytes)


@pytest.mark.parametrize("kind", KINDS)
def test_an_update_on_the_device_takes_no_more_than_is_kept_free(kind):
    target = device()
    for settings in _settings(kind):
        parameter = torch.nn.Parameter(torch.randn(NUMBERS).to(target))
        optimizer = kind([parameter], **settings)
        assert _most(optimizer, parameter) <= _kept(optimizer, parameter) + SMALL, settings


SHAPES = (
    *((NUMBERS,), (256, 256), (NUMBERS // 4, 4), (4, NUMBERS // 4), (NUMBERS, 1), (1, NUMBERS), (1024, 64)),
    *((16, 64, 64), (NUMBERS // 9, 3, 3), (64, 113, 3, 3), (NUMBERS, 1, 1), (1, 1, NUMBERS), (256, 1, 256)),
    (512, 512),
)
BY_SHAPE = {
    torch.optim.Adafactor: (
        *({}, {"lr": torch.tensor(0.1), "weight_decay": 0.1}, {"maximize": True}),
        *({"foreach": True}, {"foreach": True, "maximize": True}),
    ),
    # From the second of its five products on they take the same, and a CPU takes long for them in bfloat16.
    torch.optim.Muon: (
        *({"ns_steps": 2}, {"ns_steps": 2, "lr": torch.tensor(0.1), "weight_decay": 0.0}),
        {"ns_steps": 2, "nesterov": False},
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [torch.optim.Adafactor, torch.optim.Muon])
def test_it_takes_no_more_where_that_depends_on_the_shape(kind, dtype):
    target = device()
    for shape in SHAPES:
        if kind is torch.optim.Muon and len(shape) != 2:
            continue
        for settings in BY_SHAPE[kind]:
            parameter = torch.nn.Parameter(torch.randn(shape, dtype=dtype).to(target))
            optimizer = kind([parameter], **settings)
            most = _most(optimizer, parameter, steps=2)
            assert most <= _kept(optimizer, parameter) + SMALL, (shape, settings)


VECTOR, MATRIX = (NUMBERS,), (256, 256)


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        *itertools.product((*KINDS, torch.optim.Adafactor), (VECTOR, MATRIX)),
        (torch.optim.Muon, MATRIX),  # it takes no others
    ],
)
def test_a_step_of_several_parameters_takes_no_more_than_counted(kind, shape):
    """Where everything fits, the user's own step has them all. A loop holds some of one parameter for a while."""
    target = device()
    for settings in BY_SHAPE.get(kind, ({"foreach": False}, {"foreach": True})):
        parameters = [torch.nn.Parameter(torch.randn(shape).to(target)) for _ in range(3)]
        optimizer = kind(parameters, **settings)
        kept = step_bytes(optimizer, {id(p): p.nbytes for p in parameters})
        assert _most(optimizer, *parameters) <= kept + SMALL, settings


def test_what_is_kept_free_for_a_matrix_of_adafactor_is_what_it_takes():
    """Not what a vector takes, nor as if all were stepped at once."""
    target = device()
    parameters = [torch.nn.Parameter(torch.randn(256, 256).to(target)) for _ in range(3)]
    optimizer = torch.optim.Adafactor(parameters)
    nbytes = parameters[0].nbytes
    assert _kept(optimizer, parameters[0]) <= nbytes + SMALL
    assert step_bytes(optimizer, {id(p): nbytes for p in parameters}) <= 2 * nbytes + SMALL


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
        assert _kept(optimizer, parameter) == number * parameter.nbytes
        assert _most(optimizer, parameter) >= number * parameter.nbytes


@pytest.mark.usefixtures("homes_on_device")
@pytest.mark.parametrize("foreach", [None, False], ids=["fused", "loop"])
def test_everything_fits_beside_what_the_step_takes(foreach):
    """A fused kernel takes nothing: beside the peak of the iteration there has to be one gradient more, which autograd
    may have twice for a moment. A for-loop of Adam's takes three copies of its largest parameter."""

    def build():
        return torch.nn.Sequential(torch.nn.Linear(64, 1024), torch.nn.Tanh(), torch.nn.Linear(1024, 64))

    target, before = device(), fresh_memory()
    model = build().to(target)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(3):
        train_once(model, optimizer, target)
    peak, largest = peak_memory() - before, model[0].weight.nbytes
    del model, optimizer

    budget = fresh_memory() + peak + int(1.5 * largest)
    model, optimizer, manager, target = managed_mlp(
        budget, build, lambda model: torch.optim.AdamW(model.parameters(), foreach=foreach)
    )
    with manager:
        for _ in range(10):
            train_once(model, optimizer, target)
        assert is_intercepted(model) == (foreach is False)
        assert manager.stats.peak_device_bytes <= budget + GAPS
