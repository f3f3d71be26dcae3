"""``torch.virtual``: the device module, with the functions of `torch.cuda` that make sense here.

Owns the Python registration of the device. There is one device: ``device`` arguments are ignored by what only reads
counters, and checked elsewhere. Random numbers come from the CPU's generator, so that a seeded run gives the same
numbers on both.
"""

import os
import warnings
from types import ModuleType, TracebackType
from typing import Any

import torch
from torch.utils import backend_registration

__all__ = ["register"]

_NAME = "virtual"
_Device = torch.device | str | int | None


class Stream(torch.Stream):
    """A stream of the virtual accelerator, from a pool of 32; see `torch.cuda.Stream`."""

    def __new__(cls, device: _Device = None, priority: int = 0, **ids: int) -> "Stream":
        if ids:
            return super().__new__(cls, **ids)
        return super().__new__(cls, device=_index(device), priority=priority)


class Event(torch.Event):
    """An event of the virtual accelerator; see `torch.cuda.Event`."""

    def __new__(
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> "Event":
        return super().__new__(
            cls, device=_NAME, enable_timing=enable_timing, blocking=blocking, interprocess=interprocess
        )


class DeviceContext:
    """``with torch.virtual.device(0):``; there is only one device, so it only checks."""

    def __init__(self, device: _Device) -> None:
        _index(device)

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None
    ) -> None:
        return None


def register(extension: ModuleType) -> None:
    """Name the backend ``virtual`` and put ``torch.virtual`` in place."""
    backend_registration.rename_privateuse1_backend(_NAME)
    module = _device_module(extension)
    torch._register_device_module(_NAME, module)
    backend_registration.generate_methods_for_privateuse1_backend()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it overrides what the device's fallback would do
        _operators.impl("histc", _histc, "PrivateUse1", allow_override=True)


# Kept for the life of the process: operators leave with the library object.
_operators = torch.library.Library("aten", "IMPL")


def _histc(self: torch.Tensor, bins: int = 100, min: float = 0, max: float = 0) -> torch.Tensor:
    """Counts integers too, as on CUDA (mixtures of experts count tokens so); the CPU has no kernel for them."""
    host = self.cpu()
    values = host if host.is_floating_point() else host.double()
    return torch.histc(values, bins, min, max).to(host.dtype).to(self.device)


def _index(device: _Device) -> torch.device:
    if device is None or (isinstance(device, int) and device in (0, -1)):
        return torch.device(_NAME, 0)
    if isinstance(device, str):
        device = torch.device(device)
    if isinstance(device, torch.device) and device.type == _NAME and device.index in (0, None):
        return torch.device(_NAME, 0)
    raise ValueError(f"device={device!r}: there is one virtual accelerator, 'virtual:0'")


def _device_module(extension: ModuleType) -> ModuleType:
    module = ModuleType(f"torch.{_NAME}", "The virtual accelerator of hetero.")
    bad_fork = [False]
    os.register_at_fork(after_in_child=lambda: bad_fork.__setitem__(0, True))
    functions: dict[str, Any] = {
        **_device_functions(bad_fork),
        **_memory_functions(extension),
        **_random_functions(),
        "Stream": Stream,
        "Event": Event,
        "device": DeviceContext,
        "StreamContext": _StreamContext,
    }
    for name, value in functions.items():
        setattr(module, name, value)
    return module


class _StreamContext:
    """``with torch.virtual.stream(s):``; ``None`` changes nothing."""

    def __init__(self, stream: torch.Stream | None) -> None:
        self.stream = stream
        self._before: list[torch.Stream] = []

    def __enter__(self) -> None:
        if self.stream is not None:
            self._before.append(torch.accelerator.current_stream())
            torch.accelerator.set_stream(self.stream)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None
    ) -> None:
        if self.stream is not None:
            torch.accelerator.set_stream(self._before.pop())


def _device_functions(bad_fork: list[bool]) -> dict[str, Any]:
    def is_available() -> bool:
        return True

    def is_initialized() -> bool:
        return not bad_fork[0]

    def is_in_bad_fork() -> bool:
        return bad_fork[0]

    def device_count() -> int:
        return 1

    def current_device() -> int:
        return 0

    def set_device(device: _Device) -> None:
        _index(device)

    def get_device_name(device: _Device = None) -> str:
        _index(device)
        return "hetero virtual accelerator"

    def init() -> None:
        return None

    def synchronize(device: _Device = None) -> None:
        _index(device)
        torch.accelerator.synchronize()

    def current_stream(device: _Device = None) -> torch.Stream:
        if type(device) is not torch.device or device.type != _NAME:
            _index(device)
        # torch.accelerator.current_stream asks which device this is, through several layers of Python.
        found: torch.Stream = torch._C._accelerator_getStream(0)
        return found

    def default_stream(device: _Device = None) -> torch.Stream:
        return torch.Stream(stream_id=0, device_index=0, device_type=_device_type())

    def set_stream(stream: torch.Stream | None) -> None:
        if stream is not None:
            torch.accelerator.set_stream(stream)

    def stream(stream: torch.Stream | None) -> _StreamContext:
        return _StreamContext(stream)

    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def is_bf16_supported(including_emulation: bool = True) -> bool:
        return True

    found = {f.__name__: f for f in locals().values() if callable(f)}
    found["_is_in_bad_fork"] = found.pop("is_in_bad_fork")
    found["_lazy_init"] = init
    return found


def _device_type() -> int:
    return int(torch.Stream(device=torch.device(_NAME, 0)).device_type)


def _memory_functions(extension: ModuleType) -> dict[str, Any]:
    configured: list[tuple[int, int]] = []  # (the limit as configured, the limit as a fraction of it was set)

    def memory_allocated(device: _Device = None) -> int:
        return int(extension.allocated_and_peak()[0])

    def max_memory_allocated(device: _Device = None) -> int:
        return int(extension.allocated_and_peak()[1])

    def memory_reserved(device: _Device = None) -> int:
        return int(extension.reserved_and_peak()[0])

    def max_memory_reserved(device: _Device = None) -> int:
        return int(extension.reserved_and_peak()[1])

    def memory_stats(device: _Device = None) -> Any:
        return torch.accelerator.memory_stats(_index(device))

    def memory_stats_as_nested_dict(device: _Device = None) -> dict[str, Any]:
        # Those that are read several times for each operator; to make all of `memory_stats` takes longer than one.
        return dict(extension.memory_counters())

    def reset_peak_memory_stats(device: _Device = None) -> None:
        torch._C._accelerator_resetPeakStats(_index(device).index)

    def reset_accumulated_memory_stats(device: _Device = None) -> None:
        torch.accelerator.reset_accumulated_memory_stats(_index(device))

    def total() -> int:
        limit = int(extension.memory_limit())
        return configured[0][0] if configured and configured[0][1] == limit else limit

    def mem_get_info(device: _Device = None) -> tuple[int, int]:
        return max(0, total() - memory_reserved()), total()

    def empty_cache() -> None:
        torch.accelerator.empty_cache()

    def set_per_process_memory_fraction(fraction: float, device: _Device = None) -> None:
        """Cap the memory at this share of what `hetero.virtual_device` configured."""
        _index(device)
        if not 0.0 <= fraction <= 1.0:
            raise ValueError(f"fraction={fraction!r}: expected a share in [0, 1]")
        before = total()
        extension.set_memory_limit(int(before * fraction))
        configured[:] = [(before, int(extension.memory_limit()))]

    def get_per_process_memory_fraction(device: _Device = None) -> float:
        """The share that is set, 1.0 if none is."""
        return float(extension.memory_limit()) / total()

    found = {f.__name__: f for f in locals().values() if callable(f)}
    del found["total"]
    return found


def _random_functions() -> dict[str, Any]:
    def manual_seed(seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    def get_rng_state(device: _Device = None) -> torch.Tensor:
        _index(device)
        return torch.default_generator.get_state()

    def set_rng_state(new_state: torch.Tensor, device: _Device = None) -> None:
        _index(device)
        torch.default_generator.set_state(new_state)

    def initial_seed() -> int:
        return torch.default_generator.initial_seed()

    found: dict[str, Any] = {f.__name__: f for f in locals().values() if callable(f)}
    found["manual_seed_all"] = manual_seed
    found["get_rng_state_all"] = lambda: [get_rng_state()]
    found["set_rng_state_all"] = lambda states: set_rng_state(states[0])
    return found
