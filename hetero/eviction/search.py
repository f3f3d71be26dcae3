"""A local search over choices of intervals, judged by the simulated step.

Owns the moves. The other selections count bytes; where the link is what holds operators up, *when* bytes move decides,
and only a simulation knows. Every choice that is tried fits. Deterministic.
"""

import random
from typing import Protocol

import numpy as np

from hetero.eviction.intervals import Bools, Floats, Intervals, Ints, covering
from hetero.eviction.model import Schedule
from hetero.eviction.sweep import spans

__all__ = ["WAYS", "better", "search"]

WAYS = 4  # to lay out a choice, numbered from 0

_MOST_TAKEN_BACK = 3
_PATIENCE = 0.02  # relative: how much longer a step is accepted at first, so that the search leaves a hollow


class Judge(Protocol):
    """The timed schedule of a choice, laid out in one of the ways; ``done``: there is no use in asking on."""

    @property
    def done(self) -> bool: ...

    def __call__(self, keep: Bools, way: int, /) -> Schedule: ...


def better(one: Schedule, other: Schedule) -> bool:
    """Whether ``one`` takes less time, or moves fewer bytes in the same time."""
    if one.predicted_seconds != other.predicted_seconds:
        return one.predicted_seconds < other.predicted_seconds
    return one.moved_bytes < other.moved_bytes


def search(problem: Intervals, keep: Bools, score: Floats, judge: Judge, *, trials: int) -> Schedule:
    """The best schedule found in ``trials`` judgements, the first of which is ``keep``'s.

    ``keep`` must fit. ``score``: of each interval; larger is likelier to leave.
    """
    moves = _Moves(problem, score)
    current = keep
    best = now = judge(keep, 0)
    for trial in range(trials - 1):
        if judge.done:
            break
        choice = moves.neighbour(current)
        schedule = judge(choice, moves.random.randrange(WAYS))
        patience = _PATIENCE * (1.0 - trial / trials) ** 2 * moves.random.random()
        if better(schedule, now) or schedule.predicted_seconds <= now.predicted_seconds * (1.0 + patience):
            current, now = choice, schedule
        if better(schedule, best):
            best = schedule
    return best


class _Moves:
    def __init__(self, problem: Intervals, score: Floats) -> None:
        self.problem = problem
        self.random = random.Random(0)
        self.rank: list[int] = score.argsort(kind="stable").argsort().tolist()
        worth = problem.saves & problem.occupies
        self.movable = np.flatnonzero(worth & (problem.nbytes > 0))
        self.begin, self.end = problem.begin[self.movable], problem.end[self.movable]
        self.nbytes: list[int] = problem.nbytes.tolist()
        self.spans = {
            j: spans(int(problem.begin[j]), int(problem.end[j]), problem.periods)
            for j in self.movable.tolist()
        }

    def neighbour(self, keep: Bools) -> Bools:
        """A few more stay, as many others as room then demands leave, and none that need not."""
        keep = keep.copy()
        excess = self.problem.load(keep) - self.problem.room
        gone = self.movable[~keep[self.movable]].tolist()
        back: list[int] = []
        kind = self.random.random()
        if gone and kind < 0.8:
            back = self.random.sample(gone, min(len(gone), self.random.randint(1, _MOST_TAKEN_BACK)))
            for j in back:
                self._toggle(keep, excess, j)
        if kind > 0.6:
            there = self.movable[keep[self.movable]].tolist()
            if there:
                self._toggle(keep, excess, self.random.choice(there))
        self._make_room(keep, excess, back)
        if self.random.random() < 0.7:
            self._take_back(keep, excess)
        return keep

    def _make_room(self, keep: Bools, excess: Ints, back: list[int]) -> None:
        """Drop until all fits; those of ``back`` only where nothing else helps."""
        while excess[worst := int(excess.argmax())] > 0:
            over = covering(self.begin, self.end, worst, self.problem.periods)
            there = self.movable[over & keep[self.movable]].tolist()
            others = [j for j in there if j not in back]
            some = self.random.sample(others or there, min(3, len(others or there)))
            self._toggle(keep, excess, max(some, key=self.rank.__getitem__))

    def _take_back(self, keep: Bools, excess: Ints) -> None:
        """Let stay, in random order, what fits after all."""
        gone = self.movable[~keep[self.movable]].tolist()
        for j in self.random.sample(gone, len(gone)):
            if all(excess[a:b].max() + self.nbytes[j] <= 0 for a, b in self.spans[j]):
                self._toggle(keep, excess, j)

    def _toggle(self, keep: Bools, excess: Ints, j: int) -> None:
        change = -self.nbytes[j] if keep[j] else self.nbytes[j]
        for a, b in self.spans[j]:
            excess[a:b] += change
        keep[j] = not keep[j]
