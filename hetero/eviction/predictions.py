"""Predicted times of many schedules of one trace.

Owns what has been simulated: many schedules come to the same transfers, and each list of transfers is simulated once;
and the few rounds in which the layout of one choice learns from its own write backs.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from hetero.eviction.intervals import Ints
from hetero.eviction.model import Links, Schedule, Trace
from hetero.eviction.simulation import Simulator

__all__ = ["ROUNDS", "Predictions"]

ROUNDS = 3  # layouts that learn from the last one's write backs


class Predictions:
    """``predictions(schedule)``: the schedule with its predicted seconds, and the bytes that are still being written
    back when each moment begins."""

    def __init__(self, trace: Trace, links: Links) -> None:
        self._simulator = Simulator(trace, links)
        self._results: dict[object, tuple[float, float, Ints]] = {}

    def __call__(self, schedule: Schedule) -> tuple[Schedule, Ints]:
        transfers = (schedule.start, schedule.actions)  # hashing which takes time: all of an iteration
        known = self._results.get(transfers)
        if known is None:
            result = self._simulator.run(schedule)
            leaving = np.asarray(result.leaving_bytes, dtype=np.int64)
            known = result.step_seconds, result.issue_seconds, leaving
            self._results[transfers] = known
        seconds, issue, behind = known
        return replace(schedule, predicted_seconds=seconds, issue_seconds=issue), behind

    def rounds(self, layout: Callable[..., Schedule], *, most: int = ROUNDS) -> list[Schedule]:
        """Timed schedules of one choice, which ``layout(leaving=...)`` lays out: each leaves room for the write backs
        that the one before met."""
        schedules: list[Schedule] = []
        leaving: Ints | None = None
        while len(schedules) < most:
            schedule, behind = self(layout(leaving=leaving))
            schedules.append(schedule)
            if not behind.any():
                break
            leaving = behind if leaving is None else np.maximum(leaving, behind)
        return schedules
