"""NVIDIA's CNMeM pool, simulated: what the SmartPool paper compares with.

Owns `CnmemAllocator`. Invariant: every byte of every region belongs to exactly one block, used or free, and free
neighbours of one region are merged. Regions are never returned. It holds numbers only, no memory.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass

from hetero.errors import BudgetError, ConfigError
from hetero.pool.allocators.holdings import Holdings
from hetero.pool.problem import BufferId
from hetero.units import round_up

__all__ = ["CnmemAllocator"]

_GRANULARITY = 512


@dataclass(slots=True, eq=False)
class _Block:
    address: int
    size: int
    starts_region: bool


class CnmemAllocator(Holdings[_Block]):
    """CNMeM as of its source: 512-byte granularity, best fit over all free blocks, exact splits.

    ``initial``: bytes reserved at the start, which may be 0. A request that no free block holds reserves a region of
    just its own size, unless ``can_grow`` is False. Blocks of different regions never merge. ``reach`` tells how
    much of a large ``initial`` was ever needed.
    """

    def __init__(self, *, initial: int = 0, can_grow: bool = True) -> None:
        super().__init__()
        if initial < 0:
            raise ConfigError(f"initial={initial} bytes: it cannot be negative")
        self._can_grow = can_grow
        self._free: list[tuple[int, _Block]] = []  # by address
        self._reserved = self._reach = 0
        if initial:
            self._reserve(_rounded(initial))

    @property
    def reserved(self) -> int:
        """Sum of the regions, bytes."""
        return self._reserved

    @property
    def reach(self) -> int:
        """The highest end of a block ever handed out, from the start of the first region, bytes."""
        return self._reach

    def allocate(self, id: BufferId, nbytes: int, *, stream: int = 0) -> None:
        """Serve ``nbytes`` for ``id``; raises `BudgetError` out of memory, `PlanError` if ``id`` holds some
        already.

        ``stream`` is of no importance here: the paper's framework uses one.
        """
        self._check_absent(id)
        if nbytes == 0:
            self._hold(id, None, 0)
            return
        rounded = _rounded(nbytes)
        # The smallest that fits; of equal ones the lowest.
        best = min((b for _, b in self._free if b.size >= rounded), key=lambda b: b.size, default=None)
        if best is None:
            if not self._can_grow:
                raise BudgetError(
                    f"CNMeM cannot give {rounded} bytes for {id!r}: {self._reserved} reserved, {self._provided} in "
                    "use, and it may not grow; raise initial"
                )
            best = self._reserve(rounded)
        del self._free[self._place(best)]
        if best.size > rounded:
            insort(self._free, self._entry(_Block(best.address + rounded, best.size - rounded, False)))
            best.size = rounded
        self._hold(id, best, nbytes)
        self._reach = max(self._reach, best.address + rounded)

    def free(self, id: BufferId) -> None:
        """Take the block of ``id`` back and merge it with free neighbours of its region."""
        block = self._take_back(id)
        if block is None:
            return
        place = self._place(block)
        if place < len(self._free) and _follows(self._free[place][1], block):
            block.size += self._free.pop(place)[1].size
        if place > 0 and _follows(block, self._free[place - 1][1]):
            self._free[place - 1][1].size += block.size
        else:
            self._free.insert(place, self._entry(block))

    def _reserve(self, size: int) -> _Block:
        block = _Block(self._reserved, size, True)
        self._reserved += size
        insort(self._free, self._entry(block))
        return block

    def _entry(self, block: _Block) -> tuple[int, _Block]:
        return block.address, block

    def _place(self, block: _Block) -> int:
        return bisect_left(self._free, block.address, key=lambda entry: entry[0])


def _follows(block: _Block, previous: _Block) -> bool:
    """It may be merged with ``previous``: it begins where that ends, in the same region."""
    return previous.address + previous.size == block.address and not block.starts_region


def _rounded(nbytes: int) -> int:
    return round_up(nbytes, _GRANULARITY)
