"""Numbers by which gradients are to be multiplied, before anybody sees them.

Owns what clipping and `GradScaler` have asked for and nobody has done yet. Invariant: each factor of a gradient is
applied exactly once, in the order in which they came, by whoever looks at the gradient first.
"""

from collections import deque
from dataclasses import dataclass

import torch

from hetero.devices import CopyEngine, HostArena

__all__ = ["Factor", "Factors"]


@dataclass(frozen=True, slots=True)
class Factor:
    """A number on its way to the host, by which gradients are to be multiplied. ``source``: the same, where it was."""

    value: torch.Tensor
    arrival: torch.Event | None
    source: torch.Tensor

    def apply(self, engine: CopyEngine, gradient: torch.Tensor) -> None:
        """Multiply. ``gradient`` has arrived."""
        if self.arrival is not None:
            engine.host_after_download(self.arrival, self.value)
        with torch.no_grad():
            gradient.mul_(self.value)


class Factors:
    """Of one manager's gradients, by the parameter's index."""

    def __init__(self, engine: CopyEngine, arena: HostArena) -> None:
        self._engine = engine
        self._arena = arena
        self._asked: dict[int, list[Factor]] = {}
        self._numbers: deque[tuple[torch.Tensor, torch.Event]] = deque()
        self._slots: list[torch.UntypedStorage] = []

    def make(self, value: torch.Tensor) -> Factor:
        """Send ``value``, a number on the device or the host, home."""
        if value.device.type == "cpu":
            copy = value.detach().clone()
            return Factor(copy, None, copy)
        host = self._host_number(value.dtype)
        event = self._engine.download(value, host)
        self._numbers.append((value, event))
        return Factor(host, event, value)

    def ask(self, index: int, factor: Factor) -> None:
        """The gradient is to be multiplied by ``factor``, after those before."""
        self._asked.setdefault(index, []).append(factor)

    def take(self, index: int) -> tuple[Factor, ...]:
        """What it is still to be multiplied by; the caller does."""
        return tuple(self._asked.pop(index, ()))

    def first(self, index: int) -> Factor | None:
        """The first of these; `drop_first` once it is done."""
        asked = self._asked.get(index)
        return asked[0] if asked else None

    def drop_first(self, index: int) -> None:
        """The gradient has been multiplied by it."""
        asked = self._asked[index]
        del asked[0]
        if not asked:
            del self._asked[index]

    def indices(self) -> set[int]:
        """Of the gradients that are still to be multiplied."""
        return set(self._asked)

    def reclaim(self, *, waits: bool) -> None:
        """Give back the device memory of numbers that are at home; ``waits`` for those that are not."""
        while self._numbers and (waits or self._numbers[0][1].query()):
            value, event = self._numbers.popleft()
            self._engine.free_after_download(event)
            del value  # not before

    def _host_number(self, dtype: torch.dtype) -> torch.Tensor:
        """Pinned memory for one number that nobody uses any more."""
        for slot in self._slots:
            if torch._C._storage_Use_Count(slot._cdata) == 1 and slot.nbytes() == dtype.itemsize:
                return torch.empty(0, dtype=dtype).set_(slot, 0, (), ())
        fresh = self._arena.empty_strided((), (), dtype)
        self._slots.append(fresh.untyped_storage())
        return fresh
