"""Predicted times of many schedules of one trace.

Owns what has been simulated: many schedules come to the same transfers, and each list of transfers is simulated once.
"""

from dataclasses import replace

import numpy as np

from hetero.eviction.intervals import Ints
from hetero.eviction.model import Links, Schedule, Trace
from hetero.eviction.simulation import Simulator

__all__ = ["Predictions"]


class Predictions:
    """``predictions(schedule)``: the schedule with its predicted seconds, and the bytes that are still being written
    back when each moment begins."""

    def __init__(self, trace: Trace, links: Links) -> None:
        self._simulator = Simulator(trace, links)
        self._results: dict[object, tuple[float, Ints]] = {}

    def __call__(self, schedule: Schedule) -> tuple[Schedule, Ints]:
        transfers = (schedule.start, schedule.actions)
        if transfers not in self._results:
            result = self._simulator.run(schedule)
            self._results[transfers] = result.step_seconds, np.asarray(result.leaving_bytes, dtype=np.int64)
        seconds, behind = self._results[transfers]
        return replace(schedule, predicted_seconds=seconds), behind
