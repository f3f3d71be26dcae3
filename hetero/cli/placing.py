"""Which device a command uses: the one named, the machine's accelerator, or a virtual one.

Owns that choice and, on the virtual accelerator, its memory: a managed run gets exactly its budget, so that
the allocator itself would refuse a byte more; an unmanaged one what the host has.
"""

import os

import torch
import typer

from hetero.devices import Accelerator, host_memory_free
from hetero.devices.virtual import set_memory_limit, virtual_device
from hetero.devices.virtual._build import build_folder
from hetero.errors import ConfigError

__all__ = [
    "choose_device",
    "is_compiled",
    "keep_workspaces_small",
    "limit_memory",
    "steps_differ",
    "unlimit_memory",
]

_VIRTUAL = "virtual"
_BANDWIDTH = "8GiB/s"  # of its link


def choose_device(name: str | None) -> torch.device:
    """The device called ``name``; by default the accelerator, or a virtual one where there is none.

    Raises `ConfigError` for a name that is none, `DeviceError` for a device that cannot be used.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if name is None:
        name = accelerator.type if accelerator is not None else _VIRTUAL
    if name.split(":")[0] == _VIRTUAL:
        if not is_compiled():
            typer.echo("building the virtual accelerator, once: about a minute", err=True)
        return virtual_device(memory=host_memory_free(), bandwidth=_BANDWIDTH)
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"--device {name}: no such device: {str(error).splitlines()[0]}") from error
    if device.type not in ("cpu", "meta") and (accelerator is None or accelerator.type != device.type):
        there = "no accelerator" if accelerator is None else f"the accelerator {accelerator.type}"
        raise ConfigError(
            f"--device {name}: this machine has {there}; pass --device virtual, or leave it out"
        )
    return Accelerator(device).device


def keep_workspaces_small() -> None:
    """Before the process's first product. cuBLAS keeps a workspace for each thread, which is memory in use: 32 MiB each
    on Hopper, more than all that a small model needs."""
    os.environ.setdefault("TORCH_CUBLASLT_UNIFIED_WORKSPACE", "1")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    os.environ.setdefault("CUBLASLT_WORKSPACE_SIZE", "128")  # KiB, no more: torch would warn of it


def is_compiled() -> bool:
    """Whether the virtual accelerator can be used at once, without its compilation."""
    return (build_folder() / "built").exists()


def limit_memory(device: torch.device, nbytes: int) -> None:
    """On the virtual accelerator, take away all memory beyond ``nbytes``."""
    if device.type == _VIRTUAL:
        set_memory_limit(nbytes)


def unlimit_memory(device: torch.device) -> None:
    """On the virtual accelerator, give back what `limit_memory` took."""
    if device.type == _VIRTUAL:
        set_memory_limit(host_memory_free())


def steps_differ(device: torch.device) -> bool:
    """Whether an optimizer may round differently on ``device`` than on the host."""
    return device.type != _VIRTUAL
