"""Searches that improve the placement of one piece, a bounded attempt at a time.

Owns the `Engine` protocol and its heuristic engines: random keys by hole and by skyline, and repair
(hill-climbing on the bottleneck). The exact engine is in `hetero.pool.exact`. Invariant: what an attempt
returns is valid and within the limit that it was given. No engine knows of the others or of the clock;
`hetero.pool.portfolio` shares out the time.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from hetero.pool.orders import OrderKeys
from hetero.pool.placement import Placer, Repair
from hetero.pool.problem import IntArray
from hetero.pool.reduction import Piece

__all__ = ["Attempt", "Engine", "RandomKeys", "RepairedOrder", "Skyline", "size_step"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Attempt:
    """What an attempt found: ``offsets`` (bytes, above the piece's base) or None, and a lower bound if it
    proved one.
    """

    offsets: IntArray | None = None
    proven_bound: int = 0


class Engine(Protocol):
    """A search for placements of one piece. ``finished``: further attempts can find nothing more."""

    name: str
    finished: bool

    def attempt(self, goal: int, limit: int) -> Attempt:
        """Look for a footprint of at most ``limit`` bytes, ``goal`` being as good as any; about a second at
        most.
        """


def size_step(sizes: IntArray) -> int:
    """Footprints of placements that rest on each other differ by multiples of this many bytes."""
    return max(1, int(np.gcd.reduce(sizes)))


class RandomKeys:
    """Random orders, placed into the smallest or the first hole in turn.

    Key: log size + a log duration + noise, a about 0.35 where long lives nest; first the classic greedy
    orders.
    """

    name = "random-keys"
    finished = False

    def __init__(self, placer: Placer, keys: OrderKeys, seed: int) -> None:
        self._placer = placer
        self._keys = keys
        self._rng = np.random.default_rng(seed)
        fixed = [(1.0, 0.0), (1.0, 0.35), (1.0, 1.0), (0.35, 1.0), (0.0, 1.0)]
        self._fixed = [(keys.mixed(*weights), best) for weights in fixed for best in (True, False)][::-1]

    def attempt(self, goal: int, limit: int) -> Attempt:
        if self._fixed:
            order, best_fit = self._fixed.pop()
        else:
            weight = self._rng.uniform(0.2, 0.5)
            blur = self._rng.normal(size=len(self._keys.size)) * (0.3 * self._rng.random())
            order = self._keys.descending(self._keys.size + weight * self._keys.duration + blur)
            best_fit = bool(self._rng.integers(2))
        found = self._placer.place(order, best_fit=best_fit, limit=limit)
        return Attempt(offsets=None if found is None else found[0])


class Skyline:
    """Lowest offset first, ties by random mixtures of size, duration and load."""

    name = "skyline"
    finished = False

    def __init__(self, placer: Placer, keys: OrderKeys, seed: int) -> None:
        self._placer = placer
        self._keys = keys
        self._rng = np.random.default_rng(seed)
        # Size alone, area, duration, load then size: the tie-breaks that won most often.
        fixed = [(1.0, 0.0, 0.0), (1.0, 1.0, 0.0), (0.0, 1.0, 0.0), (1.0, 0.0, 100.0), (0.2, 0.9, 2.0)]
        self._fixed = [keys.mixed(*weights) for weights in fixed][::-1]

    def attempt(self, goal: int, limit: int) -> Attempt:
        order = self._fixed.pop() if self._fixed else self._keys.random(self._rng, (1.0, 1.0, 4.0), 0.3)
        found = self._placer.skyline(order, limit=limit)
        return Attempt(offsets=None if found is None else found[0])


class RepairedOrder:
    """Orders repaired under a falling limit: whoever would end above it moves forward.

    The limit aims below what is asked, between it and the goal, as long as that succeeds; it comes back
    when repairs stop helping, and a new order is drawn when even the plain limit is out of reach.
    """

    name = "hill-climb"
    finished = False

    def __init__(self, piece: Piece, placer: Placer, keys: OrderKeys, seed: int) -> None:
        self._placer = placer
        self._keys = keys
        self._rng = np.random.default_rng(seed)
        self._step = size_step(piece.sizes)
        self._patience = max(2000, len(piece) // 4)
        # Repairs of large problems cost more: attempts stay well under a second.
        self._repairs = max(4, 400_000 // len(piece))
        self._starts = 0
        self._restart()

    def _restart(self) -> None:
        weight = 0.35 if self._starts < 2 else self._rng.uniform(0.0, 0.6)
        blur = 0.0 if self._starts < 2 else 0.2 * self._rng.random()
        key = (
            self._keys.size
            + weight * self._keys.duration
            + blur * self._rng.normal(size=len(self._keys.size))
        )
        self._repair = Repair(self._placer, self._keys.descending(key), best_fit=self._starts % 2 == 0)
        self._starts += 1
        self._ambition = 0.0
        self._spent = 0

    def attempt(self, goal: int, limit: int) -> Attempt:
        aim = max(goal, limit - int(self._ambition * (limit - goal)) // self._step * self._step)
        found = self._repair.run(aim, self._rng.random(self._repairs))
        if found is not None:
            self._spent = 0
            self._ambition = 0.3
            return Attempt(offsets=found[0])
        self._spent += self._repairs
        if self._spent > self._patience:
            self._spent = 0
            if self._ambition > 0.02:
                self._ambition /= 3
            else:
                self._restart()
        return Attempt()
