"""The inner loops of placement by order, written for Numba: import it only through `hetero.pool.placement`.

Owns `place` (holes, with repair of the order) and `skyline` (lowest offset first) on plain arrays.
Invariant of `place`: each list of the index (see `hetero.pool.windows`) holds the placed buffers that
touch its window, by ascending offset. Nothing is validated here.
"""

import numpy as np
import numpy.typing as npt

from hetero.jit import jit
from hetero.pool.problem import IntArray

__all__ = ["place", "skyline"]

_FAR = 2**62


@jit
def place(
    begins: IntArray,
    ends: IntArray,
    sizes: IntArray,
    order: IntArray,
    depth: int,
    best_fit: bool,
    limit: int,
    draws: npt.NDArray[np.float64],
    halves: IntArray,
    counts: IntArray,
    list_starts: IntArray,
    level_starts: IntArray,
    home: IntArray,
    entries: npt.NDArray[np.int32],
    held: IntArray,
    offsets: IntArray,
) -> tuple[int, int]:
    """Place ``order[depth:]``; return how many are placed in the end and how many repairs that took.

    A buffer that would end above ``limit`` moves to an earlier place in ``order``, a random distance
    forward that is short more often than long, and placing resumes from there; one draw (uniform in [0, 1))
    a repair, until none is left.
    """
    repairs = 0
    while depth < len(order):
        i = order[depth]
        at = _hole(begins, ends, sizes, offsets, entries, list_starts[home[i]], held[home[i]], i, best_fit)
        if at + sizes[i] <= limit:
            offsets[i] = at
            _list(begins, ends, offsets, halves, counts, list_starts, level_starts, entries, held, i)
            depth += 1
            continue
        if repairs == len(draws):
            break
        distance = int(np.exp(draws[repairs] * np.log(depth + 1.0)))
        earlier = max(0, depth - max(1, distance))
        repairs += 1
        for k in range(depth - 1, earlier - 1, -1):
            _unlist(begins, ends, offsets, halves, counts, list_starts, level_starts, entries, held, order[k])
            order[k + 1] = order[k]
        order[earlier] = i
        depth = earlier
    return depth, repairs


@jit
def skyline(begins: IntArray, ends: IntArray, sizes: IntArray, limit: int, offsets: IntArray) -> int:
    """Always place the buffer that can lie lowest, the lowest number among equals, where it can.

    Fill ``offsets``; return the footprint, or ``-1 - i`` when buffer ``i`` would end above ``limit``.
    """
    count, footprint, chosen = len(sizes), 0, 0
    number = np.arange(count)
    begin, end = begins.astype(np.int32), ends.astype(np.int32)
    lowest = np.zeros(count, dtype=np.int64)
    while count > 0:
        i = number[chosen]
        top = lowest[chosen] + sizes[i]
        if top > limit:
            return int(-1 - i)
        offsets[i] = lowest[chosen]
        footprint = max(footprint, top)
        chosen_begin, chosen_end = begin[chosen], end[chosen]
        # One pass drops the chosen one, raises those alive with it, and finds the next.
        least, following, out = _FAR, 0, 0
        for k in range(count):
            if k == chosen:
                continue
            low = lowest[k]
            if begin[k] < chosen_end and chosen_begin < end[k] and low < top:
                low = top
            number[out], begin[out], end[out], lowest[out] = number[k], begin[k], end[k], low
            if low < least:
                least, following = low, out
            out += 1
        chosen = following
        count -= 1
    return int(footprint)


@jit
def _hole(
    begins: IntArray,
    ends: IntArray,
    sizes: IntArray,
    offsets: IntArray,
    entries: npt.NDArray[np.int32],
    start: int,
    count: int,
    i: int,
    best_fit: bool,
) -> int:
    """Offset of the first or the smallest hole that takes buffer ``i``, else the top."""
    begin, end, size = begins[i], ends[i], sizes[i]
    at, smallest, high = -1, _FAR, 0
    for position in range(start, start + count):
        j = entries[position]
        if begins[j] < end and begin < ends[j]:
            gap = offsets[j] - high
            if size <= gap < smallest:
                at, smallest = high, gap
                if not best_fit or gap == size:
                    break
            high = max(high, offsets[j] + sizes[j])
    return at if at >= 0 else high


@jit
def _list(
    begins: IntArray,
    ends: IntArray,
    offsets: IntArray,
    halves: IntArray,
    counts: IntArray,
    list_starts: IntArray,
    level_starts: IntArray,
    entries: npt.NDArray[np.int32],
    held: IntArray,
    i: int,
) -> None:
    """Enter a placed buffer into the list of every window that it touches."""
    for level in range(len(halves)):
        first = max(begins[i] // halves[level] - 1, 0)
        last = min((ends[i] - 1) // halves[level], counts[level] - 1)
        for window in range(level_starts[level] + first, level_starts[level] + last + 1):
            low = list_starts[window]
            left, right = low, low + held[window]
            while left < right:
                middle = (left + right) // 2
                if offsets[entries[middle]] <= offsets[i]:
                    left = middle + 1
                else:
                    right = middle
            for position in range(low + held[window], left, -1):
                entries[position] = entries[position - 1]
            entries[left] = i
            held[window] += 1


@jit
def _unlist(
    begins: IntArray,
    ends: IntArray,
    offsets: IntArray,
    halves: IntArray,
    counts: IntArray,
    list_starts: IntArray,
    level_starts: IntArray,
    entries: npt.NDArray[np.int32],
    held: IntArray,
    i: int,
) -> None:
    """Undo `_list`."""
    for level in range(len(halves)):
        first = max(begins[i] // halves[level] - 1, 0)
        last = min((ends[i] - 1) // halves[level], counts[level] - 1)
        for window in range(level_starts[level] + first, level_starts[level] + last + 1):
            low = list_starts[window]
            left, right = low, low + held[window]
            while left < right:
                middle = (left + right) // 2
                if offsets[entries[middle]] < offsets[i]:
                    left = middle + 1
                else:
                    right = middle
            while entries[left] != i:
                left += 1
            for position in range(left, low + held[window] - 1):
                entries[position] = entries[position + 1]
            held[window] -= 1
