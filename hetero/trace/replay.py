"""A trace as what an allocator sees: requests and returns, iteration by iteration.

Owns the order of events and where iterations begin. It runs no allocator: `hetero.pool.allocators` does.
"""

from collections.abc import Sequence

import numpy as np

from hetero.pool.allocators import AllocationEvent
from hetero.trace.steptrace import StepTrace, Storage

__all__ = ["allocation_events"]


def allocation_events(trace: StepTrace, *, device: str | None = None) -> Sequence[AllocationEvent]:
    """The lives of the storages on ``device`` (default: the trace's) as events in the order of operators.

    What was there before comes first; what is freed before an operator is returned before it allocates; what
    outlives the trace is never returned. An iteration ends with the optimizer's step, so that a trace of a
    function which trains for several gives them all.
    """
    on = device or trace.device
    steps = np.array([operator.phase == "step" for operator in trace.operators], dtype=bool)
    begins = np.flatnonzero(steps[:-1] & ~steps[1:]) + 1
    moments: list[tuple[int, bool, Storage]] = []  # time, whether it allocates, whose
    for storage in trace.storages:
        if storage.device != on or not storage.nbytes:
            continue
        moments.append((storage.begin, True, storage))
        if storage.end < trace.span:
            moments.append((storage.end, False, storage))
    moments.sort(key=lambda moment: (moment[0], moment[1], moment[2].id))
    iterations = np.searchsorted(begins, [time for time, *_ in moments], side="right").tolist()
    return tuple(
        AllocationEvent(
            action="alloc" if allocates else "free", id=storage.id, nbytes=storage.nbytes, iteration=iteration
        )
        for (_, allocates, storage), iteration in zip(moments, iterations, strict=True)
    )
