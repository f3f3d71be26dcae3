"""Copies between host and device on two persistent side streams, and every wait that orders them.

Owns the stream discipline. Its invariant: an access of either end of a copy is ordered after the copy by a
wait made here, and memory is given back to the compute stream only after the compute stream waited for the
copies that use it.

[Note: waits]
Memory is always allocated and freed on the compute stream, never on a side stream, and ``record_stream`` is
not used: it makes the time of reuse, and so the peak, depend on timing. Each wait has a name in `Wait`:

* UP_AFTER_ALLOCATION  the destination's memory may have belonged to a tensor that compute still reads: the up
  stream waits for what compute had queued when it was allocated.
* COMPUTE_AFTER_UP     compute reads the copy only after it has arrived.
* DOWN_AFTER_COMPUTE   the source may still be in the making: the down stream waits for compute.
* FREE_AFTER_DOWN      the source's memory goes back to compute only after it has been read.
* HOST_AFTER_DOWN      the host reads what came down only after it has arrived.
* HOST_AFTER_UP        the host overwrites a source only after the up stream has read it.
"""

import contextlib
import enum
import functools
from collections.abc import Iterable
from types import ModuleType
from typing import Protocol

import torch

from hetero.devices.accelerator import Accelerator

__all__ = ["CopyEngine", "Wait"]


class Wait(enum.Enum):
    """The waits of [Note: waits]."""

    UP_AFTER_ALLOCATION = enum.auto()
    COMPUTE_AFTER_UP = enum.auto()
    DOWN_AFTER_COMPUTE = enum.auto()
    FREE_AFTER_DOWN = enum.auto()
    HOST_AFTER_DOWN = enum.auto()
    HOST_AFTER_UP = enum.auto()


class CopyMeter(Protocol):
    """Measures copies while it ``is_clocked`` (`hetero.msc.MemStatsCollector`)."""

    @property
    def is_clocked(self) -> bool:
        """Somebody wants to know."""

    def waiting(self) -> contextlib.AbstractContextManager[None]:
        """Around what makes compute wait."""

    def note_copy(self, nbytes: int, begin: torch.Event, end: torch.Event, *, is_upload: bool) -> None:
        """One was queued between these two events, which record times."""


class CopyEngine:
    """Two side streams, up (host to device) and down, and the copies queued on them."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self._up = torch.Stream(device=accelerator.device)
        self._down = torch.Stream(device=accelerator.device)
        # On which memory of copies is taken and given back; None: on whatever stream is the caller's. The caller may go
        # on on another for a while, as for clipping.
        self.allocates_on: torch.Stream | None = None
        # Who wants to know how long copies take, and how long they are waited for; see `CopyMeter`.
        self.meter: CopyMeter | None = None
        # Test-only: waits left out, to show that the race detector misses none of them.
        self.left_out: frozenset[Wait] = frozenset()

    def upload(
        self, source: torch.Tensor, destination: torch.Tensor, *, after: torch.Event | None = None
    ) -> torch.Event:
        """Start copying ``source`` (host) to ``destination`` (device, allocated on the compute stream).

        ``after``: `mark_compute` of when that was, if another thread has allocated it.
        """
        if Wait.UP_AFTER_ALLOCATION not in self.left_out:
            self._up.wait_event(after or self.mark_compute())
        return self._copy(self._up, source, destination)

    def download(self, source: torch.Tensor, destination: torch.Tensor) -> torch.Event:
        """Start copying ``source`` (device) to ``destination`` (host). Keep ``source`` until `free_after_download`."""
        if Wait.DOWN_AFTER_COMPUTE not in self.left_out:
            self._down.wait_event(self.mark_compute())
        return self._copy(self._down, source, destination)

    def mark_compute(self) -> torch.Event:
        """What the compute stream of this thread has queued so far."""
        return self._mark(self.accelerator.compute_stream())

    def compute_after_upload(self, event: torch.Event) -> None:
        """What compute queues from now on sees the uploaded copy."""
        if Wait.COMPUTE_AFTER_UP not in self.left_out:
            self._hold_compute(event)

    def free_after_download(self, event: torch.Event) -> None:
        """The source of a download may be dropped: compute reuses its memory only after the copy."""
        if Wait.FREE_AFTER_DOWN not in self.left_out:
            self._hold_compute(event)

    def host_after_download(self, event: torch.Event, destination: torch.Tensor | None = None) -> None:
        """Block the host until what came down can be read there."""
        if Wait.HOST_AFTER_DOWN not in self.left_out:
            event.synchronize()
        if destination is not None:
            self._declare_host_access(destination, write=False)

    def host_after_uploads(self, events: Iterable[torch.Event], source: torch.Tensor) -> None:
        """Block the host until all that read ``source`` have, so that it may be overwritten."""
        if Wait.HOST_AFTER_UP not in self.left_out:
            for event in events:
                event.synchronize()
        self._declare_host_access(source, write=True)

    def before_host_write(self, destination: torch.Tensor) -> None:
        """The host is about to write ``destination``: `host_after_uploads` was called for whatever reads it."""
        self._declare_host_access(destination, write=True)

    def _mark(self, stream: torch.Stream) -> torch.Event:
        event = torch.Event(device=self.accelerator.device)
        event.record(stream)
        return event

    def _hold_compute(self, event: torch.Event) -> None:
        stream, meter = self.accelerator.compute_stream(), self.meter
        if meter is None or not meter.is_clocked:
            stream.wait_event(event)
        else:
            with meter.waiting():
                stream.wait_event(event)
        if self.allocates_on is not None and self.allocates_on != stream:
            self.allocates_on.wait_event(event)

    def _copy(self, stream: torch.Stream, source: torch.Tensor, destination: torch.Tensor) -> torch.Event:
        meter = self.meter
        if meter is None or not meter.is_clocked:
            _copy_on(stream, source, destination)
            return self._mark(stream)
        begin, end = (torch.Event(device=self.accelerator.device, enable_timing=True) for _ in range(2))
        begin.record(stream)
        _copy_on(stream, source, destination)
        end.record(stream)
        meter.note_copy(source.nbytes, begin, end, is_upload=stream is self._up)
        return end

    @functools.cached_property
    def _virtual(self) -> ModuleType | None:
        if self.accelerator.device.type != "virtual":
            return None
        from hetero.devices import virtual

        return virtual

    def _declare_host_access(self, tensor: torch.Tensor, *, write: bool) -> None:
        # Host kernels cannot be watched, so the virtual device is told what the host is about to touch.
        if self._virtual is not None and tensor.is_pinned():
            self._virtual.check_host_access(tensor, write=write)


def _copy_on(stream: torch.Stream, source: torch.Tensor, destination: torch.Tensor) -> None:
    # An object of its own: entering a stream notes in the object which one was current, and the queue's thread may
    # enter the same stream meanwhile. Each would go on on the other's.
    stream = torch.Stream(
        stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
    )
    if destination.is_inference():  # a gradient that was made in that mode
        with torch.inference_mode(), stream:
            destination.copy_(source, non_blocking=True)
    elif source.requires_grad or destination.requires_grad:
        with torch.no_grad(), stream:
            destination.copy_(source, non_blocking=True)
    else:  # the common case, without the cost of a grad mode
        with stream:
            destination.copy_(source, non_blocking=True)
