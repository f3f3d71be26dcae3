"""What allocators are fed: a sequence of allocations and frees.

Owns `AllocationEvent` and the reading of a placement problem's lives as events. Torch-free, so that traces
of any origin can be replayed. It does not check that events are balanced: allocators do, when they see them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from hetero.errors import PlanError
from hetero.pool.problem import BufferId, Problem

__all__ = ["AllocationEvent", "events_of_problem"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocationEvent:
    """One request to an allocator: ``nbytes`` bytes for ``id``, or ``id`` given back (``nbytes`` then
    repeats it).

    ``iteration`` counts training iterations from 0; ``stream`` matters to the CUDA caching allocator only.
    """

    action: Literal["alloc", "free"]
    id: BufferId
    nbytes: int
    iteration: int = 0
    stream: int = 0

    def __post_init__(self) -> None:
        if self.action not in ("alloc", "free"):
            raise PlanError(f"event of {self.id!r}: action {self.action!r} is neither 'alloc' nor 'free'")
        if self.nbytes < 0:
            raise PlanError(f"event of {self.id!r}: size {self.nbytes} bytes is negative; sizes start at 0")


def events_of_problem(problem: Problem, *, iterations: int = 1) -> Sequence[AllocationEvent]:
    """The lives of ``problem`` as events, the whole repeated ``iterations`` times, every buffer freed in
    each.

    At one time frees come before allocations, as lives are half-open; otherwise the problem's order decides.
    """
    count = len(problem)
    times = np.concatenate([problem.ends, problem.begins])
    frees_first = np.repeat([0, 1], count)
    once = np.lexsort([frees_first, times]).tolist()
    return [
        AllocationEvent(
            action="free" if k < count else "alloc",
            id=problem.buffers[k % count].id,
            nbytes=problem.buffers[k % count].nbytes,
            iteration=iteration,
        )
        for iteration in range(iterations)
        for k in once
    ]
