"""Copies that may still be reading homes.

Owns the list of them. Invariant: whoever writes a home has waited, through here, for every copy that was
started from it.
"""

import contextlib
from collections import defaultdict, deque
from collections.abc import Iterable
from typing import Protocol

import torch

from hetero.devices import CopyEngine
from hetero.stm.tensors.managed import ManagedTensor

__all__ = ["TransferMeter", "Uploads"]


class TransferMeter(Protocol):
    """Who wants to know what moved (`hetero.msc.MemStatsCollector`)."""

    def count_fetch(self, nbytes: int) -> None: ...

    def count_eviction(self, nbytes: int, written_back: int) -> None: ...

    def count_stall(self, seconds: float) -> None: ...

    def count_stale(self, index: int) -> None: ...

    def waiting_for_host(self) -> contextlib.AbstractContextManager[None]: ...


class Uploads:
    """Of one manager's parameters, oldest first."""

    def __init__(self, engine: CopyEngine) -> None:
        self._engine = engine
        self._started: deque[tuple[torch.Event, ManagedTensor]] = deque()

    def note(self, event: torch.Event, tensor: ManagedTensor) -> None:
        """A copy from ``tensor``'s home was started, which has read it at ``event``."""
        while self._started and self._started[0][0].query():
            self._started.popleft()
        self._started.append((event, tensor))

    def take(self, tensors: Iterable[ManagedTensor]) -> dict[int, list[torch.Event]]:
        """Those that may be reading the homes of ``tensors``, by index. The caller waits for them."""
        wanted = {tensor.index for tensor in tensors}
        taken: dict[int, list[torch.Event]] = defaultdict(list)
        left: deque[tuple[torch.Event, ManagedTensor]] = deque()
        for event, tensor in self._started:
            if tensor.index in wanted:
                taken[tensor.index].append(event)
            else:
                left.append((event, tensor))
        self._started = left
        return taken

    def reading(self, tensor: ManagedTensor) -> list[torch.Event]:
        """As `take`, of one tensor; they stay known."""
        return [event for event, other in self._started if other is tensor]

    def wait(self, tensor: ManagedTensor, memory: torch.Tensor) -> None:
        """``memory``, its home or that home's twin, may be written afterwards."""
        for event in self.take([tensor]).get(tensor.index, ()):
            self._engine.host_after_upload(event, memory)

    def wait_all(self) -> None:
        """Every home may be written afterwards."""
        while self._started:
            event, tensor = self._started.popleft()
            self._engine.host_after_upload(event, tensor.home)
