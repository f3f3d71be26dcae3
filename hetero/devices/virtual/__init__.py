"""A virtual accelerator: a real PyTorch device ``virtual:0`` whose memory is a capped slice of RAM.

A testing tool, for code that must run where there is no GPU. It computes what the CPU computes, bit for bit,
and goes wrong as CUDA does: memory is capped (`torch.OutOfMemoryError`), fresh and freed memory reads as NaN,
copies between pinned memory and device on a side stream are asynchronous and take as long as the link needs,
tensors of the CPU and of the device do not mix. A happens-before detector raises
`hetero.errors.StreamRaceError` at the first access that no wait orders, every time, whether or not it went
wrong in time.

Owns the process's one virtual device and its Python face, `torch.virtual`. Operators run on the calling
thread; what is asynchronous are the copies. Does not model compute speed.

Where it is stricter or laxer than CUDA: an access through a strided view counts as its whole span; a pinned
block may be freed under a pending copy, as torch's own pinned allocator allows, and device memory may not;
recurrent layers have no double backward (as with cuDNN), and save their inputs only.
"""

import atexit
import math
import threading
import time
from collections.abc import Sequence
from types import ModuleType

import torch

from hetero.devices.virtual import _build, _torch_module
from hetero.errors import ConfigError, DeviceError, StreamRaceError
from hetero.units import format_bytes, parse_bytes, parse_rate, parse_seconds

__all__ = [
    "check_host_access",
    "clear_races",
    "host_register",
    "host_unregister",
    "is_built",
    "is_in_segments",
    "keep_busy",
    "memory_limit",
    "offer_slots",
    "races",
    "set_in_segments",
    "set_link",
    "set_memory_limit",
    "virtual_device",
    "withdraw_slots",
]

_extension: ModuleType | None = None
_registering = threading.Lock()


def virtual_device(
    memory: int | str = "256MiB", bandwidth: float | str = "4GiB/s", latency: float | str = "10us"
) -> torch.device:
    """The device ``virtual:0`` with this much memory behind this link.

    The first call of a process registers it (and compiles it, the first time on a machine: about a minute);
    later calls only change the memory and the link. ``bandwidth`` is of each direction, ``latency`` of each
    copy.

    Raises `ConfigError` for a value that cannot be used, ``memory`` below what is allocated included, and
    `DeviceError` if there is no compiler or another accelerator has taken the place.
    """
    nbytes = _positive_bytes(memory)
    rate, seconds = parse_rate(bandwidth), parse_seconds(latency)
    _register()
    set_memory_limit(nbytes)
    _loaded().set_link(rate, seconds)
    return torch.device("virtual:0")


def is_built() -> bool:
    """Whether this process has registered the device; never builds."""
    return _extension is not None


def memory_limit() -> int:
    """The device's memory in bytes."""
    nbytes: int = _loaded().memory_limit()
    return nbytes


def set_memory_limit(nbytes: int | str) -> None:
    """Change the device's memory. Raises `ConfigError` if more than that is allocated."""
    limit = _positive_bytes(nbytes)
    try:
        _loaded().set_memory_limit(limit)
    except ValueError as error:
        allocated = torch.accelerator.memory_allocated()
        raise ConfigError(
            f"memory={nbytes!r} is below the {format_bytes(allocated)} that are allocated: free tensors "
            f"first, or ask for at least {allocated} bytes"
        ) from error


def set_in_segments(on: bool) -> None:
    """Count memory as PyTorch's CUDA caching allocator does at its default settings: in segments of 2 MiB, 20 MiB and
    more that are kept until ``empty_cache``, a pool for each stream, blocks up to 1 MiB larger than what was asked for.

    The memory, and a share of it that is set, then limit what is reserved, and may be set below that. For blocks made
    from now on. Raises `ConfigError` for False while more is allocated than the device has.
    """
    try:
        _loaded().set_in_segments(on)
    except ValueError as error:
        raise ConfigError(_first_line(error)) from error


def is_in_segments() -> bool:
    """Whether `set_in_segments` is on."""
    found: bool = _loaded().is_in_segments()
    return found


def set_link(*, bandwidth: float | str | None = None, latency: float | str | None = None) -> None:
    """Change the speed (bytes per second, each direction) or latency (seconds per copy) of later copies."""
    rate, seconds = _loaded().link()
    if bandwidth is not None:
        rate = parse_rate(bandwidth)
    if latency is not None:
        seconds = parse_seconds(latency)
    _loaded().set_link(rate, seconds)


def keep_busy(seconds: float) -> None:
    """A kernel that takes ``seconds`` and touches nothing: what compute runs next begins so much later, after copies
    that it has been told to wait for; the caller goes on at once, as after any launch.

    On the thread's default stream. Raises `ConfigError` for a number that is no duration.
    """
    if not 0.0 <= seconds < math.inf:
        raise ConfigError(f"seconds={seconds!r} is no duration: pass a number of seconds, 0 or more")
    _loaded().keep_busy(seconds)


def offer_slots(owner: int, slots: Sequence[tuple[int, int, int]]) -> None:
    """Let this thread's next allocations of these sizes lie in a block that exists, instead of in new memory.

    ``owner`` is the address at which a device storage begins, ``slots`` are ``(begin, nbytes, passed_over)`` within
    it: after so many allocations of ``nbytes`` the next is put there, at most one, and not counted as memory. Until
    `withdraw_slots`. Raises `ConfigError` for a range that is not inside such a storage.
    """
    try:
        _loaded().offer_slots(owner, slots)
    except ValueError as error:
        raise ConfigError(_first_line(error)) from error


def withdraw_slots() -> set[int]:
    """End the offer; the addresses of those slots that were taken and are still in use."""
    return set(_loaded().withdraw_slots())


def races() -> list[str]:
    """Every race found since `clear_races`, oldest first (at most 1000), those already raised included.

    A race found where nothing can raise, such as a free under a pending copy, is raised at the next device
    operation or synchronize, unless this call reports it first.
    """
    found: list[str] = _loaded().races()
    return found


def clear_races() -> None:
    """Forget the races found so far, raised or not."""
    _loaded().clear_races()


def host_register(ptr: int, nbytes: int) -> None:
    """Pin the host memory ``[ptr, ptr + nbytes)``, as ``cudaHostRegister`` does.

    Tensors in it are then ``is_pinned()``, can be copied asynchronously, and are watched for races, byte
    range by byte range. Raises `ConfigError` if the range is empty or part of it is pinned already.
    """
    try:
        _loaded().host_register(ptr, nbytes)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"host_register({ptr:#x}, {nbytes}): {_first_line(error)}") from error


def host_unregister(ptr: int) -> None:
    """Undo `host_register`, before the memory is unmapped.

    Raises `StreamRaceError`, and leaves it pinned, if the host has not waited for every copy from and to it;
    `ConfigError` if nothing is registered at ``ptr``.
    """
    try:
        _loaded().host_unregister(ptr)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"host_unregister({ptr:#x}): {_first_line(error)}") from error


def check_host_access(tensor: torch.Tensor, write: bool = False) -> None:
    """Declare that the host reads (or writes) this pinned tensor now.

    Raises `StreamRaceError` if a device copy to it (or from it, when ``write``) is not ordered before the
    host by a synchronize, or by a query that answered True; `ConfigError` if the tensor is not in pinned or
    registered memory.
    """
    try:
        _loaded().check_host_access(tensor, write)
    except ValueError as error:
        raise ConfigError(_first_line(error)) from error


def _positive_bytes(memory: int | str) -> int:
    nbytes = parse_bytes(memory, name="memory")
    if nbytes <= 0:
        raise ConfigError(f"memory={memory!r}: the virtual accelerator needs some memory")
    return nbytes


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]


def _loaded() -> ModuleType:
    if _extension is None:
        raise DeviceError(
            "there is no virtual accelerator in this process yet: call hetero.virtual_device() first"
        )
    return _extension


def _register() -> None:
    global _extension
    with _registering:
        if _extension is not None:
            return
        taken = torch._C._get_privateuse1_backend_name()
        if taken != "privateuseone":
            raise DeviceError(
                f"the PrivateUse1 backend {taken!r} is registered in this process, and PyTorch has room for "
                "one: use the virtual accelerator in a process of its own"
            )
        if (accelerator := torch.accelerator.current_accelerator(check_available=True)) is not None:
            raise DeviceError(
                f"this process has the accelerator {accelerator.type!r}, and PyTorch has room for one: hide "
                "it (CUDA_VISIBLE_DEVICES='') to use the virtual accelerator"
            )
        extension = _build.load_extension()
        extension.set_race_error(StreamRaceError)
        _torch_module.register(extension)
        # torch answers is_pinned() with False until something was pinned by its own hand.
        torch.empty(1, pin_memory=True, device="cpu")
        # Autograd's device thread may still be letting go of Python objects; a thread that asks for the interpreter
        # while it shuts down is ended by force, and C++ aborts the process for that.
        atexit.register(time.sleep, 0.3)
        _extension = extension
