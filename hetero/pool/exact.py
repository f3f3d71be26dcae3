"""The exact search as an engine and as a planner.

Owns the choice of capacities and preference orders for the canonical search of `hetero.pool._exact_kernel`,
and what its outcomes prove. Invariant: a bound is reported as proven only when a search ran out of
branches. Memory grows with the square of the number of buffers: `MOST_BUFFERS` is the limit.
"""

import time

import numpy as np

from hetero.pool.engines import Attempt, size_step
from hetero.pool.orders import OrderKeys
from hetero.pool.problem import IntArray
from hetero.pool.reduction import Piece

__all__ = ["MOST_BUFFERS", "Exact"]

MOST_BUFFERS = 4000
_SECONDS_AN_ATTEMPT = 0.25


class Exact:
    """Canonical search under preference orders in turn, each with a node budget that grows.

    First at the goal. Once that is refuted, at capacities between the proven bound and the limit: the
    lowest, the middle and the highest in turn, whichever can be decided first.
    """

    name = "exact"

    def __init__(self, piece: Piece, keys: OrderKeys, seed: int) -> None:
        self.finished = False
        self._piece = piece
        self._keys = keys
        self._rng = np.random.default_rng(seed)
        self._orders = [keys.lexical(names) for names in ("WAT", "TWA", "TAW")]
        self._step = size_step(piece.sizes)
        self._proven = piece.bound
        self._tries = 0
        self._nodes = max(2 * len(piece), 2000)
        self._refuted = False

    def attempt(self, goal: int, limit: int) -> Attempt:
        goal = max(goal, self._proven)
        if limit < goal:
            self.finished = True
            return Attempt(proven_bound=self._proven)
        order = self._next_order()
        capacity = self._capacity(goal, limit)
        # Imported late: it imports Numba, see hetero.pool._jit.
        from hetero.pool import _exact_kernel

        piece = self._piece
        offsets = np.zeros(len(piece), dtype=np.int64)
        started = time.perf_counter()
        outcome, tried = _exact_kernel.search(
            piece.begins[order],
            piece.ends[order],
            piece.sizes[order],
            piece.horizon,
            capacity,
            self._nodes,
            offsets,
        )
        self._adapt(tried, time.perf_counter() - started)
        if outcome == _exact_kernel.EXHAUSTED:
            self._refuted = True
            self._proven = (capacity // self._step + 1) * self._step
            self.finished = self._proven > limit
        if outcome != _exact_kernel.FOUND:
            return Attempt(proven_bound=self._proven)
        placed = np.empty_like(offsets)
        placed[order] = offsets
        return Attempt(offsets=placed, proven_bound=self._proven)

    def _capacity(self, goal: int, limit: int) -> int:
        """Goal first; between goal and limit later, when the goal resists and every order has been tried on
        it.
        """
        turn = self._tries // 4 % 3 if self._tries > 40 or self._refuted else 0
        return (goal, (goal + limit) // 2, limit)[turn]

    def _next_order(self) -> IntArray:
        self._tries += 1
        if self._tries <= len(self._orders):
            return self._orders[self._tries - 1]
        if self._tries % 8 == 0:
            return self._orders[self._tries // 8 % len(self._orders)]
        return self._keys.random(self._rng, (1.0, 1.0, 4.0), 0.3)

    def _adapt(self, tried: int, seconds: float) -> None:
        """Node budget: what fits into an attempt, reached by and by; many short searches beat few long
        ones.
        """
        if self._tries == 1:
            # The first search may include compiling.
            return
        rate = tried / max(seconds, 1e-6)
        most = max(1000, int(rate * _SECONDS_AN_ATTEMPT), 2 * len(self._piece))
        if self._tries % 8 == 0:
            self._nodes = int(self._nodes * 1.5)
        self._nodes = min(self._nodes, most * (1 + self._tries // 50))
