"""Sections, parts and ranks of the exact search's nodes, written for Numba.

Owns the section bound, the temporal decomposition and the ranking of a part's buffers: see [Note: canonical
search] in `hetero.pool._exact_kernel`. It decides nothing about which buffer is tried.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hetero.jit import jit
from hetero.pool.problem import IntArray

__all__ = ["Flags", "Ints", "Lives", "Members", "Preference", "Scratch", "rank_all", "split"]

Ints = npt.NDArray[np.int32]
Flags = npt.NDArray[np.bool_]
_Floats = npt.NDArray[np.float64]


class Lives(NamedTuple):
    """The buffers of a piece, by number: life over cliques ``[begins[j], ends[j])`` and bytes."""

    begins: IntArray
    ends: IntArray
    sizes: IntArray


class Preference(NamedTuple):
    """Whom to try first at equal offsets: the largest ``bonus[j] + load_weight * log(load)``, ties by
    number.

    ``load``: most unplaced bytes at one moment of the buffer's life, taken when its part came to be.
    """

    bonus: _Floats
    load_weight: float


class Members(NamedTuple):
    """Unplaced buffers of nodes, by position: number; top of what it would rest on; lowest offset that it can
    still have; whether stuck, so that it cannot go to either; rank in its part.
    """

    number: Ints
    ground: IntArray
    lowest: IntArray
    stuck: Flags
    rank: IntArray


class Scratch(NamedTuple):
    """Room for one node: members by position, their lowest offsets before, sort keys of those that moved; and
    by section the load, the floor and the part.
    """

    group: IntArray
    ground: IntArray
    lowest: IntArray
    stuck: Flags
    rank: IntArray
    before: IntArray
    keys: IntArray
    moved: IntArray
    load: IntArray
    floor: IntArray
    label: IntArray


@jit
def split(
    lives: Lives,
    capacity: int,
    preference: Preference,
    members: Members,
    low: int,
    high: int,
    parts: IntArray,
    first: int,
    scratch: Scratch,
    blame: IntArray,
) -> int:
    """Check every section of the members in [low, high), then sort them into independent parts; their
    number, or -1.

    From row ``first`` on, ``parts`` gets the begin and the end of each.
    """
    if low == high:
        return 0
    begins, ends = lives.begins, lives.ends
    t_low, t_high = begins[members.number[low]], ends[members.number[low]]
    for position in range(low + 1, high):
        t_low = min(t_low, begins[members.number[position]])
        t_high = max(t_high, ends[members.number[position]])
    if not _sections_fit(lives, capacity, members, low, high, t_low, t_high, scratch, blame):
        return -1
    load, floor, label = scratch.load, scratch.floor, scratch.label
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
    _sort_into_parts(lives, preference, members, low, high, parts[first : first + part + 1], scratch)
    return part + 1


@jit
def _sections_fit(
    lives: Lives,
    capacity: int,
    members: Members,
    low: int,
    high: int,
    t_low: int,
    t_high: int,
    scratch: Scratch,
    blame: IntArray,
) -> bool:
    """Fill each section's load, floor and change of crossing lives; False if one cannot fit."""
    load, floor, label = scratch.load, scratch.floor, scratch.label
    for t in range(t_low, t_high + 1):
        load[t] = label[t] = 0
    # Highest offsets first: whatever is at or above this one in a section must fit between it and the
    # capacity.
    for position in range(high - 1, low - 1, -1):
        j = members.number[position]
        begin, end, size = lives.begins[j], lives.ends[j], lives.sizes[j]
        lowest, most = members.lowest[position], 0
        for t in range(begin, end):
            total = load[t] + size
            load[t], floor[t] = total, lowest
            most = max(most, total)
        if lowest + most > capacity:
            blame[j] += 1
            return False
        # Counts the lives that cross from the section before into this one.
        label[begin + 1] += 1
        label[end] -= 1
    return True


@jit
def _sort_into_parts(
    lives: Lives,
    preference: Preference,
    members: Members,
    low: int,
    high: int,
    parts: IntArray,
    scratch: Scratch,
) -> None:
    """Regroup members by part, the tightest first, each sorted anew; ``parts[:, 1]`` holds each part's need
    on entry.
    """
    count, size = len(parts), high - low
    tightest = np.argsort(-parts[:, 1])
    place = np.zeros(count, dtype=np.int64)
    for k in range(size):
        j = members.number[low + k]
        scratch.group[k] = j
        scratch.ground[k] = members.ground[low + k]
        scratch.lowest[k] = members.lowest[low + k]
        scratch.stuck[k] = members.stuck[low + k]
        scratch.rank[k] = members.rank[low + k]
        place[scratch.label[lives.begins[j]]] += 1
    at = low
    for k in range(count):
        part = tightest[k]
        parts[k, 0], parts[k, 1] = at, at + place[part]
        at += place[part]
        place[part] = parts[k, 0]
    if preference.load_weight != 0.0:
        _rank(lives, preference, scratch.group[:size], scratch.load, scratch.rank)
    order = np.argsort(scratch.rank[:size])
    order = order[np.argsort(scratch.lowest[:size][order], kind="mergesort")]
    for k in order:
        part = scratch.label[lives.begins[scratch.group[k]]]
        to = place[part]
        members.number[to], members.ground[to] = scratch.group[k], scratch.ground[k]
        members.lowest[to], members.stuck[to] = scratch.lowest[k], scratch.stuck[k]
        members.rank[to] = scratch.rank[k]
        place[part] = to + 1


@jit
def rank_all(lives: Lives, preference: Preference, members: Members, scratch: Scratch) -> None:
    """Fill the first node: every buffer, on the floor, sorted by rank."""
    count = len(lives.sizes)
    for t in range(len(scratch.load)):
        scratch.load[t] = 0
    for j in range(count):
        scratch.group[j] = j
        for t in range(lives.begins[j], lives.ends[j]):
            scratch.load[t] += lives.sizes[j]
    _rank(lives, preference, scratch.group[:count], scratch.load, scratch.rank)
    for j in range(count):
        at = scratch.rank[j]
        members.number[at], members.rank[at] = j, at
        members.ground[at], members.lowest[at], members.stuck[at] = 0, 0, False


@jit
def _rank(lives: Lives, preference: Preference, numbers: IntArray, load: IntArray, rank: IntArray) -> None:
    """``rank[k]`` of buffer ``numbers[k]`` under the preference, given the load of each section."""
    count = len(numbers)
    score = np.empty(count)
    for k in range(count):
        j = numbers[k]
        most = 1
        for t in range(lives.begins[j], lives.ends[j]):
            most = max(most, load[t])
        score[k] = preference.bonus[j] + preference.load_weight * np.log(most)
    order = np.argsort(numbers)
    order = order[np.argsort(-score[order], kind="mergesort")]
    for r in range(count):
        rank[order[r]] = r
