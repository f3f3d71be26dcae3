"""The exact canonical search on plain arrays, written for Numba: import it only through `hetero.pool.exact`.

Owns one depth-first search for a placement of at most ``capacity`` bytes; the ideas are those of MiniMalloc
(Moffitt 2023).

[Note: canonical search]
Every placement can be slid down until each buffer rests on the floor or on another, and then be built by
ascending offset. A node is a set of unplaced buffers, each with the lowest offset that it may still have,
sorted by (offset, number); a branch places one of them there.
* Monotonic floor: whoever is placed later has a larger (offset, number). Those passed over are *stuck*:
  they would not rest on anything at the new floor, so they wait until a buffer alive with them lifts them.
* Dominance: a buffer that would start at or above the lowest possible top of another leaves room for that
  other.
* Twins: of buffers equal in life and size, the lower number goes first.
* Section bound: at each moment and for each unplaced buffer alive, its lowest offset plus its size and
  those of all unplaced buffers that cannot lie lower must fit the capacity.
* Temporal decomposition: unplaced buffers that share no moment are solved separately, the tightest first; a
  part that cannot be placed fails its parent at once, whatever the other parts allow.
"""

import numpy as np
import numpy.typing as npt

from hetero.pool._jit import jit
from hetero.pool.problem import IntArray

__all__ = ["EXHAUSTED", "FOUND", "STOPPED", "search"]

FOUND, EXHAUSTED, STOPPED = 1, 0, -1

_Members = npt.NDArray[np.int32]
_Flags = npt.NDArray[np.bool_]


@jit
def search(
    begins: IntArray,
    ends: IntArray,
    sizes: IntArray,
    horizon: int,
    capacity: int,
    nodes: int,
    offsets: IntArray,
    blame: IntArray,
) -> tuple[int, int]:
    """Fill ``offsets`` with a placement within ``capacity``; return the outcome and the branches tried.

    Buffers are numbered by preference, equal ones next to each other. `FOUND`: done. `EXHAUSTED`: there is
    none. `STOPPED`: ``nodes`` ran out. ``blame`` counts, for each buffer, the branches that failed for want
    of room for it.
    """
    n = len(sizes)
    room = n * (n + 1) // 2 + n + 1
    member = np.empty(room, dtype=np.int32)
    lowest = np.empty(room, dtype=np.int64)
    stuck = np.zeros(room, dtype=np.bool_)
    # One frame a level: its part of `member`, the next position to try, the end of memory in use, its
    # children.
    low, high = np.zeros(n + 2, dtype=np.int64), np.zeros(n + 2, dtype=np.int64)
    cursor, top = np.zeros(n + 2, dtype=np.int64), np.zeros(n + 2, dtype=np.int64)
    child_first = np.zeros(n + 2, dtype=np.int64)
    child_count, child_next = np.zeros(n + 2, dtype=np.int64), np.zeros(n + 2, dtype=np.int64)
    parts = np.empty((2 * n + 4, 2), dtype=np.int64)
    group = np.empty(n + 1, dtype=np.int32)
    group_low = np.empty(n + 1, dtype=np.int64)
    group_stuck = np.zeros(n + 1, dtype=np.bool_)
    sections = np.empty((3, horizon + 2), dtype=np.int64)
    for i in range(n):
        member[i] = i
        lowest[i] = 0
    high[0] = top[0] = n
    tried = 0
    level = 0
    while True:
        chosen = _candidate(
            begins, ends, sizes, member, lowest, stuck, low[level], high[level], cursor[level]
        )
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
        fits = _branch(
            begins,
            ends,
            sizes,
            capacity,
            member,
            lowest,
            stuck,
            low[level],
            high[level],
            chosen,
            top[level],
            group,
            blame,
        )
        if not fits:
            continue
        out = top[level] + high[level] - low[level] - 1
        first = 0 if level == 0 else child_first[level - 1] + child_count[level - 1]
        count = _split(
            begins, ends, sizes, capacity, member, lowest, stuck, top[level], out, parts, first, sections,
            group, group_low, group_stuck, blame,
        )  # fmt: skip
        if count < 0:
            continue
        offsets[member[chosen]] = lowest[chosen]
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
def _candidate(
    begins: IntArray,
    ends: IntArray,
    sizes: IntArray,
    member: _Members,
    lowest: IntArray,
    stuck: _Flags,
    low: int,
    high: int,
    start: int,
) -> int:
    """Position of the next buffer worth placing, from ``start`` on, or -1."""
    roof = np.int64(2**62)
    for position in range(low, high):
        roof = min(roof, lowest[position] + sizes[member[position]])
    for position in range(start, high):
        if lowest[position] >= roof:
            return -1
        if stuck[position]:
            continue
        if position > low:
            i, j = member[position - 1], member[position]
            if i == j - 1 and begins[i] == begins[j] and ends[i] == ends[j] and sizes[i] == sizes[j]:
                continue
        return position
    return -1


@jit
def _branch(
    begins: IntArray,
    ends: IntArray,
    sizes: IntArray,
    capacity: int,
    member: _Members,
    lowest: IntArray,
    stuck: _Flags,
    low: int,
    high: int,
    chosen: int,
    out: int,
    group: _Members,
    blame: IntArray,
) -> bool:
    """Write the members left after placing ``chosen`` from ``out`` on, sorted; False if one cannot fit."""
    i, offset = member[chosen], lowest[chosen]
    begin, end, roof = begins[i], ends[i], offset + sizes[i]
    room = len(group)
    # Those lifted onto the chosen one are collected at the back of `group`, those left at the floor at its
    # front.
    level, lifted = 0, room
    for position in range(low, high):
        j = member[position]
        if begins[j] < end and begin < ends[j]:
            if position != chosen and lowest[position] <= roof:
                if roof + sizes[j] > capacity:
                    blame[j] += 1
                    return False
                lifted -= 1
                group[lifted] = j
        elif lowest[position] <= offset:
            if offset + sizes[j] > capacity:
                blame[j] += 1
                return False
            # Bit 0: passed over, now or before.
            passed = stuck[position] or lowest[position] < offset or j < i
            group[level] = 2 * j + passed
            level += 1
    group[:level].sort()
    group[lifted:].sort()
    for k in range(level):
        member[out], lowest[out], stuck[out] = group[k] >> 1, offset, group[k] & 1
        out += 1
    for position in range(low, high):
        j = member[position]
        if begins[j] < end and begin < ends[j]:
            if lowest[position] <= roof or position == chosen:
                continue
        elif lowest[position] <= offset:
            continue
        while lifted < room and (roof < lowest[position] or (roof == lowest[position] and group[lifted] < j)):
            member[out], lowest[out], stuck[out] = group[lifted], roof, False
            out += 1
            lifted += 1
        member[out], lowest[out], stuck[out] = j, lowest[position], stuck[position]
        out += 1
    while lifted < room:
        member[out], lowest[out], stuck[out] = group[lifted], roof, False
        out += 1
        lifted += 1
    return True


@jit
def _split(
    begins: IntArray,
    ends: IntArray,
    sizes: IntArray,
    capacity: int,
    member: _Members,
    lowest: IntArray,
    stuck: _Flags,
    low: int,
    high: int,
    parts: IntArray,
    first: int,
    sections: IntArray,
    group: _Members,
    group_low: IntArray,
    group_stuck: _Flags,
    blame: IntArray,
) -> int:
    """Check every section of the members in [low, high), then sort them into independent parts; their
    number, or -1.
    """
    if low == high:
        return 0
    load, floor, label = sections[0], sections[1], sections[2]
    t_low, t_high = begins[member[low]], ends[member[low]]
    for position in range(low + 1, high):
        t_low = min(t_low, begins[member[position]])
        t_high = max(t_high, ends[member[position]])
    for t in range(t_low, t_high + 1):
        load[t] = label[t] = 0
    # Highest offsets first: whatever is at or above this one in a section must fit between it and the
    # capacity.
    for position in range(high - 1, low - 1, -1):
        j = member[position]
        size, low_j, most = sizes[j], lowest[position], 0
        for t in range(begins[j], ends[j]):
            total = load[t] + size
            load[t], floor[t] = total, low_j
            most = max(most, total)
        if low_j + most > capacity:
            blame[j] += 1
            return -1
        # Counts the lives that cross from the section before into this one.
        label[begins[j] + 1] += 1
        label[ends[j]] -= 1
    crossing, part = 0, -1
    for t in range(t_low, t_high):
        crossing += label[t]
        if load[t] == 0:
            continue
        if crossing == 0:
            part += 1
            parts[first + part, 1] = 0
        label[t] = part
        parts[first + part, 1] = max(parts[first + part, 1], floor[t] + load[t])
    if part == 0:
        parts[first, 0], parts[first, 1] = low, high
        return 1
    _sort_into_parts(
        begins,
        member,
        lowest,
        stuck,
        low,
        high,
        parts[first : first + part + 1],
        label,
        group,
        group_low,
        group_stuck,
    )
    return part + 1


@jit
def _sort_into_parts(
    begins: IntArray,
    member: _Members,
    lowest: IntArray,
    stuck: _Flags,
    low: int,
    high: int,
    parts: IntArray,
    label: IntArray,
    group: _Members,
    group_low: IntArray,
    group_stuck: _Flags,
) -> None:
    """Regroup members by part, in their order within each; ``parts[:, 1]`` holds each part's need on
    entry.
    """
    count = len(parts)
    rank = np.argsort(-parts[:, 1])
    place = np.zeros(count, dtype=np.int64)
    for position in range(low, high):
        group[position - low] = member[position]
        group_low[position - low] = lowest[position]
        group_stuck[position - low] = stuck[position]
        place[label[begins[member[position]]]] += 1
    at = low
    for k in range(count):
        part = rank[k]
        size = place[part]
        parts[k, 0], parts[k, 1] = at, at + size
        place[part] = at
        at += size
    for position in range(high - low):
        part = label[begins[group[position]]]
        to = place[part]
        member[to], lowest[to], stuck[to] = group[position], group_low[position], group_stuck[position]
        place[part] = to + 1
