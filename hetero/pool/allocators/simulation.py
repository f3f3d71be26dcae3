"""Running an allocator over events, and what that says about it.

Owns the `Allocator` protocol, `simulate`, `Usage` and the analysis of first against later iterations (Lee
et al. 2022, on TensorFlow). Invariant: requested <= provided <= reserved after every event. It knows no
allocator's rules.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from hetero.errors import PlanError
from hetero.pool.allocators.events import AllocationEvent
from hetero.pool.problem import BufferId, IntArray

__all__ = ["Allocator", "IterationAnalysis", "Usage", "analyse_iterations", "simulate"]


class Allocator(Protocol):
    """A simulated allocator."""

    @property
    def requested(self) -> int:
        """Sum of the sizes asked for and not given back, bytes."""

    @property
    def provided(self) -> int:
        """Sum of the blocks handed out for these, bytes."""

    @property
    def reserved(self) -> int:
        """Taken from the device, bytes."""

    def allocate(self, id: BufferId, nbytes: int, *, stream: int = 0) -> None:
        """Serve a request, or raise `BudgetError` and change nothing that the caller sees."""

    def free(self, id: BufferId) -> None:
        """Take back what ``id`` was given; `PlanError` if it holds nothing."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Usage:
    """Bytes after each event, int64 of shape (events,), and the first two's peaks within each iteration, (iterations,).

    ``requested``: sum of the sizes asked for; ``provided``: sum of the chunks or blocks handed out;
    ``reserved``: taken from the device. A peak includes what lives on from the iteration before.
    ``iterations``: their numbers, ascending.
    """

    requested: IntArray
    provided: IntArray
    reserved: IntArray
    iterations: tuple[int, ...]
    requested_peaks: IntArray
    provided_peaks: IntArray

    @property
    def peak_reserved(self) -> int:
        """The most that was ever taken from the device, bytes."""
        return int(self.reserved.max(initial=0))


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationAnalysis:
    """The source's quantities; T requested, C provided, 1 the first iteration, 2 the mean of the later ones.

    ``t1, c1, t2, c2``: peaks over ``reserved_nbytes`` (the most ever reserved). ``waste_first`` and
    ``waste_later``: C / T - 1. ``first_over_later``: C1 / C2 - 1. ``idle_first`` and ``idle_later``: share
    of reserved that no one holds at the peak, 1 - C1 and 1 - C2.
    """

    reserved_nbytes: int
    t1: float
    c1: float
    t2: float
    c2: float
    waste_first: float
    waste_later: float
    first_over_later: float
    idle_first: float
    idle_later: float


def simulate(events: Iterable[AllocationEvent], allocator: Allocator) -> Usage:
    """Feed ``events`` to ``allocator``, noting requested, provided and reserved bytes after each.

    Raises `PlanError` for a free without an allocation or events whose iterations go back, `BudgetError`
    out of memory.
    """
    rows: list[tuple[int, int, int]] = []
    iteration_of: list[int] = []
    for number, event in enumerate(events):
        if iteration_of and event.iteration < iteration_of[-1]:
            raise PlanError(
                f"event {number} ({event.action} of {event.id!r}) is of iteration {event.iteration} after "
                f"one of iteration {iteration_of[-1]}; sort events by time"
            )
        if event.action == "alloc":
            allocator.allocate(event.id, event.nbytes, stream=event.stream)
        else:
            allocator.free(event.id)
        rows.append((allocator.requested, allocator.provided, allocator.reserved))
        iteration_of.append(event.iteration)
    return _usage(np.array(rows, dtype=np.int64).reshape(-1, 3).T, np.array(iteration_of, dtype=np.int64))


def analyse_iterations(usage: Usage) -> IterationAnalysis:
    """First against later iterations; raises `PlanError` with fewer than two iterations or nothing
    reserved.
    """
    if len(usage.iterations) < 2:
        raise PlanError(f"{len(usage.iterations)} iteration(s) recorded; comparing needs at least 2")
    reserved = usage.peak_reserved
    t1, c1 = float(usage.requested_peaks[0]), float(usage.provided_peaks[0])
    t2, c2 = float(usage.requested_peaks[1:].mean()), float(usage.provided_peaks[1:].mean())
    if min(t1, t2) <= 0:
        raise PlanError("an iteration requests no memory; there is nothing to compare")
    return IterationAnalysis(
        reserved_nbytes=reserved,
        t1=t1 / reserved,
        c1=c1 / reserved,
        t2=t2 / reserved,
        c2=c2 / reserved,
        waste_first=c1 / t1 - 1,
        waste_later=c2 / t2 - 1,
        first_over_later=c1 / c2 - 1,
        idle_first=1 - c1 / reserved,
        idle_later=1 - c2 / reserved,
    )


def _usage(series: IntArray, iteration_of: IntArray) -> Usage:
    iterations, starts = np.unique(iteration_of, return_index=True)
    held = series[:2]
    peaks = np.zeros((2, len(iterations)), dtype=np.int64)
    if len(iterations):
        peaks = np.maximum.reduceat(held, starts, axis=1)
        peaks[:, 1:] = np.maximum(peaks[:, 1:], held[:, starts[1:] - 1])
    return Usage(
        requested=series[0],
        provided=series[1],
        reserved=series[2],
        iterations=tuple(iterations.tolist()),
        requested_peaks=peaks[0],
        provided_peaks=peaks[1],
    )
