"""The exact search as an engine.

Owns the choice of capacities and preference orders for the canonical search of `hetero.pool._exact_kernel`,
and what its outcomes prove. Invariant: a bound is reported as proven only when a search ran out of
branches. Memory grows with the square of the number of buffers, hence `MOST_BUFFERS`.
"""

import time
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from hetero.pool.engines import Attempt, size_step
from hetero.pool.orders import OrderKeys
from hetero.pool.problem import IntArray
from hetero.pool.reduction import Piece

__all__ = ["MOST_BUFFERS", "MOST_BYTES", "Exact"]

MOST_BUFFERS = 4000
# The kernel sorts offsets and ranks as one integer of 63 bits.
MOST_BYTES = 2**49
# Node budgets of random orders, in units of the current one: most orders succeed early or not at all.
_LENGTHS = (1, 1, 2, 1, 1, 2, 6)
_TRIES_A_GROWTH, _GROWTH = 20, 1.2
# A classic order is tried again, with twice the branches, when that is at most this share of all so far.
_CLASSIC_SHARE = 0.25
# Share of earlier blame that the next order still sees.
_BLAME_KEPT = 0.8


@dataclass(slots=True, eq=False)
class _Order:
    """Buffers by number, and the kernel's preference among them; ``nodes``: branches it may try."""

    members: IntArray
    bonus: npt.NDArray[np.float64]
    load_weight: float
    nodes: int


class Exact:
    """Canonical search under preference orders in turn, each with a node budget that grows.

    MiniMalloc's three orders first, and again when the others have had their share; in between random
    mixtures, half of them raising buffers that searches failed on. Every third attempt is content with more bytes
    than the goal: how many more follows from how such attempts went.
    """

    name = "exact"

    def __init__(self, piece: Piece, keys: OrderKeys, seed: int) -> None:
        self.finished = False
        self._piece = piece
        self._keys = keys
        self._rng = np.random.default_rng(seed)
        self._nodes = max(2 * len(piece), min(10 * len(piece), 20_000), 1000)
        # Load before span before area, span before area, load before area before span.
        self._classics = [
            _Order(keys.lexical(names), np.zeros(len(piece)), load_weight, self._nodes // 2)
            for names, load_weight in (("WA", 1.0), ("WA", 0.0), ("AW", 1.0))
        ]
        self._grouped = keys.grouped()
        self._step = size_step(piece.sizes)
        self._proven = piece.bound
        self._tries = 0
        self._blame = np.zeros(len(piece))
        self._refuted = False
        self._share = 0.25
        self._seconds = 0.0
        self._timed = 0
        self._tried = 0

    def attempt(self, goal: int, limit: int) -> Attempt:
        goal = max(goal, self._proven)
        if limit < goal:
            self.finished = True
            return Attempt(proven_bound=self._proven)
        self._tries += 1
        at_goal = self._refuted or self._tries % 3 != 0
        order = self._next_order() if at_goal else self._random_order(classic=0.5)
        capacity = self._capacity(goal, limit, at_goal=at_goal)
        # Imported late: it imports Numba, see hetero.jit.
        from hetero.pool import _exact_kernel, _exact_parts

        piece, members = self._piece, order.members
        offsets = np.zeros(len(piece), dtype=np.int64)
        blame = np.zeros(len(piece), dtype=np.int64)
        started = time.perf_counter()
        outcome, tried = _exact_kernel.search(
            _exact_parts.Lives(piece.begins[members], piece.ends[members], piece.sizes[members]),
            piece.horizon,
            capacity,
            _exact_parts.Preference(order.bonus[members], order.load_weight),
            order.nodes,
            offsets,
            blame,
        )
        self._tried += tried
        if self._tries > 1:
            # The first search may include compiling.
            self._seconds += time.perf_counter() - started
            self._timed += tried
        self._blame *= _BLAME_KEPT
        self._blame[members] += blame
        if outcome == _exact_kernel.EXHAUSTED:
            self._refuted = True
            self._proven = (capacity // self._step + 1) * self._step
            self.finished = self._proven > limit
        if not at_goal:
            found = outcome == _exact_kernel.FOUND
            self._share = max(0.02, self._share / 2) if found else min(0.5, 1.2 * self._share)
        if outcome != _exact_kernel.FOUND:
            return Attempt(proven_bound=self._proven)
        placed = np.empty_like(offsets)
        placed[members] = offsets
        return Attempt(offsets=placed, proven_bound=self._proven)

    def _most_nodes(self) -> int:
        """Branches that take half a second, or a twentieth of the time spent so far."""
        if self._timed == 0:
            return 8 * self._nodes
        rate = self._timed / max(self._seconds, 1e-6)
        return max(2 * len(self._piece), int(rate * max(0.5, self._seconds / 20)))

    def _capacity(self, goal: int, limit: int, *, at_goal: bool) -> int:
        """The goal, or a share of the way up to the limit, so that the search is of use where the goal is out
        of reach; once the goal is refuted, the ends and the middle of what is open.
        """
        if self._refuted:
            return (goal, (goal + limit) // 2, limit)[self._tries // 4 % 3]
        return goal if at_goal else goal + int(self._share * (limit - goal))

    def _next_order(self) -> _Order:
        """The classic order that has had the fewest branches, if it is due; or a random one."""
        classic = min(self._classics, key=lambda order: order.nodes)
        doubled = 2 * classic.nodes
        due = self._tries <= len(self._classics) or doubled <= _CLASSIC_SHARE * self._tried
        if due and doubled <= self._most_nodes():
            classic.nodes = doubled
            return classic
        if self._tries % _TRIES_A_GROWTH == 0:
            self._nodes = int(self._nodes * _GROWTH)
        return self._random_order()

    def _random_order(self, *, classic: float = 0.0) -> _Order:
        """Weights up to 1 for size and duration or span, up to 4 for load, some of them zero, noise, blame.

        ``classic``: how likely it is one of the classic orders instead.
        """
        rng, keys = self._rng, self._keys
        nodes = min(self._nodes * _LENGTHS[self._tries % len(_LENGTHS)], self._most_nodes())
        if rng.random() < classic:
            return replace(self._classics[int(rng.integers(len(self._classics)))], nodes=nodes)
        size, duration, load = rng.random(3) * (1.0, 1.0, 4.0) * (rng.random(3) < 0.7)
        length = keys.span if rng.random() < 0.5 else keys.duration
        bonus = size * keys.size + duration * length + keys.noise(rng, 0.3 * rng.random())
        if rng.random() < 0.5 and self._blame.any():
            blame = keys.shared_equally(self._blame)
            bonus += 1.5 * rng.random() * np.log1p(blame / blame.mean())
        return _Order(self._grouped, bonus, float(load), nodes)
