"""Comparing a managed run with the same run unmanaged, bit for bit; used by the tests of this folder."""

import gc
from collections.abc import Iterator, Mapping
from typing import Any

import accelerators
import torch
from backward_ends import wait_for_backward_ends
from bits import same_bits
from torch import nn

# A link far faster than the operators keeps the suite short; nothing here depends on its speed.
DEVICE_BYTES = 256 << 20


def device() -> torch.device:
    """The accelerator with all of its memory, nothing recorded on it."""
    found = accelerators.device(memory=DEVICE_BYTES, bandwidth="100GiB/s", latency="1us")
    accelerators.clear_races()
    return found


def seed(number: int) -> None:
    """As `torch.manual_seed`, which also keeps a stack trace for each kind of device that is not there."""
    torch.default_generator.manual_seed(number)
    torch.get_device_module().manual_seed_all(number)


def fresh_memory() -> int:
    """Bytes in use on the device once everything unreachable is gone; peaks count from here."""
    torch.accelerator.synchronize()
    wait_for_backward_ends(torch.accelerator.current_accelerator())
    # Only if need be: thousands of collections take their time, however little there is to look at.
    if torch.accelerator.memory_allocated():
        gc.collect()
    torch.accelerator.reset_peak_memory_stats()
    return torch.accelerator.memory_allocated()


def peak_memory() -> int:
    """The allocator's own peak since `fresh_memory`."""
    torch.accelerator.synchronize()
    return torch.accelerator.max_memory_allocated()


def as_chosen(kind: type[torch.optim.Optimizer], keywords: dict[str, Any]) -> dict[str, Any]:
    """Keywords of the unmanaged optimizer whose numbers a managed one of ``keywords`` has."""
    left_open = keywords.get("fused") is None and keywords.get("foreach") is None
    choices = (torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
    if left_open and kind in choices and not (keywords.get("differentiable") or keywords.get("capturable")):
        return {**keywords, "fused": True}
    return keywords


def tensors_in(value: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor in nested containers (Hugging Face outputs are mappings), with its path."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors_in(item, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for place, item in enumerate(value):
            yield from tensors_in(item, f"{path}[{place}]")


def on_host(value: Any) -> dict[str, torch.Tensor]:
    """Copies on the host of every tensor in ``value``."""
    return {path: tensor.detach().cpu().clone() for path, tensor in tensors_in(value)}


def values_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, gradients and buffers, copied to the host."""
    found = on_host(dict(module.named_parameters()))
    found.update(
        on_host({f"{name}.grad": p.grad for name, p in module.named_parameters() if p.grad is not None})
    )
    found.update(on_host(dict(module.named_buffers())))
    return found


def assert_identical(managed: Mapping[str, torch.Tensor], unmanaged: Mapping[str, torch.Tensor]) -> None:
    """Same names, same bits (NaN where the other has NaN)."""
    assert managed.keys() == unmanaged.keys()
    different = [name for name, value in managed.items() if not same_bits(value, unmanaged[name])]
    assert not different, "\n".join(
        f"{name}: {managed[name].dtype} {tuple(managed[name].shape)} differs from {unmanaged[name].dtype} "
        f"{tuple(unmanaged[name].shape)} by {_distance(managed[name], unmanaged[name])}"
        for name in different
    )


def _distance(one: torch.Tensor, other: torch.Tensor) -> object:
    if one.shape != other.shape:
        return "shape"
    return (one.double() - other.double()).abs().max().item() if one.numel() else 0
