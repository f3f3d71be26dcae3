"""Orders of a graph's operators that need less memory at once.

Owns the ordering rules and `reorder`, which takes the best of them. Invariant: the result is a possible order
and its peak is never above that of the given one. Peaks are of live bytes, the lower bound of any placement.

Rules: CANN GE's (nodes whose inputs live long anyway move down to just before their first consumer; fixed
and dynamic), those of Inductor's ``reorder_for_peak_memory`` (lpmf, bfs, dfs, on this graph instead of its
fused kernels), and our own: moves weighed in bytes, in both directions, and a beam search.
"""

import heapq
from bisect import insort
from dataclasses import dataclass

from hetero.errors import ConfigError
from hetero.pool.dataflow import Dataflow, order_peak

__all__ = ["Reordering", "beam", "bfs", "dfs", "hoist", "inductor", "lpmf", "reorder", "sink", "tighten"]

_TIGHTENINGS = 4  # of an order, at most

Order = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reordering:
    """An order, the rule that found it, its peak and that of the given order, in bytes."""

    order: Order
    rule: str
    peak_nbytes: int
    given_nbytes: int


def reorder(flow: Dataflow, *, width: int = 8, also: Dataflow | None = None) -> Reordering:
    """The order of least peak among the given one and what all rules make; the first of equals.

    ``width`` is that of the beam search. ``also``: the same graph under another assumption of what is kept,
    under which the order must be no worse than the given one, either. Raises `ConfigError` for a width below 1.
    """
    given = tuple(range(len(flow)))
    candidates: dict[str, Order] = {"given": given, "lpmf": lpmf(flow), "bfs": bfs(flow), "dfs": dfs(flow)}
    candidates["sink-fixed"] = sink(flow, given, rule="fixed")
    candidates["sink-dynamic"] = sink(flow, given, rule="dynamic")
    candidates["beam"] = beam(flow, width=width)
    candidates |= {f"{name}+tighten": tighten(flow, order) for name, order in list(candidates.items())}
    if also is not None:
        limit = order_peak(also, given)
        candidates = {name: order for name, order in candidates.items() if order_peak(also, order) <= limit}
    return _best(flow, candidates)


def inductor(flow: Dataflow) -> Reordering:
    """What Inductor's choice would be: the best of the given order, lpmf, bfs and dfs."""
    given = tuple(range(len(flow)))
    return _best(flow, {"given": given, "lpmf": lpmf(flow), "bfs": bfs(flow), "dfs": dfs(flow)})


def sink(flow: Dataflow, order: Order, *, rule: str) -> Order:
    """Operators moved down to just before their first consumer, last ones first.

    ``fixed``: if all they read is kept anyway. ``dynamic``: if something they read lives longer than until
    there. ``weighed``: if what would live longer is no bigger than what would live shorter.
    """
    moves = {"fixed": _sinks_fixed, "dynamic": _sinks_dynamic, "weighed": _sinks_weighed}
    if rule not in moves:
        raise ConfigError(f"rule={rule!r} is unknown; use one of {', '.join(moves)}")
    position = {v: i for i, v in enumerate(order)}
    later: set[int] = set()
    result: list[int] = []  # backwards: last operator first
    for v in reversed(order):
        if moves[rule](flow, v, position, later):
            consumers = set(flow.succs[v])
            index = max((i for i, u in enumerate(result) if u in consumers), default=-1) + 1
            result.insert(index, v)
        else:
            result.append(v)
        later.add(v)
    return tuple(reversed(result))


def hoist(flow: Dataflow, order: Order) -> Order:
    """Operators moved up to just after the last one they need, if that frees at least what they make."""
    earlier: set[int] = set()
    result: list[int] = []
    for v in order:
        dying = [b for b in flow.touches[v] if b not in flow.kept and flow.maker[b] != v]
        freed = sum(flow.nbytes[b] for b in dying if all(u in earlier or u == v for u in flow.users[b]))
        if freed and freed >= flow.made_nbytes(v):
            needed = set(flow.preds[v])
            # What it frees may have been used after what it needs: those uses stay before it, too.
            needed |= {u for b in dying for u in flow.users[b] if u != v and u in earlier}
            index = max((i for i, u in enumerate(result) if u in needed), default=-1) + 1
            result.insert(index, v)
        else:
            result.append(v)
        earlier.add(v)
    return tuple(result)


def tighten(flow: Dataflow, order: Order) -> Order:
    """`sink` by weight and `hoist` in turn, as long as the peak falls; the best order seen."""
    best, peak = order, order_peak(flow, order)
    for _ in range(_TIGHTENINGS):
        sunk = sink(flow, best, rule="weighed")
        found, name = min((order_peak(flow, one), i) for i, one in enumerate((sunk, hoist(flow, sunk))))
        if found >= peak:
            break
        best, peak = (sunk, hoist(flow, sunk))[name], found
    return best


def lpmf(flow: Dataflow) -> Order:
    """Least peak memory first: of the ready, one that stays below the peak so far and leaves least."""
    walk = _Walk(flow)
    while walk.ready:
        gap = walk.peak - walk.live
        walk.run(min(walk.ready, key=lambda v: _lpmf_key(walk, v, gap)))
    return tuple(walk.order)


def bfs(flow: Dataflow) -> Order:
    """First the ready operator whose predecessors ran earliest."""
    ran: dict[int, int] = {}
    waiting = [len(before) for before in flow.preds]
    ready: list[tuple[list[int], int]] = [([], v) for v in range(len(flow)) if not waiting[v]]
    while ready:
        _, v = heapq.heappop(ready)
        ran[v] = len(ran)
        for u in flow.succs[v]:
            waiting[u] -= 1
            if not waiting[u]:
                heapq.heappush(ready, (sorted(ran[p] for p in flow.preds[u]), u))
    return tuple(ran)


def dfs(flow: Dataflow) -> Order:
    """Operators that touch least first, each with all it needs before it, the lightest first."""
    weight = [(sum(flow.nbytes[b] for b in touched), v) for v, touched in enumerate(flow.touches)]
    seen: set[int] = set()
    result: list[int] = []
    for _, root in sorted(weight):
        stack = [(root, False)]
        while stack:
            v, finished = stack.pop()
            if finished:
                result.append(v)
            elif v not in seen:
                seen.add(v)
                stack.append((v, True))
                stack += [(u, False) for _, u in sorted((weight[u] for u in flow.preds[v]), reverse=True)]
    return tuple(result)


def beam(flow: Dataflow, *, width: int = 8) -> Order:
    """The best of ``width`` partial orders at a time, by peak and then by what they leave alive."""
    if width < 1:
        raise ConfigError(f"width={width}: a beam has at least one state")
    states = [_Walk(flow)]
    for _ in range(len(flow)):
        children: dict[int, tuple[int, int, int, int, _Walk]] = {}  # by what has run: the lowest peak
        for number, state in enumerate(states):
            gap = state.peak - state.live
            likely = heapq.nsmallest(width, state.ready, key=lambda v: _lpmf_key(state, v, gap))
            for v in (*likely, state.ready[0]):  # the last one: as given
                done = state.done | 1 << v
                child = (*state.foresee(v), number, v, state)
                if done not in children or child[:4] < children[done][:4]:
                    children[done] = child
        best = heapq.nsmallest(width, children.values(), key=_rank)
        states = [_step(state, v) for _, _, _, v, state in best]
    return tuple(min(states, key=lambda state: state.peak).order)


class _Walk:
    """A partial order: what has run, what is ready, what is alive."""

    def __init__(self, flow: Dataflow) -> None:
        self.flow = flow
        self.order: list[int] = []
        self.done = 0
        self.waiting = [len(before) for before in flow.preds]
        self.uses = [len(users) + (b in flow.kept) for b, users in enumerate(flow.users)]
        self.ready = [v for v in range(len(flow)) if not self.waiting[v]]
        self.live = sum(n for n, made_by in zip(flow.nbytes, flow.maker, strict=True) if made_by is None)
        self.peak = self.live

    def copy(self) -> "_Walk":
        other = object.__new__(_Walk)
        other.flow, other.done, other.live, other.peak = self.flow, self.done, self.live, self.peak
        other.order, other.waiting = self.order.copy(), self.waiting.copy()
        other.uses, other.ready = self.uses.copy(), self.ready.copy()
        return other

    def freed(self, v: int) -> int:
        """Bytes that are free once ``v`` has run."""
        return sum(self.flow.nbytes[b] for b in self.flow.touches[v] if self.uses[b] == 1)

    def foresee(self, v: int) -> tuple[int, int]:
        """Peak and live bytes after running ``v``."""
        during = self.live + self.flow.made_nbytes(v)
        return max(self.peak, during), during - self.freed(v)

    def run(self, v: int) -> None:
        self.peak, self.live = self.foresee(v)
        self.ready.remove(v)
        self.order.append(v)
        self.done |= 1 << v
        for b in self.flow.touches[v]:
            self.uses[b] -= 1
        for u in self.flow.succs[v]:
            self.waiting[u] -= 1
            if not self.waiting[u]:
                insort(self.ready, u)


def _lpmf_key(walk: _Walk, v: int, gap: int) -> tuple[int, int, int]:
    made = walk.flow.made_nbytes(v)
    return (made if made > gap else 0, made - walk.freed(v), v)


def _rank(child: tuple[int, int, int, int, _Walk]) -> tuple[int, int, int, int]:
    return child[:4]


def _step(state: _Walk, v: int) -> _Walk:
    after = state.copy()
    after.run(v)
    return after


def _sinks_fixed(flow: Dataflow, v: int, position: dict[int, int], later: set[int]) -> bool:
    return all(b in flow.kept or flow.maker[b] == v for b in flow.touches[v])


def _sinks_dynamic(flow: Dataflow, v: int, position: dict[int, int], later: set[int]) -> bool:
    end = len(position)
    first = min((position[u] for u in flow.succs[v]), default=end)
    read = [b for b in flow.touches[v] if flow.maker[b] != v]
    longest = max(
        (end if b in flow.kept else max(position[u] for u in flow.users[b]) for b in read), default=end
    )
    return longest > first or longest == end


def _sinks_weighed(flow: Dataflow, v: int, position: dict[int, int], later: set[int]) -> bool:
    read = [b for b in flow.touches[v] if flow.maker[b] != v and b not in flow.kept]
    longer = sum(flow.nbytes[b] for b in read if not any(u in later for u in flow.users[b]))
    return longer <= flow.made_nbytes(v)


def _best(flow: Dataflow, candidates: dict[str, Order]) -> Reordering:
    peaks = {name: order_peak(flow, order) for name, order in candidates.items()}
    rule = min(peaks, key=lambda name: peaks[name])  # the first of equals
    return Reordering(order=candidates[rule], rule=rule, peak_nbytes=peaks[rule], given_nbytes=peaks["given"])
