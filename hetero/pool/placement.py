"""Placing buffers one after another in a given order, each in a hole left by those alive at the same time.

Owns `Placer`, the engine under the greedy planners and the order searches. Invariant: a buffer is put into the first,
or the smallest, hole that fits among the buffers already placed whose lives overlap its own, or on top of them. The
order is the caller's. Compiled with Numba where installed; otherwise the same rule in NumPy.

[Note: windows]
A buffer need only be compared with placed buffers near it in time. The horizon is covered, at a few scales, by windows
that overlap by half; every window lists the placed buffers that touch it, by offset, and a buffer scans the list of the
smallest window that holds its whole life. A short life then scans hundreds of entries instead of all.
"""

from dataclasses import dataclass

import numpy as np

from hetero.pool._jit import COMPILED
from hetero.pool.problem import IntArray
from hetero.pool.reduction import clique_lives

__all__ = ["Placer"]

NO_LIMIT = 2**62
# Scales of the windows: each this many times finer than the one before, down to a few cliques a window.
_REFINEMENT = 8
_FINEST_HALF = 32


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Windows:
    halves: IntArray
    counts: IntArray
    level_starts: IntArray
    list_starts: IntArray
    home: IntArray


class Placer:
    """Places one set of lives in any number of orders; what does not depend on the order is computed once."""

    def __init__(self, begins: IntArray, ends: IntArray, sizes: IntArray) -> None:
        self.sizes = np.ascontiguousarray(sizes, dtype=np.int64)
        if len(sizes):
            self.begins, self.ends = clique_lives(begins, ends)
        else:
            self.begins, self.ends = np.array(begins), np.array(ends)
        self._windows = _windows(self.begins, self.ends) if COMPILED and len(sizes) else None

    def place(self, order: IntArray, *, best_fit: bool, limit: int = NO_LIMIT) -> tuple[IntArray | None, int]:
        """Offsets (bytes, shape (n,)) and footprint; or None and the buffer that would end above ``limit``."""
        if self._windows is None:
            return _place_with_numpy(self.begins, self.ends, self.sizes, order, best_fit, limit)
        # Imported late: it imports Numba, see hetero.pool._jit.
        from hetero.pool import _placement_kernel

        index = self._windows
        offsets = np.zeros(len(self.sizes), dtype=np.int64)
        result = _placement_kernel.place(
            self.begins,
            self.ends,
            self.sizes,
            np.ascontiguousarray(order, dtype=np.int64),
            best_fit,
            limit,
            index.halves,
            index.counts,
            index.list_starts,
            index.level_starts,
            index.home,
            offsets,
        )
        return (offsets, result) if result >= 0 else (None, -1 - result)


def _windows(begins: IntArray, ends: IntArray) -> _Windows:
    horizon = int(ends.max())
    halves = [horizon]
    while halves[-1] // _REFINEMENT >= _FINEST_HALF:
        halves.append(-(-halves[-1] // _REFINEMENT))
    counts, lengths, level_starts = [], [], []
    home = np.zeros(len(begins), dtype=np.int64)
    lists = 0
    for half in halves:
        count = max(1, -(-horizon // half) - 1)
        first = np.maximum(begins // half - 1, 0)
        last = np.minimum((ends - 1) // half, count - 1)
        change = np.zeros(count + 1, dtype=np.int64)
        np.add.at(change, first, 1)
        np.subtract.at(change, last + 1, 1)
        window = np.minimum(begins // half, count - 1)
        holds = ends <= (window + 2) * half
        home[holds] = lists + window[holds]
        counts.append(count)
        lengths.append(np.cumsum(change)[:count])
        level_starts.append(lists)
        lists += count
    return _Windows(
        halves=np.array(halves, dtype=np.int64),
        counts=np.array(counts, dtype=np.int64),
        level_starts=np.array(level_starts, dtype=np.int64),
        list_starts=np.concatenate([[0], np.cumsum(np.concatenate(lengths))]).astype(np.int64),
        home=home,
    )


def _place_with_numpy(
    begins: IntArray, ends: IntArray, sizes: IntArray, order: IntArray, best_fit: bool, limit: int
) -> tuple[IntArray | None, int]:
    """The rule of `_placement_kernel.place`, one vector operation a buffer over all that are placed."""
    # Rows: offset, top, begin, end of placed buffers, by ascending offset.
    placed = np.empty((4, len(sizes)), dtype=np.int64)
    offsets = np.zeros(len(sizes), dtype=np.int64)
    footprint = 0
    for count, i in enumerate(order.tolist()):
        low, top, begin, end = placed[:, :count]
        near = np.flatnonzero((begin < ends[i]) & (begins[i] < end))
        highs = np.concatenate([[0], np.maximum.accumulate(top[near])])
        at = _hole(low[near] - highs[:-1], highs, int(sizes[i]), best_fit)
        if at + int(sizes[i]) > limit:
            return None, i
        offsets[i] = at
        footprint = max(footprint, at + int(sizes[i]))
        position = int(np.searchsorted(low, at, side="right"))
        placed[:, position + 1 : count + 1] = placed[:, position:count].copy()
        placed[:, position] = at, at + sizes[i], begins[i], ends[i]
    return offsets, footprint


def _hole(gaps: IntArray, highs: IntArray, size: int, best_fit: bool) -> int:
    """Start of the first or the smallest gap that fits, else the top."""
    fits = np.flatnonzero(gaps >= size)
    if len(fits) == 0:
        return int(highs[-1])
    chosen = fits[np.argmin(gaps[fits])] if best_fit else fits[0]
    return int(highs[chosen])
