"""Placing the allocations of an endlessly repeated iteration.

Owns the cyclic problem: allocation ``i`` of ``n`` begins at time ``i`` of every iteration and lives for a
number of allocations, over the end of the iteration into the next one if need be. Invariant: two buffers
that are alive at the same time in the endless repetition never overlap. It knows no tensors, and which
allocation of a later iteration is which is not its business.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hetero.errors import ConfigError, PlanError
from hetero.pool.placement import hole
from hetero.pool.planner import Planner
from hetero.pool.problem import Buffer, IntArray, Problem
from hetero.units import round_up

__all__ = ["CyclePlan", "CyclicLife", "cyclic_load", "plan_cycle"]


_FAR = 2**62
_PLACED = 10_000  # lives placed on the ring in all, twice: what there is time for
# Of random orders: by log size + a log length + noise.
_MOST_OF_LENGTH, _NOISE = 0.8, (0.05, 0.2, 0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class CyclicLife:
    """One allocation of the iteration: its size, and for how many allocations it lives (its own included).

    ``length`` is None for what is not to be placed. Raises `PlanError` for a negative size or a length below
    1.
    """

    nbytes: int
    length: int | None

    def __post_init__(self) -> None:
        if self.nbytes < 0:
            raise PlanError(f"an allocation of {self.nbytes} bytes: sizes start at 0")
        if self.length is not None and self.length < 1:
            raise PlanError(f"a life of {self.length} allocations: it includes its own, so the least is 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class CyclePlan:
    """An offset in bytes for each allocation of the iteration, or None for those left to the allocator.

    ``nbytes`` is the arena's size, ``load_nbytes`` the most bytes of planned allocations alive at once.
    """

    offsets: tuple[int | None, ...]
    nbytes: int
    load_nbytes: int
    proven_optimal: bool


def plan_cycle(lives: Sequence[CyclicLife], planner: Planner, *, granularity: int = 1) -> CyclePlan:
    """Place one iteration's allocations so that it can be repeated; sizes are rounded to ``granularity``.

    The cycle is cut where it holds least, for a planner that knows no cycles: what lives across the cut keeps its
    place throughout. SmartPool's rule, applied to the ring as it is, competes with that. What lives longer than an
    iteration would meet its own successor: it gets no place. Raises `ConfigError` for a granularity below 1.
    """
    if granularity < 1:
        raise ConfigError(f"granularity={granularity}: sizes are rounded to a multiple of at least 1 byte")
    period = len(lives)
    sizes = [round_up(life.nbytes, granularity) for life in lives]
    placeable = [i for i, life in enumerate(lives) if sizes[i] and (life.length or period + 1) <= period]
    load = cyclic_load(lives, granularity=granularity)
    cut = int(load.argmin()) if period else 0
    problem = Problem(
        buffers=tuple(_cut_open(i, lives[i].length or 0, sizes[i], cut, period) for i in placeable),
        name="iteration",
    )
    solution = planner(problem)
    chosen, nbytes = solution.offsets, solution.footprint
    most = int(load.max(initial=0))
    if nbytes > most:
        arcs = [_Arc((i - cut) % period, lives[i].length or 0, sizes[i]) for i in placeable]
        on_ring = _on_the_ring(arcs, period, most)
        reach = max((arc.nbytes + offset for arc, offset in zip(arcs, on_ring, strict=True)), default=0)
        if reach < nbytes:
            chosen, nbytes = on_ring, reach
    offsets: list[int | None] = [None] * period
    for i, offset in zip(placeable, chosen, strict=True):
        offsets[i] = offset
    # The planner's proof is one for the cut problem, whose load is more where something lives across the cut.
    return CyclePlan(offsets=tuple(offsets), nbytes=nbytes, load_nbytes=most, proven_optimal=nbytes == most)


def cyclic_load(lives: Sequence[CyclicLife], *, granularity: int = 1) -> IntArray:
    """Bytes alive at each time of the repeated iteration, of allocations that live at most one iteration."""
    period = len(lives)
    change = np.zeros(2 * period + 1, dtype=np.int64)
    for begin, life in enumerate(lives):
        if life.length is not None and life.length <= period:
            nbytes = round_up(life.nbytes, granularity)
            change[begin] += nbytes
            change[begin + life.length] -= nbytes
    unrolled = np.cumsum(change[:-1])
    return unrolled[:period] + unrolled[period:]


class _Arc(NamedTuple):
    """A life on the ring, from ``begin`` in the iteration that starts at the cut, for ``length`` allocations."""

    begin: int
    length: int
    nbytes: int


def _on_the_ring(arcs: Sequence[_Arc], period: int, load: int) -> tuple[int, ...]:
    """Offsets by SmartPool's rule in several orders, the best of them; the search ends at ``load``, which none is
    below.
    """
    begins = np.array([arc.begin for arc in arcs], dtype=np.int64)
    lengths = np.array([arc.length for arc in arcs], dtype=np.int64)
    sizes = np.array([arc.nbytes for arc in arcs], dtype=np.int64)
    best, least = sizes, _FAR
    for order in _orders(begins + lengths > period, lengths, sizes):
        offsets = _placed(begins, lengths, sizes, period, order)
        reach = int((offsets + sizes).max(initial=0))
        if reach < least:
            best, least = offsets, reach
        if least <= load:
            break
    return tuple(best.tolist())


def _orders(across: npt.NDArray[np.bool_], lengths: IntArray, sizes: IntArray) -> Iterator[IntArray]:
    """By size, by area, then by random mixtures of both, descending; each with what lives ``across`` the cut, and so
    all at once, first, and without.
    """
    size, length = np.log(sizes), np.log(lengths)
    random = np.random.default_rng(0)
    for attempt in range(max(_PLACED // max(len(sizes), 1), 2)):
        key = size + attempt * length
        if attempt > 1:
            key = size + random.uniform(0, _MOST_OF_LENGTH) * length + _noise(random, len(sizes))
        for first in (across, np.zeros_like(across)):
            yield np.lexsort([-key, ~first])


def _noise(random: np.random.Generator, count: int) -> npt.NDArray[np.float64]:
    return np.asarray(random.normal(scale=random.choice(_NOISE), size=count))


def _placed(begins: IntArray, lengths: IntArray, sizes: IntArray, period: int, order: IntArray) -> IntArray:
    """Each in the smallest hole that fits, among those alive at some same time."""
    offsets = np.zeros(len(sizes), dtype=np.int64)
    placed: IntArray = np.zeros(0, dtype=np.int64)  # by ascending offset
    for i in order.tolist():
        # Of two that meet on a ring, one is alive when the other begins.
        later = (begins[placed] - begins[i]) % period < lengths[i]
        earlier = (begins[i] - begins[placed]) % period < lengths[placed]
        near = placed[later | earlier]
        highs = np.concatenate([[0], np.maximum.accumulate(offsets[near] + sizes[near])])
        offsets[i] = hole(offsets[near] - highs[:-1], highs, int(sizes[i]), best_fit=True)
        placed = np.insert(placed, int(np.searchsorted(offsets[placed], offsets[i], side="right")), i)
    return offsets


def _cut_open(index: int, length: int, nbytes: int, cut: int, period: int) -> Buffer:
    """The allocation in the time that starts at ``cut``; all of it, if it lives across the cut."""
    begin = (index - cut) % period
    if begin + length > period:
        return Buffer(id=index, begin=0, end=period, nbytes=nbytes)
    return Buffer(id=index, begin=begin, end=begin + length, nbytes=nbytes)
