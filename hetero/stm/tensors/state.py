"""States of managed tensors, and the ledger that counts their bytes.

Owns the state machine of Gemini's StatefulTensorMgr and the only count of bytes in use. Invariant: for every
tier and kind, `Ledger.nbytes` is the sum over registered tensors; every change goes through
`StatefulTensor`, so it is kept in O(1) and cannot drift. Moves nothing.

    FREE     no content anywhere
    HOLD     has content; may be kept on any tier
    COMPUTE  an operator is using it: must stay on the compute device
"""

import enum
from collections.abc import Iterable

from hetero.errors import StateError

__all__ = ["Kind", "Ledger", "State", "StatefulTensor", "Tier", "begin_compute", "end_compute"]


class State(enum.IntEnum):
    """What may be done with a tensor's content."""

    FREE = 0
    HOLD = 1
    COMPUTE = 2


class Tier(enum.IntEnum):
    """Where bytes lie."""

    HOST = 0
    DEVICE = 1


class Kind(enum.IntEnum):
    """What a tensor is to the model."""

    PARAMETER = 0
    GRADIENT = 1
    OPTIMIZER_STATE = 2
    BUFFER = 3
    ACTIVATION = 4  # what forward saved for backward


# The one transition table. COMPUTE -> FREE is missing on purpose: whoever frees what an operator reads has a bug.
_TRANSITIONS = (
    (State.FREE, State.HOLD),
    (State.HOLD, State.FREE),
    (State.HOLD, State.COMPUTE),
    (State.COMPUTE, State.HOLD),
)
# Looking up a member of an enum, going through one, and indexing with one, is slow in some versions of Python.
_FREE, _HOLD, _COMPUTE = State
_TIERS = tuple(Tier)
_ON_DEVICE = int(Tier.DEVICE)


class Ledger:
    """Bytes by tier and kind."""

    def __init__(self) -> None:
        self._cells = [[0] * len(Kind) for _ in Tier]
        self._tiers = [0] * len(Tier)

    def nbytes(self, tier: Tier, kind: Kind | None = None) -> int:
        """Bytes on ``tier``, optionally of one kind. O(1)."""
        return self._tiers[tier] if kind is None else self._cells[tier][kind]

    @property
    def device_bytes(self) -> int:
        """Model data on the device."""
        return self._tiers[_ON_DEVICE]

    @property
    def host_bytes(self) -> int:
        """Model data on the host."""
        return self._tiers[Tier.HOST]

    @property
    def activation_bytes(self) -> tuple[int, int]:
        """Saved tensors on the device and on the host: part of model data."""
        return self.nbytes(Tier.DEVICE, Kind.ACTIVATION), self.nbytes(Tier.HOST, Kind.ACTIVATION)

    def note_change(self, tier: Tier, kind: Kind, nbytes: int) -> None:
        """There are so many bytes more (or, negative, fewer). For `StatefulTensor` only."""
        self._tiers[tier] += nbytes
        self._cells[tier][kind] += nbytes


class StatefulTensor:
    """One managed tensor: its kind, its state, and how many bytes it has on each tier.

    ``users`` counts the operators that use it now; it is in COMPUTE exactly while that is not zero.
    """

    __slots__ = ("_ledger", "_tiers", "kind", "name", "state", "users")

    def __init__(self, ledger: Ledger, kind: Kind, name: str) -> None:
        self._ledger = ledger
        self._tiers = [0, 0]  # by `Tier`
        self.kind = kind
        self.name = name
        self.state = _FREE
        self.users = 0

    def nbytes(self, tier: Tier) -> int:
        """Bytes this tensor has on ``tier``."""
        return self._tiers[tier]

    def place(self, tier: Tier, nbytes: int) -> None:
        """It now has ``nbytes`` on ``tier`` (0: none there). The first content makes a FREE tensor HOLD."""
        if nbytes and self.state is _FREE:
            self.state = _HOLD
        self._ledger.note_change(tier, self.kind, nbytes - self._tiers[tier])
        self._tiers[tier] = nbytes

    def release(self) -> None:
        """All content is gone. Raises `StateError` if an operator uses it; then nothing has changed."""
        if self.state is not _FREE:
            self.transition(_FREE)
        for tier in _TIERS:
            if self._tiers[tier]:
                self.place(tier, 0)

    def begin_compute(self) -> None:
        """An operator starts using it."""
        if self.users == 0:
            self.transition(_COMPUTE)
        self.users += 1

    def end_compute(self) -> None:
        """An operator is done with it."""
        if self.users == 0:
            raise StateError(f"{self.name}: end_compute without begin_compute, state {self.state.name}")
        self.users -= 1
        if self.users == 0:
            self.state = _HOLD

    def abandon_compute(self) -> None:
        """Whatever operator used it was left without a word (an interrupt): none does now."""
        self.users = 0
        if self.state is _COMPUTE:  # not the same: the interrupt may have come between the two
            self.transition(_HOLD)

    def transition(self, new: State) -> None:
        """Change state. Raises `StateError` if the table does not allow it; then nothing has changed."""
        if (self.state, new) not in _TRANSITIONS:
            raise StateError(f"{self.name}: {self.state.name} -> {new.name} is not allowed")
        self.state = new

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {self.kind.name}, {self.state.name}, {self._tiers})"


def begin_compute(tensors: Iterable[StatefulTensor]) -> None:
    """`StatefulTensor.begin_compute` of each, written out because every operator does it."""
    for tensor in tensors:
        if tensor.users == 0 and tensor.state is _HOLD:
            tensor.state = _COMPUTE
            tensor.users = 1
        else:
            tensor.begin_compute()


def end_compute(tensors: Iterable[StatefulTensor]) -> None:
    """`StatefulTensor.end_compute` of each."""
    for tensor in tensors:
        if tensor.users == 1:
            tensor.users = 0
            tensor.state = _HOLD
        else:
            tensor.end_compute()
