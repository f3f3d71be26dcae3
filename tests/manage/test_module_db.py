"""PyTorch's own module database: every module gives the same outputs and gradients managed and unmanaged.

Each sample runs three times on the same device: unmanaged; managed so that hardly anything but one operator's
parameters may be resident, which also shows how little memory the module can do with; and managed with
that little as its budget, which the device enforces.
"""

import contextlib
import copy
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from accelerators import ON_CUDA, races, set_memory_limit
from equality import (
    DEVICE_BYTES,
    assert_identical,
    device,
    fresh_memory,
    on_host,
    peak_memory,
    seed,
    tensors_in,
    values_of,
)
from torch import nn
from torch_databases import ModuleInfo, ModuleInput, module_db

import hetero

STEPS = 3
PER_MODULE = 4  # of its samples at most, spread over the list: LinearCrossEntropyLoss has hundreds

RECURRENT = {"nn.RNN", "nn.GRU", "nn.LSTM"}

# CUDA's kernels add their gradients in no fixed order; torch says so of all but AdaptiveMaxPool3d when asked to
# be deterministic. On an H200, unmanaged runs differed from each other.
IN_NO_ORDER = {
    "nn.AdaptiveAvgPool3d",
    "nn.AdaptiveMaxPool3d",
    "nn.AvgPool3d",
    "nn.FractionalMaxPool3d",
    "nn.ReflectionPad2d",
    "nn.ReflectionPad3d",
}
# These have other such kernels as well, which are deterministic. Unmanaged runs of Embedding differed there; of
# padding, torch says that it has no fixed order, and with these kernels runs are alike.
IN_ORDER_IF_ASKED = {"nn.Embedding", "nn.ReplicationPad2d", "nn.ReplicationPad3d"}

# All their parameters are operands of one operator and are on the device together: something has to run beside it.
ONE_OPERATOR = {
    "nn.LayerNorm",
    "nn.LinearCrossEntropyLoss",
    "nn.RNN",
    "nn.GRU",
    "nn.LSTM",
    "nn.RNNCell",
    "nn.GRUCell",
    "nn.LSTMCell",
}


class Framed(nn.Module):
    """``inner`` between weights of our own, for modules that have no parameters, or that use all of them at once.

    Inputs are scaled by numbers in (0, 1): that leaves them in the domains that losses ask for.
    """

    def __init__(self, inner: nn.Module, inputs: dict[str, torch.Tensor], outputs: int) -> None:
        super().__init__()
        self.names = [name for name, tensor in inputs.items() if tensor.requires_grad]
        self.before = nn.ParameterList(torch.rand_like(inputs[name]) for name in self.names)
        self.inner = inner
        self.after = nn.Linear(outputs, 3)

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Any, torch.Tensor]:
        scales = dict(zip(self.names, self.before, strict=True))
        args, kwargs = _mapped(
            (args, kwargs), lambda path, t: t * scales[path].sigmoid() if path in scales else t
        )
        result = self.inner(*args, **kwargs)
        return result, self.after(_flat(result))


def _mapped(value: Any, change: Callable[[str, torch.Tensor], torch.Tensor], path: str = "") -> Any:
    if isinstance(value, torch.Tensor):
        return change(path, value)
    if isinstance(value, dict):
        return {key: _mapped(item, change, f"{path}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_mapped(item, change, f"{path}[{place}]") for place, item in enumerate(value))
    return value


def _flat(result: Any) -> torch.Tensor:
    return torch.cat([t.flatten() for _, t in tensors_in(result) if t.is_floating_point()])


class Run:
    """One module of the database with one of its inputs: built anew, equally, as often as wanted."""

    def __init__(self, info: ModuleInfo, sample: ModuleInput, *, training: bool) -> None:
        self._info = info
        self._sample = sample
        self._training = training
        self.is_recurrent = info.name in RECURRENT
        self.adds_in_no_order = ON_CUDA and info.name in IN_NO_ORDER
        self.parameter_bytes = 0
        self.largest_bytes = 0
        self.resident_bytes = 0  # parameters on the device after the first backward
        self.peak_bytes = 0  # until then

    def build(self) -> tuple[nn.Module, Any]:
        """The module and its inputs, on the host, as they are each time."""
        seed(0)
        constructor = copy.deepcopy(self._sample.constructor_input)  # some are given modules
        forward = self._sample.forward_input
        # Fractional pooling gets its random samples in double precision whatever precision is asked for.
        kwargs = _mapped(constructor.kwargs, lambda _, t: t.float() if t.dtype is torch.float64 else t)
        module = self._info.module_cls(*constructor.args, **kwargs)
        inputs = (tuple(forward.args), dict(forward.kwargs))
        module.train(self._training)
        with torch.no_grad():
            result = module(*inputs[0], **inputs[1])  # lazy modules get their shapes, frames theirs
        if self._info.name in ONE_OPERATOR or not any(True for _ in module.parameters()):
            module = Framed(module, dict(tensors_in(inputs)), _flat(result).numel())
        return module.train(self._training), inputs

    def go(self, target: torch.device, **budgets: Any) -> dict[str, torch.Tensor]:
        """Three iterations on ``target``, managed if there are budgets; everything they computed, on the host."""
        module, inputs = self.build()
        inputs = _mapped(inputs, lambda _, t: t.detach().to(target).requires_grad_(t.requires_grad))
        if not budgets:
            module.to(target)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01, foreach=False) if self._training else None
        manager = hetero.manage(module, optimizer, device=target, **budgets) if budgets else None
        found: dict[str, torch.Tensor] = {}
        for step in range(STEPS):
            seed(step)  # dropout
            found |= {f"{step}{k}": v for k, v in self._iterate(module, inputs).items()}
            if manager is not None and step == 0:
                self.resident_bytes = manager.stats.by_kind["device"]["parameter"]
                self.peak_bytes = manager.stats.peak_device_bytes
            if optimizer is not None:
                optimizer.step()
        if manager is not None:
            manager.close()
        sizes = [-(-p.nbytes // 512) * 512 for p in module.parameters()]  # as the allocator counts them
        self.parameter_bytes, self.largest_bytes = sum(sizes), max(sizes)
        found |= {f"closed {k}": v for k, v in values_of(module).items()}
        return _before_its_gradient(found) if self.adds_in_no_order else found

    def _iterate(self, module: nn.Module, inputs: Any) -> dict[str, torch.Tensor]:
        module.zero_grad()
        for _, tensor in tensors_in(inputs):
            tensor.grad = None
        args, kwargs = _mapped(inputs, lambda _, t: t * 1 if t.requires_grad else t)  # in-place activations
        result = module(*args, **kwargs)
        (
            _flat(result) * torch.linspace(0.5, 1.5, _flat(result).numel(), device=_flat(result).device)
        ).sum().backward()
        found = {f".result{k}": v for k, v in on_host(result).items()}
        found |= {f".input{k}.grad": t.grad.cpu() for k, t in tensors_in(inputs) if t.grad is not None}
        found |= {f".{k}": v for k, v in values_of(module).items()}
        return found


def _before_its_gradient(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """All of the first iteration but gradients that have come through the module."""
    first = {key: value for key, value in found.items() if key.startswith("0")}
    through = {key for key in first if key.endswith(".grad") and ("before" in key or "input" in key)}
    return {key: value for key, value in first.items() if key not in through}


def _compare(run: Run) -> None:
    target = device()
    fresh_memory()
    unmanaged = run.go(target)
    ample = peak_memory()
    if ON_CUDA and run.is_recurrent:
        # Unmanaged, its weights lie in one piece, as cuDNN wants them; copies are blocks of 512 bytes each.
        ample += run.parameter_bytes

    fresh_memory()
    # In the first iteration no room but for the operands of one operator.
    hardly = run.go(target, device_budget=ample, warmup_budget=1e-9)
    assert_identical(hardly, unmanaged)
    assert peak_memory() <= ample
    if run.parameter_bytes > 512:
        assert run.resident_bytes < run.parameter_bytes

    # What that needed, and room for a gradient that is copied while the next one is made.
    budget = run.peak_bytes + 2 * run.largest_bytes
    fresh_memory()
    set_memory_limit(budget)
    planned = run.go(target, device_budget=budget, warmup_budget=1e-9)
    assert_identical(planned, unmanaged)
    assert peak_memory() <= budget


def _fail_alike(run: Run) -> None:
    """The managed run raises what the unmanaged one does."""
    target = device()
    with pytest.raises(RuntimeError) as unmanaged:
        run.go(target)
    with pytest.raises(RuntimeError, match=f"^{re.escape(str(unmanaged.value))}$"):
        run.go(target, device_budget=DEVICE_BYTES)


def samples_of(info: ModuleInfo, most: int, *, training: bool) -> list[ModuleInput]:
    """At most so many, and no other is kept: managers look at all tensors that there are, each time one is made."""
    seed(0)
    samples = info.module_inputs_func(
        info, device="cpu", dtype=torch.float32, requires_grad=True, training=training
    )
    return samples[:: max(1, -(-len(samples) // most))]


@contextlib.contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """torch chooses kernels that add in a fixed order, where it has any."""
    torch.use_deterministic_algorithms(wanted)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


# The database also tries what torch warns about.
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("info", module_db, ids=lambda info: info.formatted_name)
def test_module_gives_the_same_numbers_managed(info: ModuleInfo, training: bool) -> None:
    # In evaluation, cuDNN has no backward.
    check = _fail_alike if ON_CUDA and info.name in RECURRENT and not training else _compare
    with deterministic(ON_CUDA and info.name in IN_ORDER_IF_ASKED):
        for sample in samples_of(info, PER_MODULE, training=training):
            check(Run(info, sample, training=training))
    assert races() == []
