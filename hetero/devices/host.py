"""How much memory there is: the host's, under its cgroup, and the device's, through NVML.

Owns what is free of either, and the only calls of NVML. Reads only.
"""

import functools
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TypeVar

import psutil
import torch

from hetero.devices.accelerator import Accelerator

__all__ = [
    "device_memory_free",
    "driver_version",
    "host_memory_free",
    "host_memory_total",
    "host_memory_used",
]

T = TypeVar("T")

_CGROUP_LIMITS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ),
)


def host_memory_total() -> int:
    """Bytes of host memory this process may ever use: the machine's, or less if its cgroup says so."""
    total = int(psutil.virtual_memory().total)
    limit = _cgroup()
    return total if limit is None else min(total, limit[0])


def host_memory_free() -> int:
    """Bytes of host memory still to be had under the machine's and the cgroup's limits."""
    free = int(psutil.virtual_memory().available)
    limit = _cgroup()
    return free if limit is None else min(free, max(0, limit[0] - limit[1]))


def host_memory_used() -> int:
    """Resident set of this process in bytes. Read from procfs where there is one: it is sampled often."""
    try:
        with open("/proc/self/statm", "rb") as statm:
            return int(statm.read().split()[1]) * _page_size()
    except OSError:
        return int(psutil.Process().memory_info().rss)


def device_memory_free(accelerator: Accelerator) -> int:
    """Bytes this process could allocate on the device, other processes' use taken into account.

    NVML sees every process; where it is missing (no NVIDIA driver, virtual device) the device module answers.
    """
    free = accelerator.free_bytes()
    if accelerator.device.type != "cuda" or torch.version.hip is not None:
        return free
    index = accelerator.device.index
    nvml_free = _ask_nvml(lambda nvml: int(nvml.nvmlDeviceGetMemoryInfo(_nvml_handle(nvml, index)).free))
    if nvml_free is None:
        return free
    return min(free, nvml_free + accelerator.cached_bytes())


def driver_version() -> str | None:
    """Of NVIDIA's driver; None where there is none, or no NVML."""
    return _ask_nvml(lambda nvml: str(nvml.nvmlSystemGetDriverVersion()))


def _cgroup() -> tuple[int, int] | None:
    for limit_file, used_file in _CGROUP_LIMITS:
        try:
            limit_text, used_text = limit_file.read_text().strip(), used_file.read_text().strip()
        except OSError:
            continue
        if limit_text == "max" or int(limit_text) >= 1 << 60:
            return None
        return int(limit_text), int(used_text)
    return None


@functools.cache
def _page_size() -> int:
    return os.sysconf("SC_PAGE_SIZE")


def _ask_nvml(question: Callable[[ModuleType], T]) -> T | None:
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        try:
            return question(pynvml)
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return None


def _nvml_handle(pynvml, index: int):  # type: ignore[no-untyped-def]
    # CUDA_VISIBLE_DEVICES renumbers devices for torch but not for NVML: the UUID is the same for both.
    uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
    if uuid is not None:
        return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    return pynvml.nvmlDeviceGetHandleByIndex(index)
