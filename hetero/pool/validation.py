"""Checking a solution against its problem, naively.

Owns `validate`. Invariant: it compares every pair of buffers by the definition and shares no code with any
planner, so that a mistake in one cannot hide in the other. O(n^2), vectorised by rows. It repairs nothing.
"""

import numpy as np

from hetero.errors import PlanError
from hetero.pool.problem import Problem, Solution

__all__ = ["validate"]

_MOST_BYTES = 2**63 - 1  # of the arrays below


def validate(problem: Problem, solution: Solution) -> None:
    """Raise `PlanError` unless ``solution`` places every buffer of ``problem`` with no two alive in one byte.

    Names the first offending buffer, or the first overlapping pair in the problem's order.
    """
    _check_each(problem, solution)
    offsets = np.array(solution.offsets, dtype=np.int64)
    tops = offsets + problem.sizes
    begins, ends, filled = problem.begins, problem.ends, problem.sizes > 0
    for i in range(len(problem)):
        rest = slice(i + 1, None)
        together = (begins[rest] < ends[i]) & (begins[i] < ends[rest])
        shared = (offsets[rest] < tops[i]) & (offsets[i] < tops[rest]) & filled[rest] & filled[i]
        clash = together & shared
        if clash.any():
            raise PlanError(_overlap(problem, solution, i, i + 1 + int(clash.argmax())))


def _check_each(problem: Problem, solution: Solution) -> None:
    if len(solution.offsets) != len(problem):
        raise PlanError(
            f"solution has {len(solution.offsets)} offsets for {len(problem)} buffers; solve this one"
        )
    for buffer, offset in zip(problem.buffers, solution.offsets, strict=True):
        if offset < 0:
            raise PlanError(f"buffer {buffer.id!r}: offset {offset} is negative; memory starts at 0")
        if offset + buffer.nbytes > solution.footprint:
            raise PlanError(
                f"buffer {buffer.id!r} ends at {offset + buffer.nbytes} bytes, past the footprint of "
                f"{solution.footprint}"
            )
        if offset + buffer.nbytes > _MOST_BYTES:
            raise PlanError(
                f"buffer {buffer.id!r} ends at {offset + buffer.nbytes} bytes; offsets are counted up to {_MOST_BYTES}"
            )


def _overlap(problem: Problem, solution: Solution, i: int, j: int) -> str:
    def describe(k: int) -> str:
        buffer, offset = problem.buffers[k], solution.offsets[k]
        return (
            f"{buffer.id!r} (bytes [{offset}, {offset + buffer.nbytes}), life [{buffer.begin}, {buffer.end}))"
        )

    return f"buffers {describe(i)} and {describe(j)} overlap in time and in memory; move one of them"
