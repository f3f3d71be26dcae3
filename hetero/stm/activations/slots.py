"""Host memory for what leaves the device for a while.

Owns pinned blocks that are used again and again. Invariant: a block is used by one record at a time, and all blocks
together, with what homes, gradients and optimizer states will come to, and with what slabs lose at their ends, stay
within the host's budget. Starts no copy.
"""

from collections import defaultdict

import torch

from hetero.devices import HostArena
from hetero.stm.tensors.state import Kind, Ledger, Tier

__all__ = ["HostSlots"]


class HostSlots:
    """Blocks out of ``arena``, within ``host_budget`` bytes. ``home_bytes`` of these are promised to model data at
    home, which is there only in part before the first step."""

    def __init__(self, arena: HostArena, ledger: Ledger, host_budget: int, home_bytes: int) -> None:
        self._arena = arena
        self._ledger = ledger
        self._budget = host_budget
        self._home_bytes = home_bytes
        self._free: dict[int, list[torch.Tensor]] = defaultdict(list)
        self.nbytes = 0

    @property
    def most_bytes(self) -> int:
        """What blocks may come to, slabs' losses not counted."""
        others = self._ledger.host_bytes - self._ledger.nbytes(Tier.HOST, Kind.ACTIVATION)
        return max(0, self._budget - max(others, self._home_bytes))

    def take(self, nbytes: int) -> torch.Tensor | None:
        """A block of exactly ``nbytes``, uninitialised; None if the budget has no room for it."""
        size = self._arena.slab_bytes(nbytes)
        free = self._free.get(size)
        if free:
            return _narrowed(free.pop(), nbytes)
        if not self._has_room(size):
            return None
        self.nbytes += size
        return _narrowed(self._arena.empty_strided((size,), (1,), torch.uint8), nbytes)

    def reserve(self, nbytes: int) -> torch.Tensor | None:
        """A block for model data beyond those that were promised, for good; None likewise."""
        size = self._arena.slab_bytes(nbytes)
        if not self._has_room(size):
            return None
        self._home_bytes += size
        return self._arena.empty_strided((size,), (1,), torch.uint8)

    def promise(self, nbytes: int) -> bool:
        """To model data beyond those that were promised, in memory of their own; False likewise. A negative number
        takes it back."""
        if nbytes > 0 and self.nbytes + nbytes > self.most_bytes:
            return False
        self._home_bytes += nbytes
        return True

    def give_back(self, block: torch.Tensor) -> None:
        """Nobody uses ``block`` any more: every copy from or to it has been waited for by compute."""
        self._free[self._arena.slab_bytes(block.numel())].append(block)

    def _has_room(self, size: int) -> bool:
        return self.nbytes + size + self._arena.lost_bytes(size) <= self.most_bytes


def _narrowed(block: torch.Tensor, nbytes: int) -> torch.Tensor:
    """The first ``nbytes`` of its storage; no view, so that nothing else holds the block."""
    if block.numel() == nbytes:
        return block
    return torch.empty(0, dtype=torch.uint8).set_(block.untyped_storage(), 0, (nbytes,), (1,))
