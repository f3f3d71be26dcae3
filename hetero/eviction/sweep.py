"""Demand eviction: what a policy that decides only when room is short would keep.

Owns the walk through time in which a copy stays until a policy throws it out, and the repair that makes the
outcome repeat itself every iteration. Copies that will not be used again (or not before they are invalidated)
leave at once under every policy unless they are dirty. Belady, LRU and FIFO run on a heap; any other policy
is asked.
"""

import heapq
from math import inf

import numpy as np

from hetero.eviction.intervals import Bools, Intervals, Ints, covering
from hetero.eviction.model import Candidate, Policy
from hetero.eviction.policies import FarthestNextUse, FirstIn, LeastRecent

__all__ = ["fill", "repair", "spans", "sweep"]

_CRUMBS = 16  # copies smaller than this fraction of what is needed are not worth asking back


def sweep(problem: Intervals, room: Ints, policy: Policy) -> Bools:
    """What ``policy`` keeps in steady state with ``room[t]`` bytes beside the operands of ``t``."""
    if isinstance(policy, FarthestNextUse | LeastRecent | FirstIn):
        keep = _Walk(problem, room).by_rank(policy)
    else:
        keep = _Walk(problem, room).by_asking(policy)
    return repair(problem, room, keep)


def fill(problem: Intervals, room: Ints, keep: Bools, order: Ints) -> Bools:
    """``keep`` and every further interval, taken in ``order``, that fits beside those already kept."""
    free = room - problem.load(keep)
    filled = keep.copy()
    columns = (order, problem.begin[order], problem.end[order], problem.nbytes[order])
    for j, begin, end, nbytes in zip(*(column.tolist() for column in columns), strict=True):
        parts = spans(begin, end, problem.periods)
        for a, b in parts:
            if free[a] < nbytes or free[a:b].min() < nbytes:
                break
        else:
            filled[j] = True
            for a, b in parts:
                free[a:b] -= nbytes
    return filled


def repair(problem: Intervals, room: Ints, keep: Bools) -> Bools:
    """``keep`` less what overflows ``room``, the farthest next use leaving first.

    A demand walk may alternate between iterations, so its choices before and after the wrap can disagree; a
    rounded relaxation may overflow by the solver's tolerance, or where its windows meet.
    """
    excess = problem.load(keep) - room
    over = np.flatnonzero(excess > 0)
    if not len(over):
        return keep
    keep = keep.copy()
    for t in over.tolist():
        if excess[t] <= 0:
            continue
        inside = covering(problem.begin, problem.end, t, problem.periods)
        live = np.flatnonzero(keep & inside & (problem.nbytes > 0))
        for j in live[np.argsort(-problem.end[live], kind="stable")].tolist():
            if excess[t] <= 0:
                break
            keep[j] = False
            for a, b in spans(int(problem.begin[j]), int(problem.end[j]), problem.periods):
                excess[a:b] -= problem.nbytes[j]
    return keep


def spans(begin: int, end: int, periods: int) -> list[tuple[int, int]]:
    """The periods of an unrolled interval as at most two slices of the iteration, none empty."""
    if end <= periods:
        return [(begin, end)] if begin < end else []
    wrapped = (max(begin - periods, 0), end - periods)
    return [(begin, periods), wrapped] if begin < periods else [wrapped]


class _Walk:
    """Two iterations (one if not cyclic), starting empty; what ends or is evicted in the last one counts.

    [Note: instances] Interval ``j`` entered in turn ``k`` (0 or 1) is instance ``j + k * count``.
    """

    def __init__(self, problem: Intervals, room: Ints) -> None:
        self.problem = problem
        self.turns = 2 if problem.cyclic else 1
        self.count = len(problem.use)
        self.room: list[int] = np.tile(room, self.turns + 1).tolist()
        self.worth = problem.saves & problem.occupies
        shift = np.repeat(np.arange(self.turns) * problem.periods, self.count)
        self.begin = np.tile(problem.begin, self.turns) + shift
        self.until = np.tile(problem.end, self.turns) + shift

    def by_rank(self, policy: Policy) -> Bools:
        """One heap of ``rank * instances + instance``, whose smallest entry is the next victim."""
        instances, last = self.turns * self.count, self.turns * self.problem.periods
        prune = isinstance(policy, FarthestNextUse)
        first_in = _FirstIn(self) if isinstance(policy, FirstIn) else None
        ranks = self._ranks(policy)
        entering, bounds = self._entering(everything=first_in is not None)
        nbytes: list[int] = np.tile(self.problem.nbytes, self.turns).tolist()
        holds: list[bool] = self._holds().tolist()
        until: list[int] = self.until.tolist()
        leaving = [0] * (3 * self.problem.periods + 2)
        room, heap, dropped, load = self.room, list[int](), list[int](), 0
        for now in range(1, last + 1):
            load -= leaving[now]
            for instance in entering[bounds[now] : bounds[now + 1]]:
                if first_in is not None:
                    rank = first_in.rank(instance, first_in.entered(instance, now))
                    if not holds[instance]:
                        continue
                else:
                    rank = ranks[instance]
                heapq.heappush(heap, rank * instances + instance)
                leaving[until[instance]] += nbytes[instance]
                load += nbytes[instance]
            if load <= room[now]:
                continue
            victims = []
            excess = load - room[now]
            while load > room[now]:
                entry = heapq.heappop(heap)
                instance = entry % instances
                if until[instance] > now:
                    victims.append(entry)
                    load -= nbytes[instance]
            for entry in reversed(victims):
                instance = entry % instances
                size = nbytes[instance]
                if prune and load + size <= room[now] and size * _CRUMBS >= excess:
                    load += size
                    heapq.heappush(heap, entry)
                    continue
                leaving[until[instance]] -= size
                dropped.append(instance)
                if first_in is not None:
                    first_in.left(instance)
        return self._steady(dropped)

    def _ranks(self, policy: Policy) -> list[int]:
        """Per instance, who leaves first: farthest next use (ties: most bytes), or oldest use."""
        nbytes = np.tile(self.problem.nbytes, self.turns)
        if isinstance(policy, FarthestNextUse):
            reused = np.tile(self.problem.reused, self.turns)
            order = np.lexsort((-nbytes, -np.where(reused, self.until, 1 << 60)))
        else:
            order = np.argsort(self.begin, kind="stable")
        ranks = np.empty(len(order), dtype=np.int64)
        ranks[order] = np.arange(len(order))
        listed: list[int] = ranks.tolist()
        return listed

    def _entering(self, *, everything: bool) -> tuple[list[int], list[int]]:
        """Instances in the order in which they enter, and where each moment's begin in that list.

        Without ``everything``, only those that hold memory.
        """
        chosen = np.flatnonzero(everything | self._holds())
        order = chosen[np.argsort(self.begin[chosen], kind="stable")]
        moments = np.arange(self.turns * self.problem.periods + 2)
        return order.tolist(), np.searchsorted(self.begin[order], moments).tolist()

    def _holds(self) -> Bools:
        """Instances that would hold memory if kept, and are worth it."""
        return np.tile(self.worth & (self.problem.nbytes > 0), self.turns)

    def _steady(self, dropped: list[int]) -> Bools:
        """What is kept, given the dropped instances: the last turn, (T, 2T] of a cyclic trace, repeats."""
        instances = np.asarray(dropped, dtype=np.int64)
        if self.problem.cyclic:
            ends, periods = self.until[instances], self.problem.periods
            instances = instances[(ends > periods) & (ends <= 2 * periods)]
        keep = self.problem.saves
        keep[instances % max(self.count, 1)] = False
        return keep

    def by_asking(self, policy: Policy) -> Bools:
        """Show ``policy`` the live copies when room is short; what it will not name leaves by last use."""
        tensor, group, written = (self.problem.tensor, self.problem.group, self.problem.written)
        entering, bounds = self._entering(everything=True)
        first_in = _FirstIn(self)
        live: dict[int, tuple[int, int]] = {}  # tensor -> instance, when fetched
        saved: set[int] = set()  # groups written back since their write
        dropped: list[int] = []
        for now in range(1, self.turns * self.problem.periods + 1):
            live = {x: copy for x, copy in live.items() if self.until[copy[0]] > now}
            for instance in entering[bounds[now] : bounds[now + 1]]:
                j = instance % self.count
                fetched = first_in.entered(instance, now)
                if written[j]:
                    saved.discard(int(group[j]))
                if self.worth[j]:
                    live[int(tensor[j])] = (instance, fetched)
            held = sum(int(self.problem.nbytes[instance % self.count]) for instance, _ in live.values())
            if held <= self.room[now]:
                continue
            candidates = [self._candidate(live[x], now, saved) for x in sorted(live)]
            for x in _chosen(policy, candidates, held - self.room[now]):
                instance, _ = live.pop(x)
                saved.add(int(group[instance % self.count]))
                first_in.left(instance)
                dropped.append(instance)
        return self._steady(dropped)

    def _candidate(self, copy: tuple[int, int], now: int, saved: set[int]) -> Candidate:
        instance, fetched = copy
        problem, j = self.problem, instance % self.count
        return Candidate(
            tensor=int(problem.tensor[j]),
            nbytes=int(problem.nbytes[j]),
            next_use=float(self.until[instance] - now) if problem.reused[j] else inf,
            last_use=float(self.begin[instance] - 1),
            fetched_at=float(fetched),
            dirty=bool(problem.group[j] >= 0) and int(problem.group[j]) not in saved,
        )


class _FirstIn:
    """Since when each tensor has been resident without a break."""

    def __init__(self, walk: _Walk) -> None:
        self.tensor: list[int] = np.tile(walk.problem.tensor, walk.turns).tolist()
        self.reused: list[bool] = np.tile(walk.problem.reused, walk.turns).tolist()
        self.count = max(self.tensor, default=0) + 1
        self.since: dict[int, int] = {}

    def entered(self, instance: int, now: int) -> int:
        """When the copy used just before ``now`` was fetched."""
        since = self.since.setdefault(self.tensor[instance], now - 1)
        if not self.reused[instance]:  # the next use fetches anew, whatever happens until then
            del self.since[self.tensor[instance]]
        return since

    def rank(self, instance: int, since: int) -> int:
        """Of those that came at once, the lower tensor first, as `FirstIn` says."""
        return since * self.count + self.tensor[instance]

    def left(self, instance: int) -> None:
        self.since.pop(self.tensor[instance], None)


def _chosen(policy: Policy, candidates: list[Candidate], nbytes: int) -> list[int]:
    """The policy's victims; if they free too little, the longest unused follow."""
    sizes = {candidate.tensor: candidate.nbytes for candidate in candidates}
    chosen = [x for x in dict.fromkeys(policy.victims(candidates, nbytes)) if x in sizes]
    freed = sum(sizes[x] for x in chosen)
    for candidate in sorted(candidates, key=lambda c: (c.last_use, c.tensor)):
        if freed >= nbytes:
            break
        if candidate.tensor not in chosen:
            chosen.append(candidate.tensor)
            freed += candidate.nbytes
    return chosen
