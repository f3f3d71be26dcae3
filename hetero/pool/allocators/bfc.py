"""TensorFlow's best-fit-with-coalescing allocator, simulated.

Owns `BfcAllocator`. Invariant: every byte of every region belongs to exactly one chunk, neighbouring free
chunks are merged, and every free chunk is listed in the bin of its size. Regions are never returned. It
holds numbers only, no memory.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass

from hetero.errors import BudgetError, ConfigError
from hetero.pool.allocators.holdings import Holdings
from hetero.pool.problem import BufferId
from hetero.units import round_up

__all__ = ["BfcAllocator"]

_QUANTUM = 256
_BINS = 21
_FIRST_REGION = 2 * 2**20
_MOST_INTERNAL_WASTE = 128 * 2**20
_BACK_OFF = 0.9
# Regions lie this far apart at least, so that chunks of different regions are never neighbours.
_REGION_GAP = _QUANTUM


@dataclass(slots=True, eq=False)
class _Chunk:
    address: int
    size: int
    free: bool
    previous: "_Chunk | None"
    following: "_Chunk | None"


class BfcAllocator(Holdings[_Chunk]):
    """TensorFlow BFC as of its source: 256-byte quantum, 21 bins, best fit in a bin, doubling regions.

    ``memory_limit``: bytes the allocator may reserve (None: no limit). ``allow_growth``: regions start at 2
    MiB and double; otherwise the first request reserves the limit at once. ``device_free``: bytes the
    device can really give (None: any), past which a region backs off by a tenth at a time.
    """

    def __init__(
        self, *, memory_limit: int | None = None, allow_growth: bool = True, device_free: int | None = None
    ) -> None:
        super().__init__()
        if not allow_growth and memory_limit is None:
            raise ConfigError(
                "allow_growth=False reserves the whole memory_limit at once: set memory_limit in bytes"
            )
        if memory_limit is not None and memory_limit < _QUANTUM:
            raise ConfigError(f"memory_limit={memory_limit}: must be at least {_QUANTUM} bytes")
        self._limit = memory_limit
        self._device_free = device_free
        self._next_region = _FIRST_REGION if allow_growth or memory_limit is None else _rounded(memory_limit)
        self._bins: list[list[tuple[int, int]]] = [[] for _ in range(_BINS)]
        self._free_chunks: dict[int, _Chunk] = {}
        self._regions: list[int] = []
        self._next_address = 0
        self._backed_off = False
        self._reserved = 0

    @property
    def reserved(self) -> int:
        """Sum of the regions, bytes."""
        return self._reserved

    @property
    def regions(self) -> tuple[int, ...]:
        """Sizes of the regions, oldest first, bytes."""
        return tuple(self._regions)

    def allocate(self, id: BufferId, nbytes: int, *, stream: int = 0) -> None:
        """Serve ``nbytes`` for ``id``; raises `BudgetError` out of memory, `PlanError` if ``id`` holds some
        already.

        ``stream`` is of no importance here: TensorFlow has one compute stream.
        """
        self._check_absent(id)
        if nbytes == 0:
            self._hold(id, None, 0)
            return
        rounded = _rounded(nbytes)
        chunk = self._find(rounded)
        if chunk is None and self._extend(rounded):
            chunk = self._find(rounded)
        if chunk is None:
            raise BudgetError(
                f"BFC cannot give {rounded} bytes for {id!r}: {self._reserved} reserved, {self._provided} in "
                f"use, limit {self._limit}; raise memory_limit"
            )
        chunk.free = False
        self._hold(id, chunk, nbytes)

    def free(self, id: BufferId) -> None:
        """Take the chunk of ``id`` back and merge it with free neighbours."""
        chunk = self._take_back(id)
        if chunk is None:
            return
        chunk.free = True
        following, previous = chunk.following, chunk.previous
        if following is not None and following.free:
            self._unlist(following)
            _absorb(chunk, following)
        if previous is not None and previous.free:
            self._unlist(previous)
            _absorb(previous, chunk)
            chunk = previous
        self._list(chunk)

    def _find(self, rounded: int) -> _Chunk | None:
        """The first chunk that fits, bins upward, by (size, address) in each; split where too large."""
        for number in range(_bin(rounded), _BINS):
            position = bisect_left(self._bins[number], (rounded, -1))
            if position < len(self._bins[number]):
                chunk = self._free_chunks[self._bins[number][position][1]]
                self._unlist(chunk)
                if chunk.size >= 2 * rounded or chunk.size - rounded >= _MOST_INTERNAL_WASTE:
                    self._split(chunk, rounded)
                return chunk
        return None

    def _split(self, chunk: _Chunk, size: int) -> None:
        rest = _Chunk(chunk.address + size, chunk.size - size, True, chunk, chunk.following)
        if chunk.following is not None:
            chunk.following.previous = rest
        chunk.following, chunk.size = rest, size
        self._list(rest)

    def _extend(self, rounded: int) -> bool:
        """Reserve another region that holds ``rounded`` bytes, if it can be had."""
        available = rounded if self._limit is None else (self._limit - self._reserved) // _QUANTUM * _QUANTUM
        if rounded > available:
            return False
        doubled = False
        while rounded > self._next_region:
            self._next_region *= 2
            doubled = True
        size = self._next_region if self._limit is None else min(self._next_region, available)
        if not self._device_gives(size):
            # TensorFlow backs off once in an allocator's life; later failures are final.
            if self._backed_off:
                return False
            self._backed_off = True
            while not self._device_gives(size):
                size = _rounded(int(size * _BACK_OFF))
                if size < rounded or size == _QUANTUM:
                    return False
        if not doubled:
            self._next_region *= 2
        self._regions.append(size)
        self._reserved += size
        self._list(_Chunk(self._next_address, size, True, None, None))
        self._next_address += size + _REGION_GAP
        return True

    def _device_gives(self, size: int) -> bool:
        return self._device_free is None or self._reserved + size <= self._device_free

    def _list(self, chunk: _Chunk) -> None:
        insort(self._bins[_bin(chunk.size)], (chunk.size, chunk.address))
        self._free_chunks[chunk.address] = chunk

    def _unlist(self, chunk: _Chunk) -> None:
        bin_ = self._bins[_bin(chunk.size)]
        del bin_[bisect_left(bin_, (chunk.size, chunk.address))]
        del self._free_chunks[chunk.address]


def _rounded(nbytes: int) -> int:
    return max(_QUANTUM, round_up(nbytes, _QUANTUM))


def _bin(size: int) -> int:
    """Bin k holds sizes from 256 x 2^k up to the next bin's; the last holds everything larger."""
    return min(_BINS - 1, (size // _QUANTUM).bit_length() - 1)


def _absorb(chunk: _Chunk, following: _Chunk) -> None:
    chunk.size += following.size
    chunk.following = following.following
    if chunk.following is not None:
        chunk.following.previous = chunk
