"""The exact canonical search on plain arrays, written for Numba: import it only through `hetero.pool.exact`.

Owns one depth-first search for a placement of at most ``capacity`` bytes; the ideas are those of MiniMalloc
(Moffitt 2023).

[Note: canonical search]
Every placement can be slid down until each buffer rests on the floor or on another, and then be built by
ascending offset. A node is a set of unplaced buffers, each with its *ground*, the top of what lies under it, and
the lowest offset that it may still have, sorted by (lowest offset, rank); a branch places one of them there.
* Monotonic floor: whoever is placed later has a larger (offset, rank). Those passed over are *stuck*: they
  would not rest on anything at the new floor, so they wait until a buffer alive with them lifts them.
* Lifting: until then, none of the stuck can end up below the lowest top of any buffer that could lift it.
  MiniMalloc has no such bound; with it, searches of its instances take a tenth of the branches or fewer.
* Dominance: a buffer that would start at or above another's ground plus size leaves room for that other.
* Twins: of buffers equal in life and size, the lower number goes first.
* Section bound: at each moment and for each unplaced buffer alive, its lowest offset plus its size and
  those of all unplaced buffers that cannot lie lower must fit the capacity.
* Temporal decomposition: unplaced buffers that share no moment are solved separately, the tightest first; a
  part that cannot be placed fails its parent at once, whatever the other parts allow.
* Ranks: each part ranks its buffers anew, by what is still unplaced. No placement is lost by that: the stuck
  stay stuck, and whichever the ranks, all placements of a part can be built by (offset, rank).
"""

import numpy as np

from hetero.jit import jit
from hetero.pool._exact_parts import Lives, Members, Preference, Scratch, rank_all, split
from hetero.pool.problem import IntArray

__all__ = ["EXHAUSTED", "FOUND", "STOPPED", "search"]

FOUND, EXHAUSTED, STOPPED = 1, 0, -1

# More than there are ranks: offset and rank are sorted as one integer (`hetero.pool.exact.MOST_BYTES`).
_RANKS = 2**13


@jit
def search(
    lives: Lives,
    horizon: int,
    capacity: int,
    preference: Preference,
    nodes: int,
    offsets: IntArray,
    blame: IntArray,
) -> tuple[int, int]:
    """Fill ``offsets`` with a placement within ``capacity``; return the outcome and the branches tried.

    Equal buffers have neighbouring numbers. `FOUND`: done. `EXHAUSTED`: there is none. `STOPPED`: ``nodes``
    ran out. ``blame`` counts, for each buffer, the branches that failed for want of room for it.
    """
    n = len(lives.sizes)
    room = n * (n + 1) // 2 + n + 1
    members = Members(
        np.empty(room, dtype=np.int32),
        np.empty(room, dtype=np.int64),
        np.empty(room, dtype=np.int64),
        np.zeros(room, dtype=np.bool_),
        np.empty(room, dtype=np.int64),
    )
    scratch = Scratch(
        np.empty(n + 1, dtype=np.int64),
        np.empty(n + 1, dtype=np.int64),
        np.empty(n + 1, dtype=np.int64),
        np.zeros(n + 1, dtype=np.bool_),
        np.empty(n + 1, dtype=np.int64),
        np.empty(n + 1, dtype=np.int64),
        np.empty(n + 1, dtype=np.int64),
        np.empty(n + 1, dtype=np.int64),
        np.empty(horizon + 2, dtype=np.int64),
        np.empty(horizon + 2, dtype=np.int64),
        np.empty(horizon + 2, dtype=np.int64),
    )
    # One frame a level: its part of `members`, the next position to try, the end of memory in use, its
    # children.
    low, high = np.zeros(n + 2, dtype=np.int64), np.zeros(n + 2, dtype=np.int64)
    cursor, top = np.zeros(n + 2, dtype=np.int64), np.zeros(n + 2, dtype=np.int64)
    child_first = np.zeros(n + 2, dtype=np.int64)
    child_count, child_next = np.zeros(n + 2, dtype=np.int64), np.zeros(n + 2, dtype=np.int64)
    parts = np.empty((2 * n + 4, 2), dtype=np.int64)
    rank_all(lives, preference, members, scratch)
    high[0] = top[0] = n
    tried = 0
    level = 0
    while True:
        chosen = _candidate(lives, members, low[level], high[level], cursor[level])
        if chosen < 0:
            # Nothing left to try here: the parent's choice was wrong, whatever its other parts say.
            if level == 0:
                return EXHAUSTED, tried
            level -= 1
            continue
        if tried >= nodes:
            return STOPPED, tried
        tried += 1
        cursor[level] = chosen + 1
        if not _branch(lives, capacity, members, low[level], high[level], chosen, top[level], scratch, blame):
            continue
        out = top[level] + high[level] - low[level] - 1
        first = 0 if level == 0 else child_first[level - 1] + child_count[level - 1]
        count = split(lives, capacity, preference, members, top[level], out, parts, first, scratch, blame)
        if count < 0:
            continue
        offsets[members.number[chosen]] = members.lowest[chosen]
        child_first[level], child_count[level], child_next[level] = first, count, 0
        # A branch is done once its last part is; then comes the next part of the nearest level that has one
        # left.
        while child_next[level] == child_count[level]:
            if level == 0:
                return FOUND, tried
            level -= 1
        child = child_first[level] + child_next[level]
        child_next[level] += 1
        end = top[level] + high[level] - low[level] - 1
        level += 1
        low[level], high[level] = parts[child, 0], parts[child, 1]
        cursor[level], top[level] = low[level], end


@jit
def _candidate(lives: Lives, members: Members, low: int, high: int, start: int) -> int:
    """Position of the next buffer worth placing, from ``start`` on, or -1."""
    roof = np.int64(2**62)
    for position in range(low, high):
        roof = min(roof, members.ground[position] + lives.sizes[members.number[position]])
    for position in range(start, high):
        if members.lowest[position] >= roof:
            return -1
        if members.stuck[position]:
            continue
        if position > low:
            i, j = members.number[position - 1], members.number[position]
            if (
                i == j - 1
                and lives.begins[i] == lives.begins[j]
                and lives.ends[i] == lives.ends[j]
                and lives.sizes[i] == lives.sizes[j]
            ):
                continue
        return position
    return -1


@jit
def _branch(
    lives: Lives,
    capacity: int,
    members: Members,
    low: int,
    high: int,
    chosen: int,
    out: int,
    scratch: Scratch,
    blame: IntArray,
) -> bool:
    """Write the members left after placing ``chosen`` from ``out`` on, sorted; False if one cannot fit."""
    i, offset = members.number[chosen], members.lowest[chosen]
    begin, end, roof = lives.begins[i], lives.ends[i], offset + lives.sizes[i]
    count, any_stuck = 0, False
    for position in range(low, high):
        if position == chosen:
            continue
        j, ground, lowest = members.number[position], members.ground[position], members.lowest[position]
        stuck = members.stuck[position]
        if lives.begins[j] < end and begin < lives.ends[j]:
            ground = max(ground, roof)
            if lowest <= roof:
                lowest, stuck = roof, False
        elif lowest < offset or (lowest == offset and members.rank[position] < members.rank[chosen]):
            # Passed over: it would have gone first.
            lowest, stuck = offset, True
        if lowest + lives.sizes[j] > capacity:
            blame[j] += 1
            return False
        any_stuck |= stuck
        scratch.group[count], scratch.ground[count] = j, ground
        scratch.lowest[count], scratch.stuck[count] = lowest, stuck
        scratch.rank[count] = members.rank[position]
        scratch.before[count] = members.lowest[position]
        count += 1
    if any_stuck and not _lift(lives, capacity, scratch, count, blame):
        return False
    _write_sorted(members, out, scratch, count)
    return True


@jit
def _lift(lives: Lives, capacity: int, scratch: Scratch, count: int, blame: IntArray) -> bool:
    """Raise the stuck to the lowest top of what could still lift them; False if nothing can, or too high."""
    for k in range(count):
        if not scratch.stuck[k]:
            continue
        j = scratch.group[k]
        begin, end = lives.begins[j], lives.ends[j]
        least = np.int64(2**62)
        for other in range(count):
            if scratch.before[other] >= least:  # ascending, and nobody has come down since
                break
            i = scratch.group[other]
            if other != k and lives.begins[i] < end and begin < lives.ends[i]:
                least = min(least, scratch.lowest[other] + lives.sizes[i])
        if least + lives.sizes[j] > capacity:
            blame[j] += 1
            return False
        scratch.lowest[k] = max(scratch.lowest[k], least)
    return True


@jit
def _write_sorted(members: Members, out: int, scratch: Scratch, count: int) -> None:
    """Write a node by (lowest, rank): those whose offset has changed are sorted, and merged with the others."""
    moved = 0
    for k in range(count):
        if scratch.lowest[k] != scratch.before[k]:
            scratch.keys[moved] = scratch.lowest[k] * _RANKS + scratch.rank[k]
            scratch.moved[moved] = k
            moved += 1
    order = np.argsort(scratch.keys[:moved])
    taken = 0
    for k in range(count):
        if scratch.lowest[k] != scratch.before[k]:
            continue
        key = scratch.lowest[k] * _RANKS + scratch.rank[k]
        while taken < moved and scratch.keys[order[taken]] < key:
            _write(members, out, scratch, scratch.moved[order[taken]])
            out, taken = out + 1, taken + 1
        _write(members, out, scratch, k)
        out += 1
    while taken < moved:
        _write(members, out, scratch, scratch.moved[order[taken]])
        out, taken = out + 1, taken + 1


@jit
def _write(members: Members, out: int, scratch: Scratch, k: int) -> None:
    members.number[out], members.rank[out] = scratch.group[k], scratch.rank[k]
    members.ground[out], members.lowest[out] = scratch.ground[k], scratch.lowest[k]
    members.stuck[out] = scratch.stuck[k]
