"""Blocks, segments and free lists of the CUDA caching allocator.

Owns these structures and how blocks are cut and joined. Invariant: a segment's blocks are doubly linked in
ascending address without gaps; a free list is sorted by (size, address). When to cut or join is the
allocator's decision.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Block", "FreeList", "Segment", "merge", "split_off"]


@dataclass(slots=True, eq=False)
class Block:
    """A run of bytes of one segment; ``mapped`` is False for addresses of an expandable segment without
    memory.
    """

    segment: "Segment"
    address: int
    size: int
    free: bool = True
    mapped: bool = True
    previous: "Block | None" = None
    following: "Block | None" = None

    @property
    def is_split(self) -> bool:
        """It shares its segment with others."""
        return self.previous is not None or self.following is not None


class FreeList:
    """Free mapped blocks of one stream and pool, by (size, address)."""

    def __init__(self, *, small: bool) -> None:
        self.small = small
        self._keys: list[tuple[int, int]] = []
        self._blocks: dict[int, Block] = {}

    def __iter__(self) -> Iterator[Block]:
        return (self._blocks[address] for _, address in self._keys)

    def at_least(self, size: int) -> Iterator[Block]:
        """Blocks of ``size`` or more, smallest first; the list must not change while one is taken."""
        start = bisect_left(self._keys, (size, -1))
        return (self._blocks[self._keys[k][1]] for k in range(start, len(self._keys)))

    def add(self, block: Block) -> None:
        """It is free from now on."""
        insort(self._keys, (block.size, block.address))
        self._blocks[block.address] = block

    def remove(self, block: Block) -> None:
        """With the size that it had when it was added."""
        del self._keys[bisect_left(self._keys, (block.size, block.address))]
        del self._blocks[block.address]


class Segment:
    """One range of addresses: all of it memory (``page`` 0), or mapped page by page (``page`` bytes each)."""

    def __init__(self, free_list: FreeList, address: int, size: int, *, page: int) -> None:
        self.free_list = free_list
        self.address = address
        self.page = page
        self.mapped = 0 if page else size
        self.first = Block(self, address, size, mapped=not page)

    @property
    def expandable(self) -> bool:
        """Its memory is mapped page by page."""
        return self.page > 0

    def __iter__(self) -> Iterator[Block]:
        block: Block | None = self.first
        while block is not None:
            yield block
            block = block.following


def split_off(block: Block, size: int) -> Block:
    """Cut ``block`` to its low ``size`` bytes; the rest is returned as a free block, in no list."""
    rest = Block(
        block.segment,
        block.address + size,
        block.size - size,
        mapped=block.mapped,
        previous=block,
        following=block.following,
    )
    if rest.following is not None:
        rest.following.previous = rest
    block.following, block.size = rest, size
    return rest


def merge(one: Block, other: Block) -> Block:
    """Join two neighbours that are in no list; the lower one remains."""
    low, high = (one, other) if one.address < other.address else (other, one)
    low.size += high.size
    low.following = high.following
    if low.following is not None:
        low.following.previous = low
    return low
