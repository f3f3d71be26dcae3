"""The cap on a device's allocator, which knows one, and of which several managers may each want one.

Owns what each wants, and the share of the device that the user had set before the first of them: the least holds, and
once nobody wants any, the user's. Threads may come at once, of several managers or of one.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

__all__ = ["SharedCap", "shared_cap"]


class SharedCap:
    """Of one device. ``call`` calls a function of its module by name; ``in_use`` counts bytes in tensors, ``reserved``
    those that the allocator holds."""

    def __init__(
        self,
        device: torch.device,
        call: Callable[..., Any],
        *,
        in_use: Callable[[], int],
        reserved: Callable[[], int],
    ) -> None:
        self._device = device
        self._call = call
        self._in_use = in_use
        self._reserved = reserved
        # A collection may end a manager while its own thread is in here.
        self._lock = threading.RLock()
        self._wanted: dict[int, int] = {}
        self._users = 1.0
        # What was set last, and what the device called it then: torch divides by another total when it is asked than
        # when it is told, so that a share taken back and set again and again would shrink.
        self._set: tuple[float, float] | None = None

    def wanted(self, who: int) -> int | None:
        """Bytes that ``who`` wants it to be at most."""
        return self._wanted.get(who)

    def want(self, who: int, nbytes: int | None) -> None:
        """``who`` wants the allocator to refuse to pass ``nbytes``, or nothing any more."""
        with self._lock:
            if nbytes is None:
                if self._wanted.pop(who, None) is None:
                    return
            else:
                if not self._wanted:
                    self._users = self._users_share()
                self._wanted[who] = nbytes
            self._apply(self._share())

    @contextlib.contextmanager
    def lifted(self) -> Iterator[None]:
        """Within it the allocator refuses what the user, or the device, has it refuse."""
        with self._lock:
            lifts = bool(self._wanted)
            if lifts:
                self._apply(self._users)
        try:
            yield
        finally:
            if lifts:
                with self._lock:
                    self._apply(self._share())

    def _share(self) -> float:
        if not self._wanted:
            return self._users
        # Half a byte more, because a rounded-down share would refuse what exactly fits. A cap below what is in use
        # already means the same as one at it: no more.
        most = max(min(self._wanted.values()), self._in_use())
        if self._reserved() > most:
            self._call("empty_cache")
        total = int(self._call("mem_get_info", self._device)[1])
        return min(self._users, (most + 0.5) / total)

    def _apply(self, share: float) -> None:
        self._call("set_per_process_memory_fraction", share, self._device)
        self._set = share, self._call("get_per_process_memory_fraction", self._device)

    def _users_share(self) -> float:
        found: float = self._call("get_per_process_memory_fraction", self._device)
        share, then = self._set or (found, found)
        return share if found == then else min(1.0, found)


_by_device: dict[torch.device, SharedCap] = {}


def shared_cap(
    device: torch.device, call: Callable[..., Any], *, in_use: Callable[[], int], reserved: Callable[[], int]
) -> SharedCap:
    """The one of ``device``; the arguments are for the first who asks."""
    found = _by_device.get(device)
    return found or _by_device.setdefault(device, SharedCap(device, call, in_use=in_use, reserved=reserved))
