"""Running several searches within a time limit, and the planners made of them.

Owns `portfolio` and the search planners. Invariants: the result is never worse than SmartPool's best fit;
the search stops as soon as the footprint equals a proven lower bound, and says so. Which placements are
tried is the engines' business.
"""

import time
from collections.abc import Sequence

import numpy as np

from hetero.errors import ConfigError
from hetero.jit import COMPILED
from hetero.pool.engines import Engine, RandomKeys, RepairedOrder, Skyline, size_step
from hetero.pool.exact import MOST_BUFFERS, MOST_BYTES, Exact
from hetero.pool.greedy import smartpool
from hetero.pool.orders import OrderKeys
from hetero.pool.placement import NO_LIMIT, Placer
from hetero.pool.planner import register
from hetero.pool.problem import Problem, Solution, solution_from_offsets
from hetero.pool.reduction import Piece, pieces

__all__ = ["exact", "hill_climb", "portfolio", "random_keys", "skyline"]

_ALL = ("random-keys", "skyline", "exact", "hill-climb")
# Repairing an order in plain Python takes seconds a step beyond this many buffers.
_MOST_WITHOUT_NUMBA = 1000
# Pieces of up to this many buffers give the exact search most of the time.
_EXACT_LEADS = 1500


@register("skyline")
def skyline(problem: Problem) -> Solution:
    """Lowest offset first, under five tie-breaks; the best of them. Not a search: each is one pass."""
    return _search(problem, "skyline", ("skyline",), seconds=float("inf"), attempts=5)


@register("random-keys")
def random_keys(problem: Problem, *, attempts: int = 100, seed: int = 0) -> Solution:
    """Size-and-duration keys with noise, placed by best and by first fit; ``attempts`` orders a piece."""
    return _search(problem, "random-keys", ("random-keys",), float("inf"), attempts, seed)


@register("hill-climb")
def hill_climb(problem: Problem, *, attempts: int = 20, seed: int = 0) -> Solution:
    """Hill-climbing on the bottleneck: whoever would end above the limit is placed earlier; the limit
    falls.
    """
    return _search(problem, "hill-climb", ("hill-climb",), float("inf"), attempts, seed)


@register("exact")
def exact(problem: Problem, *, seconds: float = 10.0, seed: int = 0) -> Solution:
    """Exact canonical search (after MiniMalloc) for pieces of up to `MOST_BUFFERS` buffers, from
    SmartPool's result down.
    """
    return _search(problem, "exact", ("exact",), seconds, None, seed)


@register("portfolio")
def portfolio(problem: Problem, *, seconds: float = 60.0, seed: int = 0) -> Solution:
    """The best placement that greedies, random keys, skylines, hill-climbing and exact search find in
    ``seconds``.

    Stops at the lower bound, or when the exact search has nothing left. ``proven_optimal`` says whether it
    did. An attempt that has begun is finished, so that the limit is passed by up to about a second, more
    where Numba is missing.
    Raises `ConfigError` for a negative limit.
    """
    return _search(problem, "portfolio", _ALL, seconds, None, seed)


class _PieceSearch:
    """The engines of one piece, their shares of time, and the best that any of them has found."""

    def __init__(self, piece: Piece, engines: Sequence[str], seed: int) -> None:
        self.piece = piece
        self.bound = piece.bound
        self.step = size_step(piece.sizes)
        placer = Placer(piece.begins, piece.ends, piece.sizes)
        keys = OrderKeys(piece)
        # The first placement has no limit, so there always is one, which all others must beat.
        by_size = np.argsort(-piece.sizes, kind="stable")
        found = placer.place(by_size, best_fit=True, limit=NO_LIMIT)
        assert found is not None
        self.offsets, self.footprint = found
        self._engines = [_engine(name, piece, placer, keys, seed) for name in engines if _suits(name, piece)]
        self._seconds = {engine.name: 0.0 for engine in self._engines}
        # On small pieces the exact search is the one that reaches the bound; the others only lower the limit.
        self._charge = {"exact": 0.05} if len(piece) <= _EXACT_LEADS else {}
        self.attempts = 0

    @property
    def finished(self) -> bool:
        """Whether no engine can improve on the footprint."""
        return self.footprint <= self.bound or all(engine.finished for engine in self._engines)

    def advance(self, goal: int) -> None:
        """One attempt by the engine that has had the least time; time that brought an improvement is not
        counted.
        """
        engine = min((e for e in self._engines if not e.finished), key=lambda e: self._seconds[e.name])
        started = time.perf_counter()
        attempt = engine.attempt(max(goal, self.bound), self.footprint - self.step)
        seconds = time.perf_counter() - started
        self.attempts += 1
        self.bound = max(self.bound, attempt.proven_bound)
        if attempt.offsets is not None:
            self.offsets = attempt.offsets
            self.footprint = int((attempt.offsets + self.piece.sizes).max())
        else:
            self._seconds[engine.name] += seconds * self._charge.get(engine.name, 1.0)


def _search(
    problem: Problem,
    name: str,
    engines: Sequence[str],
    seconds: float,
    attempts: int | None,
    seed: int = 0,
) -> Solution:
    """Work on whichever piece ends highest until it cannot be lowered, or time or attempts run out."""
    if not seconds >= 0:
        raise ConfigError(f"seconds={seconds!r}: a time limit cannot be negative")
    started = time.perf_counter()
    offsets, leaves = pieces(problem)
    searches = [_PieceSearch(piece, engines, seed) for piece in leaves]
    # Full-life buffers lie below their piece; where no piece is left above them they count themselves.
    settled = int((offsets + problem.sizes).max(initial=0))
    proven = True
    while searches:
        worst = max(searches, key=lambda s: s.piece.base + s.footprint)
        total = worst.piece.base + worst.footprint
        bound = max(settled, *(s.piece.base + s.bound for s in searches))
        if total <= bound:
            break
        if worst.finished or worst.attempts == attempts or time.perf_counter() - started >= seconds:
            proven = False
            break
        worst.advance(bound - worst.piece.base)
    offsets = np.array(offsets)
    for search in searches:
        offsets[search.piece.members] = search.piece.base + search.offsets
    if not proven:
        # Best fit over the whole problem is not best fit piece by piece, and may be luckier.
        whole = smartpool(problem)
        if whole.footprint < int((offsets + problem.sizes).max()):
            offsets = np.array(whole.offsets, dtype=np.int64)
    elapsed = time.perf_counter() - started
    return solution_from_offsets(problem, offsets, planner=name, seconds=elapsed, proven_optimal=proven)


def _suits(name: str, piece: Piece) -> bool:
    if name == "exact":
        return len(piece) <= MOST_BUFFERS and int(piece.sizes.sum()) <= MOST_BYTES
    return name != "hill-climb" or COMPILED or len(piece) <= _MOST_WITHOUT_NUMBA


def _engine(name: str, piece: Piece, placer: Placer, keys: OrderKeys, seed: int) -> Engine:
    if name == "exact":
        return Exact(piece, keys, seed)
    if name == "skyline":
        return Skyline(placer, keys, seed)
    if name == "hill-climb":
        return RepairedOrder(piece, placer, keys, seed)
    return RandomKeys(placer, keys, seed)
