"""One accelerator as hetero sees it: its name, its memory counters, its current stream.

Owns the calls of a device module's memory functions: counters are read and set back, its allocator is capped and
emptied. Allocates and moves nothing.
"""

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any, cast

import torch

from hetero.devices import looks
from hetero.devices.caps import shared_cap
from hetero.errors import DeviceError
from hetero.units import round_up

__all__ = [
    "ALLOCATION_GRANULARITY",
    "LARGEST_WITHOUT_EXCESS",
    "MOST_EXCESS",
    "Accelerator",
    "default_device",
    "named_device",
    "norms_depend_on",
    "rounds_as_host",
]

# CUDA's caching allocator and the virtual one both hand out multiples of 512 bytes; a ledger that counts
# less than the allocator does would let the sum of small tensors break the budget.
ALLOCATION_GRANULARITY = 512
# CUDA's allocator hands out blocks that are up to so much larger than what was asked for, but not for so little.
MOST_EXCESS = LARGEST_WITHOUT_EXCESS = 1 << 20
# What segments take over what is in use: 1.2 with budgets of some hundred MiB, less with larger ones; and, where there
# are few of them, some that are hardly used, of 20 MiB each.
_WITH_GAPS = 1.25
_FEW_SEGMENTS = 64 << 20

# Peaks that the counter had shown before it was lent to somebody else, since when we have not set it back.
_peaks_before: dict[torch.device, int] = {}
# Out-of-memory errors of which nobody but us has learned; the allocator counts all.
_answered: Counter[torch.device] = Counter()


def default_device() -> torch.device:
    """The machine's accelerator, with its current index. Raises `DeviceError` if there is none."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        raise DeviceError(
            "no accelerator: torch.accelerator finds none on this machine; pass device=..., or build a virtual "
            "one with hetero.virtual_device(memory='256MiB')"
        )
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def named_device(device: torch.device | str) -> torch.device:
    """``device``, with its index. Raises `DeviceError` for one that this process does not have."""
    try:
        found = torch.device(device)
        if found.type in ("cpu", "meta"):
            return found  # `Accelerator` says what is wrong with it
        module = torch.get_device_module(found)
        # A type alone may mean the machine's, or what torch was not built for: only asking tells.
        count = module.device_count() if hasattr(module, "device_count") else 1
    except (RuntimeError, TypeError, AssertionError) as error:
        raise DeviceError(f"device={device!r} is no device that this process knows: {_CURE}") from error
    if (found.index or 0) >= count:
        raise DeviceError(
            f"device={device!r}: torch finds {count} device{'' if count == 1 else 's'} of type {found.type}: {_CURE}"
        )
    return found


_CURE = (
    "pass a CUDA, ROCm or XPU device that torch finds (hetero info lists them), or "
    "hetero.virtual_device(memory='256MiB')"
)


def rounds_as_host(device: torch.device) -> bool:
    """Its kernels are the host's: what is computed has the same bits on either."""
    return device.type in ("cpu", "virtual")


def norms_depend_on(device: torch.device, order: float) -> bool:
    """A norm of that order may have other bits there than on the host. The largest number, or the smallest, has not."""
    return not (rounds_as_host(device) or math.isinf(order))


class Accelerator:
    """A device that has memory counters and streams (CUDA, ROCm, XPU, virtual).

    Raises `DeviceError` for a device without them, such as the CPU.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type in ("cpu", "meta"):
            raise DeviceError(
                f"device={device!s} is no accelerator: hetero moves tensors between a device and the host; pass a "
                "CUDA, ROCm or XPU device, or hetero.virtual_device(memory='256MiB')"
            )
        self._module: ModuleType = torch.get_device_module(device)
        index: int | None = device.index
        if index is None:
            device = torch.device(device.type, self._call("current_device"))
        self.device = device
        # torch.cuda's counters are an empty dictionary until then.
        getattr(self._module, "init", lambda: None)()
        self._stats: Callable[..., Any] | None = looks.own(self._module, "memory_stats_as_nested_dict")
        # What torch.cuda.current_stream asks as well, at a fifth of the cost. For the virtual device torch has none.
        self._stream: Callable[[int], tuple[int, int, int]] | None = getattr(
            torch._C, f"_{self.device.type}_getCurrentStream", None
        )
        self._gaps_failed = False
        self._cap = shared_cap(self.device, self._call, in_use=self.used_bytes, reserved=self.reserved_bytes)

    def _call(self, name: str, *args: object) -> Any:
        function = looks.own(self._module, name)
        if function is None:
            raise DeviceError(
                f"{self._module.__name__} has no {name}(): this backend cannot be managed; {_CURE}"
            )
        return function(*args)

    def used_bytes(self) -> int:
        """Bytes in tensors now, of whoever allocated them, as the allocator counts them."""
        # torch.cuda.memory_allocated sorts all counters to return one.
        if self.device.type == "cuda" and self._stats is not None:
            return int(self._stats(self.device)["allocated_bytes"]["all"]["current"])
        return int(self._call("memory_allocated", self.device))

    def pressure(self) -> tuple[int, int, int]:
        """`used_bytes`, `peak_bytes`, and how many out-of-memory errors there have been that we did not answer, in one
        look.

        The last two may be set back by whoever resets the allocator's counters; a counter that there is not stays 0.
        """
        if self._stats is None:
            return self.used_bytes(), self.peak_bytes(), 0
        stats = self._stats(self.device)
        allocated = stats["allocated_bytes"]["all"]
        peak = allocated["peak"]
        if _peaks_before and (before := _peaks_before.get(self.device, 0)) > peak:
            peak = before
        return allocated["current"], peak, stats["num_ooms"] - _answered[self.device]

    def failures(self) -> int:
        """Out-of-memory errors of the allocator so far, whoever has learned of them; 0 where nobody counts them."""
        return 0 if self._stats is None else int(self._stats(self.device)["num_ooms"])

    def note_answered(self) -> None:
        """An out-of-memory error has been caught, and its allocation will be tried again or done without."""
        _answered[self.device] += 1

    def peak_bytes(self) -> int:
        """Highest `used_bytes` since the counter was set back."""
        if self.device.type == "cuda" and self._stats is not None:  # as `used_bytes`
            return int(self._stats(self.device)["allocated_bytes"]["all"]["peak"])
        return int(self._call("max_memory_allocated", self.device))

    def asked_bytes(self) -> tuple[int, int]:
        """Of `used_bytes`, what was asked for, which is as much in each iteration; and what is more, which depends on
        where blocks lie: CUDA's allocator hands out large ones that are up to 1 MiB larger."""
        if self._stats is None:
            return self.used_bytes(), 0
        stats = self._stats(self.device)
        excess = _excess(stats, "current")
        return int(stats["allocated_bytes"]["all"]["current"]) - excess, excess

    def peak_excess_bytes(self) -> int:
        """By how much more was in use than was asked for, at most since the peak counter was set back."""
        return 0 if self._stats is None else _excess(self._stats(self.device), "peak")

    def made_bytes(self) -> int | None:
        """Bytes of all allocations there have been, also of those freed since; None where nobody counts them. Whoever
        resets the allocator's counters sets it back."""
        if self._stats is None:
            return None
        return int(self._stats(self.device)["allocated_bytes"]["all"]["allocated"])

    def reset_peak(self) -> None:
        """Start a new peak from what is in use now."""
        self._call("reset_peak_memory_stats", self.device)
        _peaks_before.pop(self.device, None)

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Within it the counter is somebody else's; `pressure` does not notice."""
        before = self.pressure()[1]
        try:
            yield
        finally:
            self.reset_peak()
            _peaks_before[self.device] = before

    def watch_looks(
        self, within: Callable[[], contextlib.AbstractContextManager[None]]
    ) -> Callable[[], None]:
        """From now on, whoever else looks at the peak counter, or sets it back, does so ``within`` that. Returns what
        ends it."""
        return looks.around(self._module, within)

    def total_bytes(self) -> int:
        """Physical memory of the device."""
        return int(self._call("mem_get_info", self.device)[1])

    def free_bytes(self) -> int:
        """What this process could still allocate: free on the device, plus what its allocator caches."""
        free, _ = self._call("mem_get_info", self.device)
        return int(free) + self.cached_bytes()

    def reserved_bytes(self) -> int:
        """What this process's allocator holds of the device, cached blocks included."""
        if self.device.type == "cuda" and self._stats is not None:  # as `used_bytes`
            return int(self._stats(self.device)["reserved_bytes"]["all"]["current"])
        return int(self._call("memory_reserved", self.device))

    def cap(self, nbytes: int | None) -> None:
        """Let the allocator refuse to pass ``nbytes``, with a true `torch.OutOfMemoryError`; None: not for us.

        The least of all caps of the process holds. On CUDA a cap is on what is reserved, fragmentation included; what
        is cached goes back to the device if it is more than that, or the cap would refuse nothing.
        """
        self._cap.want(id(self), nbytes)

    @contextlib.contextmanager
    def capped(self, nbytes: int) -> Iterator[None]:
        """Within it, as after `cap`."""
        before = self._cap.wanted(id(self))
        self.cap(nbytes)
        try:
            yield
        finally:
            self.cap(before)

    def uncapped(self) -> contextlib.AbstractContextManager[None]:
        """Within it the allocator refuses what the user, or the device, has it refuse, whoever has set a cap."""
        return self._cap.lifted()

    @property
    def leaves_gaps(self) -> bool:
        """Its allocator keeps segments: their gaps count against a cap, and may be too small for what comes."""
        if self.device.type != "virtual":
            return True
        from hetero.devices import virtual

        return virtual.is_in_segments()

    def usable_of(self, nbytes: int) -> int:
        """Of so many bytes that are free, those that can be in use at once whatever gaps there are and whatever kernels
        are loaded later; of less than 256 MiB as many may fail."""
        return int(max(nbytes - 2 * _FEW_SEGMENTS, nbytes / 2) / _WITH_GAPS) if self.leaves_gaps else nbytes

    def may_fail_within(self, nbytes: int) -> bool:
        """There may be no gap that is large enough although fewer than ``nbytes`` are in use: the device has not much
        more for this process, or so it has been before."""
        if not self.leaves_gaps:
            return False
        return (
            self._gaps_failed or self.free_bytes() + self.used_bytes() < nbytes * _WITH_GAPS + _FEW_SEGMENTS
        )

    def note_gaps_failed(self) -> None:
        """None was large enough."""
        self._gaps_failed = True

    def least_request(self, tried: int) -> int:
        """Of an allocation that has failed, the bytes that were asked for, at least. CUDA's allocator says how many it
        has ``tried`` to have: a segment, of 2 MiB, for more than 1 MiB of 20, for more than 10 a multiple of 2."""
        if self.device.type != "cuda":
            return tried
        if tried <= 2 << 20:
            return ALLOCATION_GRANULARITY
        return 1 << 20 if tried <= 20 << 20 else tried - (2 << 20)

    def cached_bytes(self) -> int:
        """What the allocator has of the device, and nobody has of it."""
        return self.reserved_bytes() - self.used_bytes()

    def release_cached(self) -> int:
        """Give cached, unused memory back to the device; returns how many bytes."""
        before = self.reserved_bytes()
        self._call("empty_cache")
        return max(0, before - self.reserved_bytes())  # another thread may have taken some

    def random_numbers(self, generator: torch.Generator | None) -> Callable[[], object]:
        """Notes where those of ``generator``, or of the device, are; what it returns goes back there."""
        if generator is not None:
            return partial(generator.set_state, generator.get_state())
        return partial(self._call, "set_rng_state", self._call("get_rng_state", self.device), self.device)

    def synchronize(self) -> None:
        """Wait on the host for everything queued on the device."""
        self._call("synchronize", self.device)

    def compute_stream(self) -> torch.Stream:
        """The stream on which the calling thread's operators run. Comparable with others from here; by torch's rules
        not with a `torch.cuda.Stream`."""
        if self._stream is None:
            return cast(torch.Stream, self._call("current_stream", self.device))
        number, index, kind = self._stream(self.device.index)
        return torch.Stream(stream_id=number, device_index=index, device_type=kind)

    def allocated_size(self, nbytes: int) -> int:
        """What the allocator counts for a request of ``nbytes``."""
        return round_up(nbytes, ALLOCATION_GRANULARITY)


def _excess(stats: Any, when: str) -> int:
    # Not of small blocks, which are always as large as what was asked for, rounded to 512 bytes.
    return int(stats["allocated_bytes"]["large_pool"][when]) - int(
        stats["requested_bytes"]["large_pool"][when]
    )
