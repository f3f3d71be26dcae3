"""Every module of torch.nn, forward and backward, bit for bit as on the CPU.

The samples are torch's own (`torch.testing._internal.common_modules`), float32, in training and evaluation
mode.
Nothing is skipped but the samples that the CPU itself refuses.
"""

import copy

import pytest
import torch
from bits import same_bits
from torch_databases import ModuleInfo, module_db


def moved(value: object, device: object) -> object:
    """Fresh leaves on the device in place of all tensors."""
    if isinstance(value, torch.Tensor):
        tensor = value.detach().to(device)
        return tensor.requires_grad_(value.requires_grad) if value.is_floating_point() else tensor
    if isinstance(value, torch.nn.utils.rnn.PackedSequence):
        return value.to(device)
    if isinstance(value, list | tuple):
        return type(value)(moved(v, device) for v in value)
    if isinstance(value, dict):
        return {k: moved(v, device) for k, v in value.items()}
    return value


def tensors(value: object) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for v in value for t in tensors(v)] if isinstance(value, list | tuple) else []


def forward_and_backward(module: torch.nn.Module, args: object, kwargs: object) -> list[torch.Tensor | None]:
    """Outputs, gradients of inputs and parameters, and buffers."""
    torch.manual_seed(1)
    outputs = tensors(module(*args, **kwargs))
    roots = [t for t in outputs if t.requires_grad]
    if roots:
        torch.autograd.backward(roots, [torch.randn(t.shape, dtype=t.dtype).to(t.device) for t in roots])
    leaves = [*module.parameters(), *tensors([args, kwargs])]
    return [*outputs, *(t.grad for t in leaves), *module.buffers()]


def same(want: torch.Tensor | None, got: torch.Tensor | None) -> bool:
    if want is None or got is None:
        return want is got
    return same_bits(want, got.cpu())


@pytest.mark.filterwarnings("ignore")  # the samples are made to provoke warnings
@pytest.mark.parametrize("info", module_db, ids=lambda info: info.name)
def test_a_module_computes_the_same_bits_as_on_the_cpu(device: torch.device, info: ModuleInfo) -> None:
    compared = 0
    for training in (True, False):
        torch.manual_seed(0)
        samples = info.module_inputs_func(
            info, device="cpu", dtype=torch.float32, requires_grad=True, training=training
        )
        for sample in samples:
            if sample.forward_input is None:
                continue
            made = sample.constructor_input
            # FractionalMaxPool's samples come with float64 `_random_samples` whatever the dtype.
            narrow = {k: v.float() for k, v in made.kwargs.items() if k == "_random_samples"}
            on_cpu = info.module_cls(*made.args, **{**made.kwargs, **narrow}).train(training)
            on_device = copy.deepcopy(on_cpu).to(device)
            inputs = (sample.forward_input.args, sample.forward_input.kwargs)
            try:
                want = forward_and_backward(on_cpu, *moved(inputs, "cpu"))
            except Exception:
                continue  # a sample for the error tests
            got = forward_and_backward(on_device, *moved(inputs, device))
            assert len(want) == len(got)
            assert all(same(a, b) for a, b in zip(want, got, strict=True)), sample.desc
            assert all(t is None or t.device == device for t in got)
            compared += 1
    assert compared > 0
