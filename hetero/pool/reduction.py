"""Shrinking a problem without losing its optimum: maximal cliques, full-life buffers, independent pieces.

Owns `pieces`. Invariant: placing every piece from its ``base`` upward is valid for the whole, and the
smallest footprint over all placements is the largest of the pieces' smallest (``base`` included). It places
nothing.

[Note: exact reductions]
* Only the maximal sets of buffers alive together matter, so times are renumbered by them.
* A buffer alive throughout excludes all others from its bytes; moving it to the bottom changes no footprint.
  Without it, the rest may fall apart in time.
* Parts that share no moment are placed independently.
* Bytes of size zero collide with nothing: offset 0.
"""

from dataclasses import dataclass

import numpy as np

from hetero.pool.problem import IntArray, Problem

__all__ = ["Piece", "clique_lives", "pieces"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Piece:
    """An independent part: buffer ``members[i]`` of the problem lives over cliques ``[begins[i], ends[i])``.

    ``spans[i]``: how long it lives in the problem's own time. ``base`` (bytes): where the piece starts, above
    the full-life buffers it lies on. ``bound`` (bytes): peak live bytes of the piece itself. ``horizon``:
    number of cliques.
    """

    members: IntArray
    begins: IntArray
    ends: IntArray
    sizes: IntArray
    spans: IntArray
    base: int
    bound: int
    horizon: int

    def __len__(self) -> int:
        return len(self.members)


def pieces(problem: Problem) -> tuple[IntArray, tuple[Piece, ...]]:
    """Offsets (bytes) fixed by reduction, shape (n,), and the pieces still to be placed, whose offsets are
    0 there.
    """
    offsets = np.zeros(len(problem), dtype=np.int64)
    leaves: list[Piece] = []
    pending = [(np.flatnonzero(problem.sizes > 0), 0)]
    while pending:
        members, base = pending.pop()
        if len(members) == 0:
            continue
        begins, ends = clique_lives(problem.begins[members], problem.ends[members])
        sizes = problem.sizes[members]
        horizon = int(ends.max())
        always = (begins == 0) & (ends == horizon)
        if always.any():
            stacked = np.cumsum(sizes[always])
            offsets[members[always]] = base + stacked - sizes[always]
            pending.append((members[~always], base + int(stacked[-1])))
            continue
        part = _independent_parts(begins, ends, horizon)
        if part.max() > 0:
            pending.extend((members[part == k], base) for k in range(int(part.max()) + 1))
            continue
        spans = problem.ends[members] - problem.begins[members]
        leaves.append(_piece(members, begins, ends, sizes, spans, base, horizon))
    return offsets, tuple(leaves)


def clique_lives(begins: IntArray, ends: IntArray) -> tuple[IntArray, IntArray]:
    """Lives renumbered by maximal cliques: the same pairs overlap, and every index holds a maximal set."""
    starts = np.unique(begins)
    stops = np.unique(ends)
    # An end between two consecutive begins closes a maximal set: whoever begins next starts another.
    closed = np.searchsorted(stops, starts, side="right")
    clique = np.concatenate([[0], np.cumsum(np.diff(closed) > 0)])
    first = clique[np.searchsorted(starts, begins)]
    last = clique[np.searchsorted(starts, ends, side="left") - 1]
    return first.astype(np.int64), last.astype(np.int64) + 1


def _independent_parts(begins: IntArray, ends: IntArray, horizon: int) -> IntArray:
    """Number of the independent part that each buffer belongs to."""
    crossing = np.zeros(horizon + 1, dtype=np.int64)
    np.add.at(crossing, begins + 1, 1)
    np.subtract.at(crossing, ends, 1)
    # crossing[t] counts lives that hold both t - 1 and t; where none does, the problem falls apart.
    cut = np.cumsum(crossing)[:horizon] == 0
    cut[0] = False
    return np.cumsum(cut)[begins].astype(np.int64)


def _piece(
    members: IntArray,
    begins: IntArray,
    ends: IntArray,
    sizes: IntArray,
    spans: IntArray,
    base: int,
    horizon: int,
) -> Piece:
    change = np.zeros(horizon + 1, dtype=np.int64)
    np.add.at(change, begins, sizes)
    np.subtract.at(change, ends, sizes)
    bound = int(np.cumsum(change).max())
    return Piece(
        members=members,
        begins=begins,
        ends=ends,
        sizes=sizes,
        spans=spans,
        base=base,
        bound=bound,
        horizon=horizon,
    )
