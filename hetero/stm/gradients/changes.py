"""What is still to be done to gradients before anybody sees them.

Owns, for each, what clipping, `GradScaler` and ``zero_grad`` have asked for, what further micro-batches add
(`hetero.stm.gradients.additions`), and the order of these. Invariant: each change of a gradient is made exactly once,
in the order in which they came, by whoever looks at the gradient first.
"""

from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from typing import Protocol

import torch

from hetero.devices import CopyEngine, HostArena
from hetero.stm.gradients.additions import Addition

__all__ = ["Change", "Changes", "Clamp", "Factor", "Wish", "Zero"]


class Change(Protocol):
    """One thing to be done to a gradient."""

    def apply(self, engine: CopyEngine, gradient: torch.Tensor) -> None:
        """Make it at home, where ``gradient`` has arrived."""


class Wish(ABC):
    """What the user has asked for."""

    @abstractmethod
    def apply(self, engine: CopyEngine, gradient: torch.Tensor) -> None:
        """`Change.apply`."""

    @abstractmethod
    def is_known(self) -> bool:
        """`changes_nothing` would not wait."""

    @abstractmethod
    def changes_nothing(self, engine: CopyEngine) -> bool:
        """It leaves every gradient as it is."""

    @abstractmethod
    def applied(self, gradient: torch.Tensor, *, in_place: bool) -> torch.Tensor:
        """``gradient``, on the device, after it."""


@dataclass(frozen=True, slots=True)
class Factor(Wish):
    """A number on its way to the host, by which gradients are to be multiplied. ``source``: the same, where it was."""

    value: torch.Tensor
    arrival: torch.Event | None
    source: torch.Tensor

    def is_known(self) -> bool:
        return self.arrival is None or self.arrival.query()

    def changes_nothing(self, engine: CopyEngine) -> bool:
        self._await(engine)
        return self.value.item() == 1.0

    def apply(self, engine: CopyEngine, gradient: torch.Tensor) -> None:
        self._await(engine)
        with torch.no_grad():
            gradient.mul_(self.value)

    def applied(self, gradient: torch.Tensor, *, in_place: bool) -> torch.Tensor:
        with torch.no_grad():
            return gradient.mul_(self.source) if in_place else gradient * self.source

    def _await(self, engine: CopyEngine) -> None:
        if self.arrival is not None:
            engine.host_after_download(self.arrival, self.value)


@dataclass(frozen=True, slots=True)
class Clamp(Wish):
    """Every number of a gradient is to be between ``-most`` and ``most``."""

    most: float

    def is_known(self) -> bool:
        return True

    def changes_nothing(self, engine: CopyEngine) -> bool:
        return False  # for all we know

    def apply(self, engine: CopyEngine, gradient: torch.Tensor) -> None:
        self.applied(gradient, in_place=True)

    def applied(self, gradient: torch.Tensor, *, in_place: bool) -> torch.Tensor:
        with torch.no_grad():
            clamp = gradient.clamp_ if in_place else gradient.clamp
            return clamp(min=-self.most, max=self.most)


@dataclass(frozen=True, slots=True)
class Zero(Wish):
    """Every number of a gradient is to be zero, and the gradient is to be there."""

    def is_known(self) -> bool:
        return True

    def changes_nothing(self, engine: CopyEngine) -> bool:
        return False

    def apply(self, engine: CopyEngine, gradient: torch.Tensor) -> None:
        self.applied(gradient, in_place=True)

    def applied(self, gradient: torch.Tensor, *, in_place: bool) -> torch.Tensor:
        with torch.no_grad():
            return gradient.zero_() if in_place else torch.zeros_like(gradient)


class Changes:
    """Of one manager's gradients, by the parameter's index."""

    def __init__(self, engine: CopyEngine, arena: HostArena) -> None:
        self._engine = engine
        self._arena = arena
        self._left: dict[int, list[Wish | Addition]] = {}
        self._numbers: deque[tuple[torch.Tensor, torch.Event]] = deque()
        self._slots: list[torch.UntypedStorage] = []

    def factor(self, value: torch.Tensor) -> Factor:
        """Send ``value``, a number on the device or the host, home."""
        if value.device.type == "cpu":
            copy = value.detach().clone()
            return Factor(copy, None, copy)
        host = self._host_number(value.dtype)
        event = self._engine.download(value, host)
        self._numbers.append((value, event))
        return Factor(host, event, value)

    def ask(self, index: int, change: Wish | Addition) -> None:
        """The gradient is to be changed so, after what was asked for before."""
        self._left.setdefault(index, []).append(change)

    def take(self, index: int) -> tuple[Wish | Addition, ...]:
        """What is still to be done to it; the caller does."""
        return tuple(self._left.pop(index, ()))

    def drop(self, index: int) -> None:
        """Nobody will look at it."""
        for change in self.take(index):
            if isinstance(change, Addition):
                change.cancel()

    def has_wishes(self, index: int) -> bool:
        """Something else than additions is to be done to it."""
        return any(not isinstance(change, Addition) for change in self._left.get(index, ()))

    def is_to_be_zero(self, index: int) -> bool:
        """Nothing of what it is at home is left."""
        left = self._left.get(index, ())
        return len(left) > 0 and isinstance(left[-1], Zero)

    def first_wish(self, index: int) -> Wish | None:
        """What is to be done first; `drop_first` once it is done. For gradients to which nothing is added at home."""
        left = self._left.get(index)
        if not left:
            return None
        assert not isinstance(left[0], Addition)
        return left[0]

    def drop_first(self, index: int) -> None:
        """It has been done."""
        left = self._left[index]
        del left[0]
        if not left:
            del self._left[index]

    def indices(self) -> set[int]:
        """Of the gradients to which something is still to be done."""
        return set(self._left)

    def has_any(self, index: int) -> bool:
        """Something is still to be done to it."""
        return index in self._left

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
                return torch.empty(0, dtype=dtype, device="cpu").set_(slot, 0, (), ())
        fresh = self._arena.empty_strided((), (), dtype)
        self._slots.append(fresh.untyped_storage())
        return fresh
