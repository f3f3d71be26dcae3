"""The index that lets a buffer be compared only with placed buffers near it in time.

Owns `Windows`. Invariant: a buffer's whole life lies in its home window, and ``list_starts`` leaves each
window room for every buffer that touches it.

[Note: windows]
The horizon is covered, at a few scales, by windows that overlap by half; every window lists the placed
buffers that touch it, by offset, and a buffer scans the list of the smallest window that holds its whole
life. A short life then scans hundreds of entries instead of all.
"""

from dataclasses import dataclass

import numpy as np

from hetero.pool.problem import IntArray

__all__ = ["Windows", "cover"]

# Each scale is this many times finer than the one before, down to windows of a few dozen cliques.
_REFINEMENT = 8
_FINEST_HALF = 32


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Windows:
    """Per scale: half the width in cliques, number of windows, number of its first window. Window k of a
    scale covers ``[k * half, (k + 2) * half)``. ``list_starts``: where each window's list begins. ``home``:
    each buffer's window.
    """

    halves: IntArray
    counts: IntArray
    level_starts: IntArray
    list_starts: IntArray
    home: IntArray


def cover(begins: IntArray, ends: IntArray) -> Windows:
    """Windows for lives over cliques ``[begins[i], ends[i])``, at least one life."""
    horizon = int(ends.max())
    halves = [horizon]
    while halves[-1] // _REFINEMENT >= _FINEST_HALF:
        halves.append(-(-halves[-1] // _REFINEMENT))
    counts, lengths, level_starts = [], [], []
    home = np.zeros(len(begins), dtype=np.int64)
    windows = 0
    for half in halves:
        count = max(1, -(-horizon // half) - 1)
        first = np.maximum(begins // half - 1, 0)
        last = np.minimum((ends - 1) // half, count - 1)
        change = np.zeros(count + 1, dtype=np.int64)
        np.add.at(change, first, 1)
        np.subtract.at(change, last + 1, 1)
        window = np.minimum(begins // half, count - 1)
        holds = ends <= (window + 2) * half
        home[holds] = windows + window[holds]
        counts.append(count)
        lengths.append(np.cumsum(change)[:count])
        level_starts.append(windows)
        windows += count
    return Windows(
        halves=np.array(halves, dtype=np.int64),
        counts=np.array(counts, dtype=np.int64),
        level_starts=np.array(level_starts, dtype=np.int64),
        list_starts=np.concatenate([[0], np.cumsum(np.concatenate(lengths))]).astype(np.int64),
        home=home,
    )
