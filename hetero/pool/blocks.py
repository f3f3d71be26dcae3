"""Planners that hand out whole blocks: max block, binary block and GE's two-level merging.

Owns the three, described from Ascend GE's public account of its memory reuse (2024). Invariant: a block is
held by one buffer at a time; only the two-level planner then lays blocks inside larger ones.
"""

import heapq
import time
from collections import defaultdict
from collections.abc import Iterable

import numpy as np

from hetero.pool.planner import register
from hetero.pool.problem import IntArray, Problem, Solution, solution_from_offsets
from hetero.units import round_up

__all__ = ["binary_block", "ge_two_level", "max_block"]

# Blocks of max and binary block are shrunk to their largest member rounded up to this many bytes.
_ALIGNMENT = 512
# The smallest class of binary block: the source's example has 1024 for a buffer of 512 bytes.
_SMALLEST_CLASS = 1024


@register("max-block")
def max_block(problem: Problem) -> Solution:
    """One class of block: any free block is reused in order of begin, then each shrinks to its largest
    member.
    """
    return _shrunk_blocks(problem, np.zeros(len(problem), dtype=np.int64), "max-block")


@register("binary-block")
def binary_block(problem: Problem) -> Solution:
    """Classes halving down from the largest size; reuse within a class only, then shrink as in max block."""
    largest = int(problem.sizes.max(initial=0))
    classes = [largest]
    while classes[-1] > _SMALLEST_CLASS:
        classes.append(max(_SMALLEST_CLASS, -(-classes[-1] // 2)))
    chosen = np.searchsorted(np.array(classes[::-1]), problem.sizes)
    return _shrunk_blocks(problem, chosen.astype(np.int64), "binary-block")


@register("ge")
def ge_two_level(problem: Problem) -> Solution:
    """GE two-level: reuse between equal sizes gives blocks; larger blocks then take in smaller ones.

    Blocks go by size descending. Each lies at the lowest place inside an existing root block where nothing
    that it touches there is alive with any of its members; if there is none, it becomes a new root behind
    the others. The footprint is the sum of the roots.
    """
    started = time.perf_counter()
    _, distinct = np.unique(problem.sizes, return_inverse=True)
    blocks = _reuse(problem, distinct.astype(np.int64))
    blocks.sort(key=lambda members: -int(problem.sizes[members[0]]))
    offsets, footprint = _merge(problem, blocks)
    return solution_from_offsets(
        problem, offsets, planner="ge", seconds=time.perf_counter() - started, footprint=footprint
    )


def _shrunk_blocks(problem: Problem, classes: IntArray, name: str) -> Solution:
    started = time.perf_counter()
    offsets = np.zeros(len(problem), dtype=np.int64)
    base = 0
    for members in _reuse(problem, classes):
        offsets[members] = base
        largest = int(problem.sizes[members].max())
        base += round_up(largest, _ALIGNMENT)
    return solution_from_offsets(
        problem, offsets, planner=name, seconds=time.perf_counter() - started, footprint=base
    )


def _reuse(problem: Problem, classes: IntArray) -> list[list[int]]:
    """Members of each block, blocks in order of creation: by begin, the oldest free block of the class is
    taken.
    """
    blocks: list[list[int]] = []
    free: dict[int, list[int]] = defaultdict(list)
    held: list[tuple[int, int]] = []
    begins, ends, kinds = problem.begins.tolist(), problem.ends.tolist(), classes.tolist()
    for i in np.argsort(problem.begins, kind="stable").tolist():
        while held and held[0][0] <= begins[i]:
            _, block = heapq.heappop(held)
            heapq.heappush(free[kinds[blocks[block][0]]], block)
        if free[kinds[i]]:
            block = heapq.heappop(free[kinds[i]])
            blocks[block].append(i)
        else:
            block = len(blocks)
            blocks.append([i])
        heapq.heappush(held, (ends[i], block))
    return blocks


def _merge(problem: Problem, blocks: Iterable[list[int]]) -> tuple[IntArray, int]:
    """Offsets of buffers and the sum of the root blocks.

    Rows of ``placed`` by ascending offset: offset, top, begin, end. Ends of roots are kept as rows of no
    bytes that live always, so that no hole reaches across two roots.
    """
    placed = np.empty((4, 2 * len(problem)), dtype=np.int64)
    always = int(problem.begins.min(initial=0)) - 1, int(problem.ends.max(initial=0)) + 1
    offsets = np.zeros(len(problem), dtype=np.int64)
    count = total = 0
    for members in blocks:
        size = int(problem.sizes[members[0]])
        at = _lowest_hole(problem, placed[:, :count], members, size)
        if at < 0:
            at, total = total, total + size
            placed[:, count] = total, total, *always
            count += 1
        offsets[members] = at
        position = int(np.searchsorted(placed[0, :count], at, side="right"))
        added = len(members)
        placed[:, position + added : count + added] = placed[:, position:count].copy()
        rows = slice(position, position + added)
        placed[0, rows], placed[1, rows] = at, at + size
        placed[2, rows], placed[3, rows] = problem.begins[members], problem.ends[members]
        count += added
    return offsets, total


def _lowest_hole(problem: Problem, placed: IntArray, members: list[int], size: int) -> int:
    low, top, begin, end = placed
    if len(members) == 1:
        i = members[0]
        clash = (begin < problem.ends[i]) & (end > problem.begins[i])
    else:
        # Members' lives are disjoint and ascending: a row clashes if the first life ending after its begin
        # has begun.
        after = np.searchsorted(problem.ends[members], begin, side="right")
        starts = np.append(problem.begins[members], np.iinfo(np.int64).max)
        clash = starts[after] < end
    near = np.flatnonzero(clash)
    highs = np.concatenate([[0], np.maximum.accumulate(top[near])])
    fits = np.flatnonzero(low[near] - highs[:-1] >= size)
    return int(highs[fits[0]]) if len(fits) else -1
