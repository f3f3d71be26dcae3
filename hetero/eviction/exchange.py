"""Local search on a selection: keep one more interval in place of cheaper ones.

Owns the exchange move and its bookkeeping of free room and shared write backs. A selection that fits still
fits afterwards, and never costs more. When sizes differ, choosing victims is a knapsack at every period;
rounding the relaxation leaves a few wrong choices, which exchanges repair.
"""

import numpy as np

from hetero.eviction.intervals import Bools, Intervals, Ints, covering
from hetero.eviction.sweep import spans

__all__ = ["exchange"]


def exchange(problem: Intervals, room: Ints, keep: Bools, *, trials: int) -> Bools:
    """``keep``, improved by up to ``trials`` exchanges, the most valuable missing interval first."""
    search = _Search(problem, room, keep)
    improved = True
    while improved and trials > 0:
        improved = False
        for j in search.missing()[:trials].tolist():
            trials -= 1
            improved |= search.swap_in(j)
    return search.keep


class _Search:
    def __init__(self, problem: Intervals, room: Ints, keep: Bools) -> None:
        self.problem = problem
        self.keep = keep.copy()
        self.free = room - problem.load(keep)
        self.worth = problem.saves & problem.occupies
        lost = problem.group[~keep & (problem.group >= 0)]
        self.lost = np.bincount(lost, minlength=max(problem.groups, 1))

    def missing(self) -> Ints:
        """Intervals not kept, by the bytes that keeping them alone would save."""
        ids = np.flatnonzero(~self.keep & self.worth)
        return ids[np.lexsort((ids, -self._bytes(ids, others_lost=1)))]

    def swap_in(self, j: int) -> bool:
        """Keep ``j`` and drop what must leave for it, if that saves bytes."""
        gain = int(self._bytes(np.array([j]), others_lost=1)[0])
        self._toggle(j)
        dropped: list[int] = []
        while gain > 0:
            tightest = self._tightest(j)
            if tightest is None:
                break
            victims, cost = self._cheapest(tightest, j)
            gain = gain - cost if victims else 0
            if gain > 0:
                for i in victims:
                    self._toggle(i)
                dropped += victims
        if gain <= 0:
            for i in (*reversed(dropped), j):
                self._toggle(i)
            return False
        for i in dropped:
            if self._fits(i):
                self._toggle(i)
        return True

    def _bytes(self, ids: Ints, *, others_lost: int) -> Ints:
        """Bytes that toggling each interval alone changes: a fetch, and a write back nobody else causes."""
        problem = self.problem
        group = problem.group[ids]
        alone = (group >= 0) & (self.lost[group] == others_lost)
        change: Ints = problem.nbytes[ids] * (problem.reused[ids].astype(np.int64) + alone)
        return change

    def _cheapest(self, period: int, j: int) -> tuple[list[int], int]:
        """Kept intervals over ``period`` that relieve it, the cheapest by the byte first, and what they cost together.
        None if all of them would not do."""
        problem = self.problem
        over = covering(problem.begin, problem.end, period, problem.periods)
        ids = np.flatnonzero(over & self.keep & (problem.nbytes > 0))
        ids = ids[ids != j]
        cost, nbytes = self._bytes(ids, others_lost=0), problem.nbytes[ids]
        deficit, total = -int(self.free[period]), 0
        victims: list[int] = []
        while deficit > 0 and len(ids):
            order = np.lexsort((-problem.end[ids], cost / np.minimum(nbytes, deficit)))
            ids, cost, nbytes = ids[order], cost[order], nbytes[order]
            # Whoever is larger than what is still short then has another price.
            left = deficit - np.cumsum(nbytes)
            count = 1 + int(np.argmin(np.append(nbytes[1:] <= left[:-1], False)))
            victims += ids[:count].tolist()
            total += int(cost[:count].sum())
            deficit = int(left[count - 1])
            ids, cost, nbytes = ids[count:], cost[count:], nbytes[count:]
        return ([], 0) if deficit > 0 else (victims, total)

    def _tightest(self, j: int) -> int | None:
        """The period of ``j`` with the largest deficit, if there is one."""
        worst, at = 0, None
        for a, b in self._spans(j):
            t = a + int(self.free[a:b].argmin())
            if self.free[t] < worst:
                worst, at = int(self.free[t]), t
        return at

    def _fits(self, j: int) -> bool:
        return all(self.free[a:b].min() >= self.problem.nbytes[j] for a, b in self._spans(j))

    def _toggle(self, j: int) -> None:
        kept = bool(self.keep[j])
        nbytes = self.problem.nbytes[j]
        for a, b in self._spans(j):
            self.free[a:b] += nbytes if kept else -nbytes
        if self.problem.group[j] >= 0:
            self.lost[self.problem.group[j]] += 1 if kept else -1
        self.keep[j] = not kept

    def _spans(self, j: int) -> list[tuple[int, int]]:
        return spans(int(self.problem.begin[j]), int(self.problem.end[j]), self.problem.periods)
