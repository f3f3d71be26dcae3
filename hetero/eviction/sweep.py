"""Demand eviction: what a policy that decides only when room is short would keep.

Owns the walk through time in which a copy stays until a policy throws it out, and the repair that makes the
outcome repeat itself every iteration. Copies that will not be used again (or not before they are invalidated)
leave at once under every policy unless they are dirty. Belady, LRU and FIFO run on a heap; any other policy
is asked.
"""

import heapq
from collections.abc import Sequence
from itertools import pairwise
from math import inf

import numpy as np

from hetero.eviction.intervals import Bools, Intervals, Ints
from hetero.eviction.model import Candidate, Policy
from hetero.eviction.policies import FarthestNextUse, FirstIn, LeastRecent

__all__ = ["fill", "sweep"]


def sweep(problem: Intervals, room: Ints, policy: Policy) -> Bools:
    """The intervals that ``policy`` keeps in steady state with ``room[t]`` bytes beside the operands of
    ``t``.
    """
    if isinstance(policy, FarthestNextUse | LeastRecent | FirstIn):
        keep = _Walk(problem, room).by_rank(policy)
    else:
        keep = _Walk(problem, room).by_asking(policy)
    return _repaired(problem, room, keep)


def fill(problem: Intervals, room: Ints, keep: Bools, order: Ints) -> Bools:
    """``keep`` and every further interval, taken in ``order``, that fits beside those already kept."""
    free = room - problem.load(keep)
    filled = keep.copy()
    for j in order.tolist():
        nbytes = int(problem.nbytes[j])
        if filled[j]:
            continue
        begin, end = int(problem.begin[j]), int(problem.end[j])
        spans = _spans(begin, end, problem.periods)
        if all(int(free[a:b].min()) >= nbytes for a, b in spans):
            filled[j] = True
            for a, b in spans:
                free[a:b] -= nbytes
    return filled


def _spans(begin: int, end: int, periods: int) -> list[tuple[int, int]]:
    spans = [(begin, min(end, periods)), (max(begin, periods) - periods, end - periods)]
    return [(a, b) for a, b in spans if a < b]


class _Walk:
    """Two iterations (one if not cyclic), starting empty; what ends or is evicted in the last one counts."""

    def __init__(self, problem: Intervals, room: Ints) -> None:
        self.problem = problem
        self.periods = problem.periods
        self.turns = 2 if problem.cyclic else 1
        self.room: list[int] = room.tolist()
        self.begin: list[int] = problem.begin.tolist()
        self.end: list[int] = problem.end.tolist()
        self.nbytes: list[int] = problem.nbytes.tolist()
        worth = problem.reused | (problem.group >= 0)
        self.worth: list[bool] = worth.tolist()
        order = np.argsort(problem.begin, kind="stable")
        bounds = np.searchsorted(problem.begin[order], np.arange(self.periods + 2))
        ordered = order.tolist()
        self.entering = [ordered[a:b] for a, b in pairwise(bounds.tolist())]

    def by_rank(self, policy: Policy) -> Bools:
        """One heap whose smallest entry is the next victim."""
        problem, periods = self.problem, self.periods
        begin, end, nbytes, worth = self.begin, self.end, self.nbytes, self.worth
        farthest, first_in = isinstance(policy, FarthestNextUse), isinstance(policy, FirstIn)
        next_use: list[int] = problem.next_use.tolist()
        reused: list[bool] = problem.reused.tolist()
        tensor: list[int] = problem.tensor.tolist()
        fetched_at: dict[int, int] = {}
        keep = np.ones(len(begin), dtype=bool)
        keep[~np.asarray(worth, dtype=bool)] = False
        leaving = [0] * ((self.turns + 2) * periods + 2)
        heap: list[tuple[int, int, int, int]] = []  # rank, -bytes, interval, unrolled end
        dropped: set[tuple[int, int]] = set()
        load = 0
        for now in range(1, self.turns * periods + 1):
            moment, shift = (now - 1) % periods + 1, (now - 1) // periods * periods
            load -= leaving[now]
            for j in self.entering[moment]:
                rank = begin[j] + shift
                if first_in:
                    rank = fetched_at.setdefault(tensor[j], rank)
                    if not reused[j]:
                        del fetched_at[tensor[j]]
                until = end[j] + shift
                if until <= now or not worth[j] or not nbytes[j]:
                    continue
                if farthest:
                    rank = -(next_use[j] + shift) if reused[j] else -(1 << 60)
                heapq.heappush(heap, (rank, -nbytes[j], j, until))
                leaving[until] += nbytes[j]
                load += nbytes[j]
            room = self.room[now % periods]
            if load <= room:
                continue
            victims = []
            while load > room:
                entry = heapq.heappop(heap)
                if entry[3] <= now:
                    continue
                victims.append(entry)
                load += entry[1]
            for entry in reversed(victims):
                if farthest and load - entry[1] <= room:
                    load -= entry[1]
                    heapq.heappush(heap, entry)
                    continue
                _, negative, j, until = entry
                leaving[until] += negative
                fetched_at.pop(tensor[j], None)
                dropped.add((j, until))
        for j, until in dropped:
            # The instance that ends within (last turn's start, its end] is the one that steady state repeats.
            if not self.problem.cyclic or periods < until <= 2 * periods:
                keep[j] = False
        return keep

    def by_asking(self, policy: Policy) -> Bools:
        """Show ``policy`` the live copies when room is short; what it will not name leaves by last use."""
        problem, periods = self.problem, self.periods
        keep = np.asarray(self.worth, dtype=bool).copy()
        live: dict[int, tuple[int, int, int]] = {}  # tensor -> interval, unrolled begin, unrolled end
        fetched_at: dict[int, int] = {}
        clean: set[int] = set()  # groups already written back since their write
        for now in range(1, self.turns * periods + 1):
            moment, shift = (now - 1) % periods + 1, (now - 1) // periods * periods
            for x in [x for x, (_, _, until) in live.items() if until <= now]:
                del live[x]
            for j in self.entering[moment]:
                x = int(problem.tensor[j])
                start = fetched_at.setdefault(x, now - 1)
                if not problem.reused[j]:
                    del fetched_at[x]
                if problem.written[j]:
                    clean.discard(int(problem.group[j]))
                if self.end[j] + shift > now and self.worth[j]:
                    live[x] = (j, start, self.end[j] + shift)
            excess = sum(self.nbytes[j] for j, _, _ in live.values()) - self.room[now % periods]
            if excess <= 0:
                continue
            for x in self._victims(policy, live, clean, now, excess):
                j, _, until = live.pop(x)
                fetched_at.pop(x, None)
                if problem.group[j] >= 0:
                    clean.add(int(problem.group[j]))
                if not problem.cyclic or periods < until <= 2 * periods:
                    keep[j] = False
        return keep

    def _victims(
        self,
        policy: Policy,
        live: dict[int, tuple[int, int, int]],
        clean: set[int],
        now: int,
        excess: int,
    ) -> Sequence[int]:
        problem = self.problem
        candidates = []
        for x, (j, start, until) in sorted(live.items()):
            shift = until - self.end[j]
            candidates.append(
                Candidate(
                    tensor=x,
                    nbytes=self.nbytes[j],
                    next_use=float(problem.next_use[j] + shift - now) if problem.reused[j] else inf,
                    last_use=float(problem.use[j] + shift),
                    fetched_at=float(start),
                    dirty=bool(problem.group[j] >= 0 and int(problem.group[j]) not in clean),
                )
            )
        chosen = [x for x in dict.fromkeys(policy.victims(candidates, excess)) if x in live]
        freed = sum(self.nbytes[live[x][0]] for x in chosen)
        for candidate in sorted(candidates, key=lambda c: (c.last_use, c.tensor)):
            if freed >= excess:
                break
            if candidate.tensor not in chosen:
                chosen.append(candidate.tensor)
                freed += candidate.nbytes
        return chosen


def _repaired(problem: Intervals, room: Ints, keep: Bools) -> Bools:
    """``keep`` less what makes it overflow when the last iteration's choices repeat; farthest next use goes
    first.

    A demand walk may alternate between iterations, so its choices before and after the wrap can disagree.
    """
    excess = problem.load(keep) - room
    over = np.flatnonzero(excess > 0)
    if not len(over):
        return keep
    keep = keep.copy()
    for t in over.tolist():
        if excess[t] <= 0:
            continue
        inside = (problem.begin <= t) & (t < problem.end)
        inside |= (problem.begin <= t + problem.periods) & (t + problem.periods < problem.end)
        live = np.flatnonzero(keep & inside & (problem.nbytes > 0))
        for j in live[np.argsort(-problem.end[live], kind="stable")].tolist():
            if excess[t] <= 0:
                break
            keep[j] = False
            for a, b in _spans(int(problem.begin[j]), int(problem.end[j]), problem.periods):
                excess[a:b] -= problem.nbytes[j]
    return keep
