"""The plan for an iteration in which activations may leave: many choices compete in the simulated step.

Owns the competition. Counting bytes is not enough here: an activation has to be copied down before it comes back, and
late copies hold operators up. So choices by next use, by the linear program and by AutoSwap's four scores and their
combinations are laid out in several ways and simulated; the best is improved by a local search, as far as that is
affordable. A pure function: the same arguments give the same schedule.
"""

import random
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from hetero.eviction.intervals import Bools, Floats, Intervals, Ints, read_intervals
from hetero.eviction.model import Links, Schedule, Trace
from hetero.eviction.planner import plan
from hetero.eviction.scores import SCORES, across_peak, by_score, choose, combined
from hetero.eviction.search import WAYS, better, search
from hetero.eviction.selection import farthest_next_use, fewest_bytes
from hetero.eviction.simulation import simulate
from hetero.eviction.timing import timed_starts
from hetero.eviction.transfers import lay_out, read_fetches

__all__ = ["compete"]

_COMBINATIONS = 30  # of the scores, with random weights: as many as the paper's optimisation tries
_BEST = 6  # choices that are laid out in every way
_TRIALS = 200  # of the local search
_AFFORDABLE_ACCESSES = 1_000_000  # simulated in all; about 10 microseconds each
_ROUNDS = 3  # placements that learn from the last one's write backs
_NOTHING_LOST = 1.0 + 1e-9  # sums of the same times in another order


def compete(
    trace: Trace, *, links: Links, trials: int = _TRIALS, goal: float = 0.0, worth: float = 0.0
) -> Schedule:
    """The fastest schedule found for one iteration of ``trace``; of equally fast ones, that with the fewest bytes.

    ``trials``: of the local search, fewer if the trace is long. ``goal``: seconds with which it is content.
    ``worth``: share of the step that more bytes must save. Raises `CapacityError` as `plan`.
    """
    problem = read_intervals(trace)
    judge = _Judge(trace, problem, links)
    judge.found.append(plan(trace, links=links))
    goal = max(goal, sum(moment.seconds for moment in trace.moments)) * _NOTHING_LOST
    if judge.found[0].predicted_seconds > goal:
        _explore(trace, problem, links, judge, trials, goal)
    fastest = min(schedule.predicted_seconds for schedule in judge.found)
    soon = max(goal, fastest * _NOTHING_LOST) * (1.0 + worth)
    near = [schedule for schedule in judge.found if schedule.predicted_seconds <= soon]
    return min(near, key=lambda schedule: (schedule.moved_bytes, schedule.predicted_seconds))


def _explore(
    trace: Trace, problem: Intervals, links: Links, judge: "_Judge", trials: int, goal: float
) -> None:
    scores = by_score(trace, problem, links)
    judged: list[tuple[float, int, Bools]] = []
    for name, keep in _choices(trace, problem, scores):
        judged.append((judge(keep, 0, name).predicted_seconds, len(judged), keep))
        if judge.left <= 0:
            return
    judged.sort(key=lambda entry: entry[:2])
    for _, _, keep in judged[:_BEST]:
        for way in range(1, WAYS):
            judge(keep, way, "scores")
            if judge.left <= 0:
                return
    for start in judged[:2]:
        if min(schedule.predicted_seconds for schedule in judge.found) > goal:
            search(problem, start[2], scores["aoa"], judge, trials=trials // 2, stop_at=goal)


def _choices(trace: Trace, problem: Intervals, scores: Mapping[str, Floats]) -> Iterator[tuple[str, Bools]]:
    """Choices that fit, each once, with the name of what made them."""
    seen: set[bytes] = set()
    for name, keep in _all_choices(trace, problem, scores):
        if keep is not None and keep.tobytes() not in seen:
            seen.add(keep.tobytes())
            yield name, keep


def _all_choices(
    trace: Trace, problem: Intervals, scores: Mapping[str, Floats]
) -> Iterator[tuple[str, Bools | None]]:
    candidates = across_peak(trace, problem)
    for name, values in scores.items():
        yield name, choose(problem, problem.room, values, among=candidates)
        yield name, choose(problem, problem.room, values)
    yield "opt", farthest_next_use(problem, problem.room)
    yield "cost-opt", fewest_bytes(problem, problem.room)
    weights = random.Random(0)
    for _ in range(_COMBINATIONS):
        values = combined(scores, [weights.uniform(-1.0, 1.0) for _ in SCORES])
        yield "scores", choose(problem, problem.room, values, among=candidates)


class _Judge:
    """Lays out and simulates choices, and remembers the schedules. Ways 0 and 1 place transfers by periods, 2 and 3 by
    the clock. ``left``: accesses that may still be simulated."""

    def __init__(self, trace: Trace, problem: Intervals, links: Links) -> None:
        self.trace, self.problem, self.links = trace, problem, links
        self.found: list[Schedule] = []
        self.left = _AFFORDABLE_ACCESSES

    def __call__(self, keep: Bools, way: int, name: str = "search") -> Schedule:
        schedules = self._by_clock(keep, way, name) if way >= 2 else self._by_periods(keep, way, name)
        best = schedules[0]
        for schedule in schedules[1:]:
            best = schedule if better(schedule, best) else best
        self.found.append(best)
        return best

    def _by_periods(self, keep: Bools, way: int, name: str) -> list[Schedule]:
        schedules: list[Schedule] = []
        leaving: Ints | None = None
        for _ in range(_ROUNDS):
            layout = lay_out(self.problem, keep, prefetch=True, policy=name, spare=way == 1, leaving=leaving)
            schedule, behind = self._timed(layout)
            schedules.append(schedule)
            if not behind.any():
                break
            leaving = behind if leaving is None else np.maximum(leaving, behind)
        return schedules

    def _by_clock(self, keep: Bools, way: int, name: str) -> list[Schedule]:
        fetches = read_fetches(self.problem, keep, spare=True)
        wanted = timed_starts(self.trace, self.problem, keep, fetches, self.links, wary=way == 3)
        return [
            self._timed(lay_out(self.problem, keep, prefetch=True, policy=name, spare=True, wanted=wanted))[0]
        ]

    def _timed(self, schedule: Schedule) -> tuple[Schedule, Ints]:
        self.left -= len(self.problem.use)
        result = simulate(self.trace, schedule, self.links)
        behind = np.asarray(result.leaving_bytes, dtype=np.int64)
        return replace(schedule, predicted_seconds=result.step_seconds), behind
