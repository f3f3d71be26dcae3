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
# Node budgets in units of the current one: most orders succeed early or not at all.
_LENGTHS = (1, 1, 2, 1, 1, 2, 6)
_TRIES_A_GROWTH, _GROWTH = 20, 1.2
# Share of earlier blame that the next order still sees.
_BLAME_KEPT = 0.8


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
        self._nodes = max(2 * len(piece), min(10 * len(piece), 20_000), 1000)
        self._blame = np.zeros(len(piece))
        self._refuted = False
        self._seconds = 0.0
        self._tried = 0

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
        blame = np.zeros(len(piece), dtype=np.int64)
        started = time.perf_counter()
        outcome, tried = _exact_kernel.search(
            piece.begins[order],
            piece.ends[order],
            piece.sizes[order],
            piece.horizon,
            capacity,
            self._budget(),
            offsets,
            blame,
        )
        if self._tries > 1:
            # The first search may include compiling.
            self._seconds += time.perf_counter() - started
            self._tried += tried
        self._blame *= _BLAME_KEPT
        self._blame[order] += blame
        if outcome == _exact_kernel.EXHAUSTED:
            self._refuted = True
            self._proven = (capacity // self._step + 1) * self._step
            self.finished = self._proven > limit
        if outcome != _exact_kernel.FOUND:
            return Attempt(proven_bound=self._proven)
        placed = np.empty_like(offsets)
        placed[order] = offsets
        return Attempt(offsets=placed, proven_bound=self._proven)

    def _budget(self) -> int:
        """Branches for the next search: within half a second, or a twentieth of the time spent so far."""
        wanted = self._nodes * _LENGTHS[self._tries % len(_LENGTHS)]
        if self._tried == 0:
            return wanted
        rate = self._tried / max(self._seconds, 1e-6)
        return max(2 * len(self._piece), min(wanted, int(rate * max(0.5, self._seconds / 20))))

    def _capacity(self, goal: int, limit: int) -> int:
        """Nearly always the goal; once that is refuted, the ends and the middle of what is open."""
        if self._refuted:
            return (goal, (goal + limit) // 2, limit)[self._tries // 4 % 3]
        return (goal + limit) // 2 if self._tries > 100 and self._tries % 8 == 0 else goal

    def _next_order(self) -> IntArray:
        """Classic orders first; then random mixtures, most of them raising buffers that searches failed
        on.
        """
        self._tries += 1
        if self._tries <= len(self._orders):
            return self._orders[self._tries - 1]
        if self._tries % _TRIES_A_GROWTH == 0:
            self._nodes = int(self._nodes * _GROWTH)
        extra = None
        if self._rng.random() < 0.5 and self._blame.any():
            blame = self._keys.shared_equally(self._blame)
            extra = 1.5 * self._rng.random() * np.log1p(blame / blame.mean())
        return self._keys.random(self._rng, (1.0, 1.0, 4.0), 0.3, extra)
