"""Copies that may still be reading homes.

Owns who they are. Invariant: whoever writes a home has waited, through here, for every copy that was
started from it.
"""

from collections import deque
from collections.abc import Iterable

import torch

from hetero.devices import CopyEngine
from hetero.stm.tensors.managed import ManagedTensor

__all__ = ["Uploads"]


class Uploads:
    """Of one manager's parameters."""

    def __init__(self, engine: CopyEngine) -> None:
        self._engine = engine
        # Oldest first; also those that somebody has taken since.
        self._started: deque[tuple[torch.Event, ManagedTensor]] = deque()
        self._reading: dict[int, list[torch.Event]] = {}  # by the parameter's index, oldest first

    def note(self, event: torch.Event, tensor: ManagedTensor) -> None:
        """A copy from ``tensor``'s home was started, which has read it at ``event``."""
        while self._started and self._started[0][0].query():
            self._forget(*self._started.popleft())
        self._started.append((event, tensor))
        self._reading.setdefault(tensor.index, []).append(event)

    def take(self, tensors: Iterable[ManagedTensor]) -> dict[int, list[torch.Event]]:
        """Those that may be reading the homes of ``tensors``, by index. The caller waits for them."""
        return {t.index: self._reading.pop(t.index) for t in tensors if t.index in self._reading}

    def reading(self, tensor: ManagedTensor) -> list[torch.Event]:
        """As `take`, of one tensor; they stay known."""
        return list(self._reading.get(tensor.index, ()))

    def wait(self, tensor: ManagedTensor, memory: torch.Tensor) -> None:
        """``memory``, its home or that home's twin, may be written afterwards."""
        if tensor.index in self._reading:
            self._engine.host_after_uploads(self._reading.pop(tensor.index), memory)

    def refresh_low(self, tensor: ManagedTensor) -> None:
        """Its home is settled: bring its low-precision twin, if it has one, up to date."""
        if tensor.low_is_stale:
            self.wait(tensor, tensor.origin)
            tensor.refresh_low()

    def wait_all(self) -> None:
        """Every home may be written afterwards."""
        homes = {tensor.index: tensor.home for _, tensor in self._started}
        self._started.clear()
        reading, self._reading = self._reading, {}
        for index, events in reading.items():
            self._engine.host_after_uploads(events, homes[index])

    def _forget(self, event: torch.Event, tensor: ManagedTensor) -> None:
        """The oldest of ``tensor``, unless it has been taken."""
        events = self._reading.get(tensor.index)
        if events and events[0] is event:
            del events[0]
            if not events:
                del self._reading[tensor.index]
