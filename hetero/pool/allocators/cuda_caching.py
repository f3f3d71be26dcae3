"""PyTorch's CUDA caching allocator, simulated.

Owns `CudaCachingAllocator`: rounding, the search for a block, splitting, merging, and what happens on a
miss. Invariant: the blocks of a segment follow each other without gaps, neighbouring free ones are merged,
and every free block is in its pool's list. Pages of expandable segments belong to
`hetero.pool.allocators.expandable`. It holds numbers only.
"""

from dataclasses import dataclass

from hetero.errors import BudgetError, ConfigError
from hetero.pool.allocators.blocks import Block, FreeList, Segment, merge, split_off
from hetero.pool.allocators.expandable import grow, unmap_free_pages
from hetero.pool.allocators.holdings import Holdings
from hetero.pool.problem import BufferId
from hetero.units import round_up

__all__ = ["CachingSettings", "CudaCachingAllocator"]

_MIB = 2**20
_MIN_BLOCK = 512
_SMALL_SIZE = _MIB
_SMALL_SEGMENT = 2 * _MIB
_LARGE_SEGMENT = 20 * _MIB
_MIN_LARGE = 10 * _MIB
_ROUND_LARGE = 2 * _MIB
# PyTorch's max_non_split_rounding_mb: how much larger an oversize block may be than the oversize request it
# serves.
_MOST_OVERSIZE_WASTE = 20 * _MIB
_ENDLESS = 2**63  # more than the sizes of any problem sum up to


@dataclass(frozen=True, slots=True, kw_only=True)
class CachingSettings:
    """The parts of ``PYTORCH_CUDA_ALLOC_CONF`` that decide where memory goes; defaults are PyTorch's.

    ``max_split_size``: bytes; None for no limit, else more than 20 MiB. ``roundup_power2_divisions``: a
    power of two; 1 for none. Raises `ConfigError` for other values.
    """

    max_split_size: int | None = None
    roundup_power2_divisions: int = 1
    expandable_segments: bool = False

    def __post_init__(self) -> None:
        if self.max_split_size is not None and self.max_split_size <= _LARGE_SEGMENT:
            raise ConfigError(
                f"max_split_size={self.max_split_size}: must be over {_LARGE_SEGMENT} bytes (20 MiB)"
            )
        divisions = self.roundup_power2_divisions
        if divisions < 1 or divisions & (divisions - 1):
            raise ConfigError(f"roundup_power2_divisions={divisions}: must be a power of two, 1 for none")


class CudaCachingAllocator(Holdings[Block]):
    """The allocator behind ``torch.cuda``, block by block; ``device_nbytes`` is what ``cudaMalloc`` can
    give (None: any).
    """

    def __init__(self, settings: CachingSettings | None = None, *, device_nbytes: int | None = None) -> None:
        super().__init__()
        self.settings = settings or CachingSettings()
        self._device_nbytes = device_nbytes
        self._free_lists: dict[tuple[int, bool], FreeList] = {}
        self._segments: list[Segment] = []
        self._next_address = 0

    @property
    def reserved(self) -> int:
        """Sum of what segments have mapped, bytes (``torch.cuda.memory_reserved``)."""
        return sum(segment.mapped for segment in self._segments)

    @property
    def segments(self) -> tuple[tuple[int, tuple[tuple[int, bool], ...]], ...]:
        """Per segment in order of creation: mapped bytes, and (bytes, in use) of each mapped block by
        address.
        """
        return tuple(
            (segment.mapped, tuple((block.size, not block.free) for block in segment if block.mapped))
            for segment in self._segments
        )

    def allocate(self, id: BufferId, nbytes: int, *, stream: int = 0) -> None:
        """Serve ``nbytes`` for ``id``; raises `BudgetError` out of memory, `PlanError` if ``id`` holds some
        already.
        """
        self._check_absent(id)
        if nbytes == 0:
            self._hold(id, None, 0)
            return
        size = self.round_size(nbytes)
        free_list = self._free_list(stream, small=size <= _SMALL_SIZE)
        block = self._find(free_list, size) or self._after_miss(free_list, size)
        if block is None:
            raise BudgetError(
                f"cannot give {size} bytes for {id!r}: {self.reserved} reserved, {self._provided} used, the "
                f"device has {self._device_nbytes}; raise device_nbytes"
            )
        if self._should_split(block, size):
            free_list.add(split_off(block, size))
        block.free = False
        self._hold(id, block, nbytes)

    def free(self, id: BufferId) -> None:
        """Take the block of ``id`` back and merge it with free neighbours; its segment stays."""
        block = self._take_back(id)
        if block is None:
            return
        block.free = True
        free_list = block.segment.free_list
        for neighbour in (block.previous, block.following):
            if neighbour is not None and neighbour.free and neighbour.mapped:
                free_list.remove(neighbour)
                block = merge(block, neighbour)
        free_list.add(block)

    def empty_cache(self) -> None:
        """Give back to the device whatever no one holds, as ``torch.cuda.empty_cache`` does."""
        for free_list in self._free_lists.values():
            for block in list(free_list):
                self._release(block)

    def round_size(self, nbytes: int) -> int:
        """Bytes of the block that a request of ``nbytes`` > 0 asks for."""
        divisions = self.settings.roundup_power2_divisions
        if nbytes < _MIN_BLOCK:
            return _MIN_BLOCK
        if divisions > 1 and nbytes > _MIN_BLOCK * divisions:
            step = (1 << nbytes.bit_length() - 1) // divisions
            return round_up(nbytes, step)
        return round_up(nbytes, _MIN_BLOCK)

    def _free_list(self, stream: int, *, small: bool) -> FreeList:
        key = stream, small
        if key not in self._free_lists:
            self._free_lists[key] = FreeList(small=small)
        return self._free_lists[key]

    def _find(self, free_list: FreeList, size: int) -> Block | None:
        """The smallest free block that fits and that the settings let this request have, out of its list."""
        candidates = free_list.at_least(size)
        block = next(candidates, None)
        if block is None:
            return None
        if block.segment.expandable:
            # Best fit counts a tail block as large as it can grow, so that the tail is kept for last.
            for other in candidates:
                if not block.is_split or _size_when_grown(other) >= _size_when_grown(block):
                    break
                block = other
        limit = self.settings.max_split_size
        if limit is not None:
            if size < limit <= block.size:
                return None
            if size >= limit and block.size >= size + _MOST_OVERSIZE_WASTE:
                return None
        free_list.remove(block)
        return block

    def _after_miss(self, free_list: FreeList, size: int) -> Block | None:
        """PyTorch's order: a new segment; one more after oversize blocks go; one more after all cached
        blocks go.
        """
        block = self._new_memory(free_list, size)
        if block is None and self._release_oversize(free_list, size):
            block = self._new_memory(free_list, size)
        if block is None:
            self.empty_cache()
            block = self._new_memory(free_list, size)
        return block

    def _new_memory(self, free_list: FreeList, size: int) -> Block | None:
        if self.settings.expandable_segments:
            return self._grow_segment(free_list, size)
        nbytes = _segment_size(size)
        if not self._device_gives(nbytes):
            return None
        segment = Segment(free_list, self._take_addresses(nbytes), nbytes, page=0)
        self._segments.append(segment)
        return segment.first

    def _grow_segment(self, free_list: FreeList, size: int) -> Block | None:
        page = _SMALL_SEGMENT if free_list.small else _LARGE_SEGMENT
        expandable = (s for s in self._segments if s.free_list is free_list and s.expandable)
        segment = next(expandable, None)
        if segment is None:
            # PyTorch reserves addresses for more than the device holds; here the tail never ends.
            segment = Segment(free_list, self._take_addresses(_ENDLESS), _ENDLESS, page=page)
            self._segments.append(segment)
        room = None if self._device_nbytes is None else self._device_nbytes - self.reserved
        return grow(segment, size, room)

    def _take_addresses(self, nbytes: int) -> int:
        address = self._next_address
        self._next_address += nbytes + _LARGE_SEGMENT
        return address

    def _device_gives(self, nbytes: int) -> bool:
        return self._device_nbytes is None or self.reserved + nbytes <= self._device_nbytes

    def _should_split(self, block: Block, size: int) -> bool:
        rest = block.size - size
        if block.segment.free_list.small or self.settings.expandable_segments:
            return rest >= _MIN_BLOCK
        limit = self.settings.max_split_size
        return (limit is None or size < limit) and rest > _SMALL_SIZE

    def _release_oversize(self, free_list: FreeList, size: int) -> bool:
        """Give oversize blocks back to the device: one that is large enough, or the largest until they
        are.
        """
        limit = self.settings.max_split_size
        if limit is None:
            return False
        wanted = max(size, limit)
        fitting = next(free_list.at_least(wanted), None)
        if fitting is not None:
            self._release(fitting)
            return True
        released = 0
        for block in reversed(list(free_list)):
            if released >= wanted or block.size < limit:
                break
            released += block.size
            self._release(block)
        return released >= wanted

    def _release(self, block: Block) -> None:
        if block.segment.expandable:
            unmap_free_pages(block)
        elif not block.is_split:
            block.segment.free_list.remove(block)
            self._segments.remove(block.segment)


def _segment_size(size: int) -> int:
    if size <= _SMALL_SIZE:
        return _SMALL_SEGMENT
    if size < _MIN_LARGE:
        return _LARGE_SEGMENT
    return round_up(size, _ROUND_LARGE)


def _size_when_grown(block: Block) -> int:
    tail = block.following
    return block.size + (tail.size if tail is not None and not tail.mapped else 0)
