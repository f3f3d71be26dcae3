"""The problem behind a trace as bounds of time see it: whatever may happen early has no later moment in it.

Owns `read_reachable`. Where updates begin in backward, a copy is worthless once its gradient has been made, and what
the host makes of it may come up at once, long before the optimizer's step, at which the trace invalidates it. Entries
are those of `read_intervals`, in the same order. It bounds nothing itself.

[Note: which moment] A gradient leaves in the middle of its moment's operator. To count from the beginning of that
moment can only weaken a bound.
"""

from dataclasses import replace

import numpy as np

from hetero.eviction.host_updates import early_sends
from hetero.eviction.intervals import Intervals, read_intervals
from hetero.eviction.model import Trace

__all__ = ["read_reachable"]


def read_reachable(trace: Trace) -> Intervals:
    """As `read_intervals`; every early update is fetched from its gradient on, [Note: which moment].

    Raises `CapacityError` as `read_intervals`.
    """
    problem = read_intervals(trace)
    sends = early_sends(trace)
    if trace.updates is None or not sends:
        return problem
    queued = trace.updates.queued
    sent = np.full(len(trace.sizes), queued, dtype=np.int64)
    sent[list(sends)] = list(sends.values())
    sooner = queued - sent[problem.tensor]
    # What is invalidated once more after the step is fetched after that.
    early = (sooner > 0) & (problem.next_use >= 0) & ~problem.reused
    early &= problem.release % problem.periods == queued
    release = np.where(early, problem.release - sooner, problem.release)
    end = np.maximum(np.minimum(problem.end, release), problem.begin)
    return replace(problem, release=release, end=np.where(early, end, problem.end))
