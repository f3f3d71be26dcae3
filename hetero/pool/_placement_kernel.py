"""The inner loop of every ordered placement, written for Numba: import it only through `hetero.pool.placement`.

Owns one function on plain arrays. Invariant: each list of the index (see `hetero.pool.placement`) holds the placed
buffers that touch its window, by ascending offset. Nothing is validated here.
"""

import numpy as np

from hetero.pool._jit import jit
from hetero.pool.problem import IntArray

__all__ = ["place"]


@jit
def place(
    begins: IntArray,
    ends: IntArray,
    sizes: IntArray,
    order: IntArray,
    best_fit: bool,
    limit: int,
    halves: IntArray,
    counts: IntArray,
    list_starts: IntArray,
    level_starts: IntArray,
    home: IntArray,
    offsets: IntArray,
) -> int:
    """Fill ``offsets``; return the footprint, or ``-1 - i`` when buffer ``i`` would end above ``limit``."""
    tops = np.empty_like(sizes)
    entries = np.empty(list_starts[-1], dtype=np.int32)
    held = np.zeros(len(list_starts) - 1, dtype=np.int64)
    footprint = 0
    for i in order:
        begin, end, size = begins[i], ends[i], sizes[i]
        at, hole, high = -1, np.int64(2**62), 0
        start = list_starts[home[i]]
        for position in range(start, start + held[home[i]]):
            j = entries[position]
            if begins[j] < end and begin < ends[j]:
                gap = offsets[j] - high
                if size <= gap < hole:
                    at, hole = high, gap
                    if not best_fit or gap == size:
                        break
                if tops[j] > high:
                    high = tops[j]
        if at < 0:
            at = high
        if at + size > limit:
            return -1 - i
        offsets[i] = at
        tops[i] = at + size
        footprint = max(footprint, at + size)
        for level in range(len(halves)):
            half = halves[level]
            first = max(begin // half - 1, 0)
            last = min((end - 1) // half, counts[level] - 1)
            for window in range(level_starts[level] + first, level_starts[level] + last + 1):
                low = list_starts[window]
                count = held[window]
                left, right = low, low + count
                while left < right:
                    middle = (left + right) // 2
                    if offsets[entries[middle]] <= at:
                        left = middle + 1
                    else:
                        right = middle
                for position in range(low + count, left, -1):
                    entries[position] = entries[position - 1]
                entries[left] = i
                held[window] = count + 1
    return footprint
