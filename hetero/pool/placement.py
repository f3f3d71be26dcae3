"""Placing buffers one after another: each in a hole left by those alive at the same time, or by lowest
offset first.

Owns `Placer`, the engine under the greedy planners and the order searches. Invariant: a buffer is put into
the first, or the smallest, hole that fits among the buffers already placed whose lives overlap its own, or
on top of them. Which order is good is the caller's business. Compiled with Numba where installed; otherwise
the same rules in NumPy.
"""

import numpy as np

from hetero.jit import COMPILED
from hetero.pool.problem import IntArray
from hetero.pool.reduction import clique_lives
from hetero.pool.windows import cover

__all__ = ["NO_LIMIT", "Placer", "Repair", "hole"]

NO_LIMIT = 2**62


class Placer:
    """Places one set of lives in any number of orders; what does not depend on the order is computed once."""

    def __init__(self, begins: IntArray, ends: IntArray, sizes: IntArray) -> None:
        self.sizes = np.ascontiguousarray(sizes, dtype=np.int64)
        self.begins, self.ends = clique_lives(begins, ends) if len(sizes) else (begins, ends)
        self.windows = cover(self.begins, self.ends) if len(sizes) else None

    def place(self, order: IntArray, *, best_fit: bool, limit: int = NO_LIMIT) -> tuple[IntArray, int] | None:
        """Offsets (bytes, shape (n,)) and footprint; None as soon as a buffer would end above ``limit``."""
        if len(self.sizes) == 0:
            return np.zeros(0, dtype=np.int64), 0
        if not COMPILED:
            return _place_with_numpy(self.begins, self.ends, self.sizes, order, best_fit, limit)
        attempt = Repair(self, order, best_fit=best_fit)
        return attempt.run(limit, np.empty(0))

    def skyline(self, order: IntArray, *, limit: int = NO_LIMIT) -> tuple[IntArray, int] | None:
        """Whoever can lie lowest goes first, the earlier in ``order`` among equals; else as `place`."""
        begins, ends, sizes = self.begins[order], self.ends[order], self.sizes[order]
        offsets = np.zeros(len(sizes), dtype=np.int64)
        if COMPILED:
            # Imported late: it imports Numba, see hetero.jit.
            from hetero.pool import _placement_kernel

            footprint = _placement_kernel.skyline(begins, ends, sizes, limit, offsets)
        else:
            footprint = _skyline_with_numpy(begins, ends, sizes, limit, offsets)
        if footprint < 0:
            return None
        placed = np.empty_like(offsets)
        placed[order] = offsets
        return placed, footprint


class Repair:
    """One order under repair: a buffer that would end above the limit moves forward in it, and placing goes
    on.

    This is hill-climbing on the bottleneck, also known as squeaky wheel optimisation. What lies before the
    buffer's new place stays placed, so most repairs are cheap. Plain Python where Numba is missing: for
    small problems only.
    """

    def __init__(self, placer: Placer, order: IntArray, *, best_fit: bool) -> None:
        self._placer = placer
        self._order = np.array(order, dtype=np.int64)
        self._best_fit = best_fit
        assert placer.windows is not None
        self._windows = placer.windows
        self._entries = np.empty(int(self._windows.list_starts[-1]), dtype=np.int32)
        self._held = np.zeros(len(self._windows.list_starts) - 1, dtype=np.int64)
        self._offsets = np.zeros(len(order), dtype=np.int64)
        self._depth = 0
        self._limit = NO_LIMIT

    def run(
        self, limit: int, draws: np.ndarray[tuple[int], np.dtype[np.float64]]
    ) -> tuple[IntArray, int] | None:
        """Offsets and footprint within ``limit``, or None after one repair for each of ``draws`` (uniform
        in [0, 1)).

        A later call goes on where this one stopped; from the first place, in the repaired order, after a
        success or under a lower limit.
        """
        # Imported late: it imports Numba, see hetero.jit.
        from hetero.pool import _placement_kernel

        if limit < self._limit or self._depth == len(self._order):
            self._depth = 0
            self._held[:] = 0
        self._limit = limit
        placer, windows = self._placer, self._windows
        self._depth, _ = _placement_kernel.place(
            placer.begins,
            placer.ends,
            placer.sizes,
            self._order,
            self._depth,
            self._best_fit,
            limit,
            draws,
            windows.halves,
            windows.counts,
            windows.list_starts,
            windows.level_starts,
            windows.home,
            self._entries,
            self._held,
            self._offsets,
        )
        if self._depth < len(self._order):
            return None
        return self._offsets.copy(), int((self._offsets + placer.sizes).max())


def _place_with_numpy(
    begins: IntArray, ends: IntArray, sizes: IntArray, order: IntArray, best_fit: bool, limit: int
) -> tuple[IntArray, int] | None:
    """The rule of the kernel's ``place``, one vector operation a buffer over all that are placed."""
    # Rows: offset, top, begin, end of placed buffers, by ascending offset.
    placed = np.empty((4, len(sizes)), dtype=np.int64)
    offsets = np.zeros(len(sizes), dtype=np.int64)
    footprint = 0
    for count, i in enumerate(order.tolist()):
        low, top, begin, end = placed[:, :count]
        near = np.flatnonzero((begin < ends[i]) & (begins[i] < end))
        highs = np.concatenate([[0], np.maximum.accumulate(top[near])])
        at = hole(low[near] - highs[:-1], highs, int(sizes[i]), best_fit=best_fit)
        if at + int(sizes[i]) > limit:
            return None
        offsets[i] = at
        footprint = max(footprint, at + int(sizes[i]))
        position = int(np.searchsorted(low, at, side="right"))
        placed[:, position + 1 : count + 1] = placed[:, position:count].copy()
        placed[:, position] = at, at + sizes[i], begins[i], ends[i]
    return offsets, footprint


def hole(gaps: IntArray, highs: IntArray, size: int, *, best_fit: bool) -> int:
    """Start of the first or the smallest gap that fits, else the top.

    ``highs``: ascending; where each gap begins, and last the top.
    """
    fits = np.flatnonzero(gaps >= size)
    if len(fits) == 0:
        return int(highs[-1])
    chosen = fits[np.argmin(gaps[fits])] if best_fit else fits[0]
    return int(highs[chosen])


def _skyline_with_numpy(
    begins: IntArray, ends: IntArray, sizes: IntArray, limit: int, offsets: IntArray
) -> int:
    """The rule of the kernel's ``skyline``."""
    lowest = np.zeros(len(sizes), dtype=np.int64)
    footprint = 0
    for _ in range(len(sizes)):
        i = int(lowest.argmin())
        top = int(lowest[i] + sizes[i])
        if top > limit:
            return -1 - i
        offsets[i] = lowest[i]
        footprint = max(footprint, top)
        raised = (begins < ends[i]) & (begins[i] < ends) & (lowest < top)
        lowest[raised] = top
        lowest[i] = NO_LIMIT
    return footprint
