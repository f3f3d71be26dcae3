"""One record for each storage that forward saved for backward.

Owns what is known of a saved storage: the tensors that it was saved as, their versions, and its bytes on each tier.
Moves nothing: that is `hetero.stm.activations.flights`.

[Note: who owns what]
An autograd node holds a `Saved`, that holds the `Activation`, that holds the memory. Nothing of ours holds an
`Activation`, so a graph that is dropped frees all of it at once. Its `Account`, the bytes it has on each tier, is
ours, and is closed when the record is gone (`Activations.close_gone`), or, if a copy is on its way then, when that has
ended.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from hetero.stm.tensors.state import Kind, Ledger, StatefulTensor, Tier

__all__ = ["Account", "Activation", "Flight", "Keeper", "Key", "Saved"]

Layout = tuple[torch.dtype, torch.Size, tuple[int, ...], int]
Key = tuple[int, int]
"""Which forward of the iteration, and which storage of those it saved."""


class Keeper(Protocol):
    """Who reads a record (`hetero.stm.activations.offload.Activations`)."""

    def load(self, saved: "Saved") -> tuple[torch.Tensor, int]:
        """The tensor again, on the device, and its version."""


class Account(StatefulTensor):
    """The bytes of one record: outlives it while a copy is on its way."""

    __slots__ = (
        "clean_version",
        "device_nbytes",
        "flight",
        "host",
        "index",
        "is_retired",
        "key",
        "storage_key",
    )

    def __init__(self, ledger: Ledger, key: Key, device_nbytes: int, index: int) -> None:
        super().__init__(ledger, Kind.ACTIVATION, "saved")
        self.place(Tier.DEVICE, device_nbytes)
        self.key = key
        self.index = index  # in the plan; -1: it is in none
        self.device_nbytes = device_nbytes
        self.storage_key = 0
        self.host: torch.Tensor | None = None
        self.clean_version = -1  # of the device's bytes when they were those of ``host``
        self.flight: Flight | None = None
        self.is_retired = False

    def count(self, tier: Tier, nbytes: int) -> None:
        """It now has ``nbytes`` on ``tier``, unless it is no longer counted."""
        if not self.is_retired:
            self.place(tier, nbytes)

    def retire(self) -> None:
        """It is left over from an iteration before: from now on it is what the caller keeps, no model data."""
        if not self.is_retired:
            self.release()
            self.is_retired = True


@dataclass(slots=True)
class Flight:
    """A copy on its way: ``memory`` (device) must not be reused before ``event``."""

    account: Account
    memory: torch.Tensor
    event: torch.Event
    is_download: bool
    is_orphan: bool = False


class Activation:
    """One storage that was saved. ``aliases``: a tensor for each time it was, or None while it is away."""

    __slots__ = ("__weakref__", "account", "aliases", "layouts", "owner", "writes")

    def __init__(self, owner: "Keeper", account: Account) -> None:
        self.owner = owner
        self.account = account
        self.aliases: list[torch.Tensor] | None = []
        self.layouts: list[Layout] = []
        # Added to an alias's version, this is the version that autograd's check sees. As long as ``layouts``: 0 for
        # those that never left.
        self.writes: list[int] = []

    def add(self, alias: torch.Tensor) -> int:
        """One more tensor of this storage; returns its place."""
        assert self.aliases is not None
        self.aliases.append(alias)
        return len(self.aliases) - 1

    def read(self, place: int) -> tuple[torch.Tensor, int]:
        """The tensor in ``place``, and its version."""
        assert self.aliases is not None
        alias = self.aliases[place]
        writes = self.writes
        return alias, alias._version + (writes[place] if place < len(writes) else 0)

    def fold(self) -> None:
        """The bytes leave: remember everything else."""
        assert self.aliases is not None
        known = len(self.layouts)
        for alias in self.aliases[known:]:
            self.layouts.append((alias.dtype, alias.size(), alias.stride(), int(alias.storage_offset())))
        self.writes.extend([0] * (len(self.aliases) - len(self.writes)))
        self.writes = [
            written + alias._version for written, alias in zip(self.writes, self.aliases, strict=True)
        ]
        self.aliases = None

    def unfold(self, memory: torch.Tensor) -> None:
        """``memory`` has the bytes: the same tensors again, all of one version counter as views are."""
        version = memory._version
        self.aliases = [
            memory.view(dtype)
            .as_strided(size, stride, offset)
            .detach()  # not views, that would hold `memory`
            for dtype, size, stride, offset in self.layouts
        ]
        self.writes = [written - version for written in self.writes]

    def is_clean(self) -> bool:
        """The host has the same bytes."""
        return (
            self.account.host is not None
            and self.aliases is not None
            and len(self.aliases) == len(self.layouts)
            and self.aliases[0]._version == self.account.clean_version
        )


@dataclass(slots=True)
class Saved:
    """What an autograd node holds instead of a tensor."""

    record: Activation
    place: int
    version: int
