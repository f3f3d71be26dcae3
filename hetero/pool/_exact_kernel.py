"""The exact canonical search on plain arrays, written for Numba: import it only through `hetero.pool.exact`.

Owns one depth-first search for a placement of at most ``capacity`` bytes; the ideas are those of MiniMalloc
(Moffitt 2023).

[Note: canonical search]
Every placement can be slid down until each buffer rests on the floor or on another, and then be built by
ascending offset. A node is a set of unplaced buffers, each with the lowest offset that it may still have,
sorted by (offset, rank); a branch places one of them there.
* Monotonic floor: whoever is placed later has a larger (offset, rank). Those passed over are *stuck*:
  they would not rest on anything at the new floor, so they wait until a buffer alive with them lifts them.
* Dominance: a buffer that would start at or above the lowest possible top of another leaves room for that
  other.
* Twins: of buffers equal in life and size, the lower number goes first.
* Section bound: at each moment and for each unplaced buffer alive, its lowest offset plus its size and
  those of all unplaced buffers that cannot lie lower must fit the capacity.
* Temporal decomposition: unplaced buffers that share no moment are solved separately, the tightest first; a
  part that cannot be placed fails its parent at once, whatever the other parts allow.
* Ranks: each part ranks its buffers anew, by what is still unplaced. No order is lost by that: the stuck
  stay stuck, and within a part any order by (offset, some rank) builds all placements.
"""

import numpy as np

from hetero.pool._exact_parts import Lives, Members, Preference, Scratch, rank_all, split
from hetero.pool._jit import jit
from hetero.pool.problem import IntArray

__all__ = ["EXHAUSTED", "FOUND", "STOPPED", "search"]

FOUND, EXHAUSTED, STOPPED = 1, 0, -1

# Sort keys: rank, number and a flag in one integer.
_RANK, _NUMBER = 33, 2**32 - 1


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
        np.zeros(room, dtype=np.bool_),
        np.empty(room, dtype=np.int64),
    )
    scratch = Scratch(
        np.empty(n + 1, dtype=np.int64),
        np.empty(n + 1, dtype=np.int64),
        np.zeros(n + 1, dtype=np.bool_),
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
        if not _branch(
            lives, capacity, members, low[level], high[level], chosen, top[level], scratch.group, blame
        ):
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
        roof = min(roof, members.lowest[position] + lives.sizes[members.number[position]])
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
    group: IntArray,
    blame: IntArray,
) -> bool:
    """Write the members left after placing ``chosen`` from ``out`` on, sorted; False if one cannot fit."""
    number, lowest, stuck, rank = members.number, members.lowest, members.stuck, members.rank
    i, offset = number[chosen], lowest[chosen]
    begin, end, roof = lives.begins[i], lives.ends[i], offset + lives.sizes[i]
    room = len(group)
    # Those lifted onto the chosen one are collected at the back of `group`, those left at the floor at its
    # front.
    level, lifted = 0, room
    for position in range(low, high):
        j = number[position]
        if lives.begins[j] < end and begin < lives.ends[j]:
            if position != chosen and lowest[position] <= roof:
                if roof + lives.sizes[j] > capacity:
                    blame[j] += 1
                    return False
                lifted -= 1
                group[lifted] = (rank[position] << _RANK) | (np.int64(j) << 1)
        elif lowest[position] <= offset:
            if offset + lives.sizes[j] > capacity:
                blame[j] += 1
                return False
            # Bit 0: passed over, now or before.
            passed = stuck[position] or lowest[position] < offset or rank[position] < rank[chosen]
            group[level] = (rank[position] << _RANK) | (np.int64(j) << 1) | np.int64(passed)
            level += 1
    group[:level].sort()
    group[lifted:].sort()
    for k in range(level):
        out = _append(members, out, group[k], offset)
    for position in range(low, high):
        j = number[position]
        if lives.begins[j] < end and begin < lives.ends[j]:
            if lowest[position] <= roof or position == chosen:
                continue
        elif lowest[position] <= offset:
            continue
        while lifted < room and (
            roof < lowest[position] or (roof == lowest[position] and group[lifted] >> _RANK < rank[position])
        ):
            out = _append(members, out, group[lifted], roof)
            lifted += 1
        number[out], lowest[out] = j, lowest[position]
        stuck[out], rank[out] = stuck[position], rank[position]
        out += 1
    while lifted < room:
        out = _append(members, out, group[lifted], roof)
        lifted += 1
    return True


@jit
def _append(members: Members, out: int, key: int, lowest: int) -> int:
    """Write the member with this sort key at ``out``; the next position."""
    members.number[out], members.lowest[out] = (key >> 1) & _NUMBER, lowest
    members.stuck[out], members.rank[out] = key & 1, key >> _RANK
    return out + 1
