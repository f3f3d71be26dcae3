"""The plan for an iteration in which activations may leave: many choices compete in the simulated step.

Owns the competition. Counting bytes is not enough here: an activation has to be copied down before it comes back, and
late copies hold operators up. So choices by next use, by bytes, by the step as a fluid (`hetero.eviction.fluid`) and
by AutoSwap's four scores and their combinations are laid out in several ways and simulated; the best is improved by a
local search, as far as that is affordable. It ends where the fluid's bound says that there is nothing left to win. A
pure function: the same arguments give the same schedule.
"""

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from hetero.eviction.fluid import Fluid, fluid
from hetero.eviction.intervals import Bools, Floats, Intervals, read_intervals
from hetero.eviction.model import Links, Schedule, Trace
from hetero.eviction.planner import plan
from hetero.eviction.predictions import Predictions
from hetero.eviction.scores import SCORES, Score, across_peak, by_score, choose, combine
from hetero.eviction.search import WAYS, better, search
from hetero.eviction.selection import farthest_next_use, fewest_bytes
from hetero.eviction.timing import timed_starts
from hetero.eviction.transfers import lay_out, read_fetches

__all__ = ["compete"]

_COMBINATIONS = 30  # of the scores, with random weights: as many as the paper's optimisation tries
_BEST = 6  # choices that are laid out in every way
_TRIALS = 200  # of the local search
_AFFORDABLE_MOMENTS = 120_000  # simulated in all; about 20 microseconds each
_CHECKPOINTS = (32, 64)  # of the fluid: the fewer, the more it leaves to the scores
_CLOSE = 1e-3  # share of the step: nearer to the bound, a search is not worth its time
_TIE = 1e-3  # decides between equal shares
_NOTHING_LOST = 1.0 + 1e-9  # sums of the same times in another order


def compete(
    trace: Trace, *, links: Links, trials: int = _TRIALS, goal: float = 0.0, worth: float = 0.0
) -> Schedule:
    """The fastest schedule found for one iteration of ``trace``; of equally fast ones, that with the fewest bytes.

    ``trials``: of the local search, fewer if the trace is long. ``goal``: seconds with which it is content.
    ``worth``: share of the step that more bytes, or more time spent here, must save. Raises `CapacityError` as `plan`.
    """
    problem = read_intervals(trace)
    judge = _Judge(trace, problem, links)
    judge.find(plan(trace, links=links))
    least = max(goal, sum(moment.seconds for moment in trace.moments)) * _NOTHING_LOST
    if judge.fastest > least:
        relaxed = [fluid(trace, links, checkpoints=count) for count in _CHECKPOINTS]
        judge.goal = max(least, _NOTHING_LOST * max(some.step_seconds for some in relaxed))
        _explore(trace, problem, links, judge, trials, worth, relaxed)
    soon = max(least, judge.fastest * _NOTHING_LOST) * (1.0 + worth)
    near = [schedule for schedule in judge.found if schedule.predicted_seconds <= soon]
    return min(near, key=lambda schedule: (schedule.moved_bytes, schedule.predicted_seconds))


def _explore(
    trace: Trace,
    problem: Intervals,
    links: Links,
    judge: "_Judge",
    trials: int,
    worth: float,
    relaxed: Sequence[Fluid],
) -> None:
    scores = by_score(trace, problem, links)
    judged: list[tuple[float, int, Bools]] = []
    for name, keep in _choices(trace, problem, scores, relaxed):
        judged.append((judge(keep, 0, name).predicted_seconds, len(judged), keep))
        if judge.done:
            return
    judged.sort(key=lambda entry: entry[:2])
    for _, _, keep in judged[:_BEST]:
        for way in range(1, WAYS):
            judge(keep, way, "scores")
            if judge.done:
                return
    judge.goal *= 1.0 + max(_CLOSE, worth)
    for start in judged[:2]:
        if not judge.done:
            search(problem, start[2], scores["aoa"], judge, trials=trials // 2)


def _choices(
    trace: Trace, problem: Intervals, scores: Mapping[Score, Floats], relaxed: Sequence[Fluid]
) -> Iterator[tuple[str, Bools]]:
    """Choices that fit, each once, with the name of what made them."""
    seen: set[bytes] = set()
    for name, keep in _all_choices(trace, problem, scores, relaxed):
        if keep is not None and keep.tobytes() not in seen:
            seen.add(keep.tobytes())
            yield name, keep


def _all_choices(
    trace: Trace, problem: Intervals, scores: Mapping[Score, Floats], relaxed: Sequence[Fluid]
) -> Iterator[tuple[str, Bools | None]]:
    candidates = across_peak(trace, problem)
    ranks = scores["doa"].argsort(kind="stable").argsort() / max(len(problem.use), 1)
    for some in relaxed:
        yield "fluid", choose(problem, problem.room, some.away + _TIE * ranks)
        yield "fluid", choose(problem, problem.room, (some.away > 0.5) + _TIE * ranks)
    yield "cost-opt", fewest_bytes(problem, problem.room)
    yield "opt", farthest_next_use(problem, problem.room)
    for name, values in scores.items():
        yield name, choose(problem, problem.room, values, among=candidates)
        yield name, choose(problem, problem.room, values)
    weights = random.Random(0)
    for _ in range(_COMBINATIONS):
        values = combine(scores, [weights.uniform(-1.0, 1.0) for _ in SCORES])
        yield "scores", choose(problem, problem.room, values, among=candidates)


class _Judge:
    """Lays out and simulates choices, and remembers the schedules. Ways 0 and 1 place transfers by periods, 2 and 3 by
    the clock. ``left``: moments that may still be judged; ``goal``: a step so short that the rest can be saved.

    Many choices come back: each is laid out once.
    """

    def __init__(self, trace: Trace, problem: Intervals, links: Links) -> None:
        self.trace, self.problem, self.links = trace, problem, links
        self._predictions = Predictions(trace, links)
        self.found: list[Schedule] = []
        self.left = _AFFORDABLE_MOMENTS
        self.goal = 0.0
        self.fastest = math.inf  # of those found
        self._judged: dict[tuple[bytes, int], tuple[Schedule, int]] = {}  # with the number of its layouts

    def find(self, schedule: Schedule) -> None:
        """It competes with the others."""
        self.found.append(schedule)
        self.fastest = min(self.fastest, schedule.predicted_seconds)

    @property
    def done(self) -> bool:
        return self.left <= 0 or self.fastest <= self.goal

    def __call__(self, keep: Bools, way: int, name: str = "search") -> Schedule:
        choice = (keep.tobytes(), way)
        if choice not in self._judged:
            schedules = self._by_clock(keep, way, name) if way >= 2 else self._by_periods(keep, way, name)
            best = schedules[0]
            for schedule in schedules[1:]:
                best = schedule if better(schedule, best) else best
            self.find(best)
            self._judged[choice] = best, len(schedules)
        found, layouts = self._judged[choice]
        self.left -= layouts * len(self.trace.moments)
        return found

    def _by_periods(self, keep: Bools, way: int, name: str) -> list[Schedule]:
        layout = partial(lay_out, self.problem, keep, prefetch=True, policy=name, spare=way == 1)
        return self._predictions.rounds(layout)

    def _by_clock(self, keep: Bools, way: int, name: str) -> list[Schedule]:
        fetches = read_fetches(self.problem, keep, spare=True)
        wanted = timed_starts(self.trace, self.problem, keep, fetches, self.links, wary=way == 3)
        return [
            self._predictions(
                lay_out(self.problem, keep, prefetch=True, policy=name, spare=True, wanted=wanted)
            )[0]
        ]
