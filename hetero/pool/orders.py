"""Orders in which to place the buffers of a piece: the classic ones, and random mixtures of the same
measures.

Owns `OrderKeys`. Invariant: equal buffers (same life and size) stay next to each other in every order,
lower number first, which the exact search relies on. It places nothing.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hetero.pool.problem import IntArray
from hetero.pool.reduction import Piece

__all__ = ["OrderKeys"]


class OrderKeys:
    """Logarithms of each buffer's size, duration (in cliques), span (in the problem's own time) and worst load
    (peak live bytes during its life).
    """

    def __init__(self, piece: Piece) -> None:
        change = np.zeros(piece.horizon + 1, dtype=np.int64)
        np.add.at(change, piece.begins, piece.sizes)
        np.subtract.at(change, piece.ends, piece.sizes)
        load = np.cumsum(change)
        # reduceat over interleaved bounds: even places hold the maximum of [begin, end).
        bounds = np.stack([piece.begins, piece.ends], axis=1).ravel()
        worst = np.maximum.reduceat(load, bounds)[::2]
        self.size = np.log(piece.sizes.astype(np.float64))
        self.duration = np.log((piece.ends - piece.begins).astype(np.float64))
        self.span = np.log(piece.spans.astype(np.float64))
        self.load = np.log(worst.astype(np.float64))
        lives = np.stack([piece.begins, piece.ends, piece.sizes], axis=1)
        _, kind = np.unique(lives, axis=0, return_inverse=True)
        self._kind = kind.ravel().astype(np.int64)
        self._kinds = int(self._kind.max()) + 1

    def descending(self, key: npt.NDArray[np.float64]) -> IntArray:
        """Order by ``key`` descending, ties by larger load, then size, then duration."""
        return np.lexsort([self._kind, -self.duration, -self.size, -self.load, -key])

    def lexical(self, names: str) -> IntArray:
        """Order by several measures descending, first letter first: A area (size x span), W span."""
        measures = {"A": self.size + self.span, "W": self.span}
        return np.lexsort([self._kind, *(-measures[name] for name in reversed(names))])

    def grouped(self) -> IntArray:
        """Any order with equal buffers next to each other, lower number first."""
        return np.argsort(self._kind, kind="stable")

    def mixed(self, size: float, duration: float, load: float = 0.0) -> IntArray:
        """Order by ``size * log size + duration * log duration + load * log load``, descending."""
        return self.descending(size * self.size + duration * self.duration + load * self.load)

    def random(self, rng: np.random.Generator, scales: Sequence[float], noise: float) -> IntArray:
        """A random mixture with weights up to ``scales`` (size, duration, load), some zero, plus noise."""
        weights = rng.random(3) * np.asarray(scales) * (rng.random(3) < 0.7)
        key = weights[0] * self.size + weights[1] * self.duration + weights[2] * self.load
        return self.descending(key + self.noise(rng, noise * rng.random()))

    def noise(self, rng: np.random.Generator, scale: float) -> npt.NDArray[np.float64]:
        """Normal noise, one value a buffer, the same for equal buffers."""
        return np.asarray(rng.normal(size=self._kinds)[self._kind] * scale)

    def shared_equally(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """``values`` (one a buffer) summed over equal buffers."""
        return np.bincount(self._kind, weights=values)[self._kind].astype(np.float64)
