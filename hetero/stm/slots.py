"""Host memory for what leaves the device for a while.

Owns pinned blocks that are used again and again. Invariant: a block is used by one record at a time, and what is in
use beside homes stays within the host's budget. Starts no copy.
"""

from collections import defaultdict

import torch

from hetero.devices import HostArena
from hetero.stm.state import Kind, Ledger, Tier

__all__ = ["HostSlots"]


class HostSlots:
    """Blocks of bytes out of ``arena``, within ``host_budget`` bytes together with all else that the ledger counts."""

    def __init__(self, arena: HostArena, ledger: Ledger, host_budget: int) -> None:
        self._arena = arena
        self._ledger = ledger
        self._budget = host_budget
        self._free: dict[int, list[torch.Tensor]] = defaultdict(list)
        self.nbytes = 0

    def take(self, nbytes: int) -> torch.Tensor | None:
        """A block of exactly ``nbytes``, uninitialised; None if the budget has no room for it."""
        free = self._free.get(nbytes)
        if free:
            return free.pop()
        others = self._ledger.host_bytes - self._ledger.nbytes(Tier.HOST, Kind.ACTIVATION)
        if others + self.nbytes + nbytes > self._budget:
            return None
        self.nbytes += nbytes
        return self._arena.empty_strided((nbytes,), (1,), torch.uint8)

    def give_back(self, block: torch.Tensor) -> None:
        """Nobody uses ``block`` any more: every copy from or to it has been waited for by compute."""
        self._free[block.numel()].append(block)
