"""Cost-aware Belady: choose the intervals to keep by their bytes, sizes and write backs.

Owns the rounding of the relaxation and the choice between it and demand eviction. Every selection it returns
fits.
"""

from dataclasses import replace

import numpy as np

from hetero.eviction.exchange import exchange
from hetero.eviction.intervals import Bools, Floats, Intervals, Ints
from hetero.eviction.policies import FarthestNextUse
from hetero.eviction.relaxation import Relaxation, bound_from_prices, relax
from hetero.eviction.sweep import fill, repair, sweep

__all__ = ["farthest_next_use", "fewest_bytes"]

_PREFER_SHORT = 1e-4  # decides between equal savings; cannot cost more than that share of the bytes
_AFFORDABLE = 500_000  # exchanges x intervals looked at
_NEAR = 1.001  # of the bound: not worth improving
_WHOLE = 1.0 - 1e-6  # the solver's tolerance on a fraction of one interval


def farthest_next_use(problem: Intervals, room: Ints) -> Bools:
    """Belady's choice, and whatever else then fits, the shortest wait first."""
    keep = sweep(problem, room, FarthestNextUse())
    length = problem.end - problem.begin
    missing = _missing(problem, keep)
    order = missing[np.lexsort((missing, -problem.nbytes[missing], length[missing]))]
    return fill(problem, room, keep, order)


def fewest_bytes(problem: Intervals, room: Ints) -> Bools:
    """The better of the rounded relaxation and Belady's choice, both improved by exchanges."""
    relaxation = relax(problem, room, prefer_short=_PREFER_SHORT)
    choices = [_rounded(problem, room, relaxation), farthest_next_use(problem, room)]
    trials = _AFFORDABLE // max(len(problem.use), 1)
    bound = bound_from_prices(replace(problem, room=room), relaxation.price)
    if min(map(problem.moved_bytes, choices)) > _NEAR * bound:
        choices = [exchange(problem, room, keep, trials=trials) for keep in choices]
    return min(choices, key=problem.moved_bytes)


def _rounded(problem: Intervals, room: Ints, relaxation: Relaxation) -> Bools:
    """What the relaxation keeps whole, then by reduced saving: what it would have kept next comes first."""
    keep = relaxation.kept >= _WHOLE
    keep &= problem.saves
    keep = repair(problem, room, keep)
    missing = _missing(problem, keep)
    gain = _reduced_saving(problem, relaxation)[missing]
    order = missing[np.lexsort((missing, -problem.nbytes[missing], -relaxation.kept[missing], -gain))]
    return fill(problem, room, keep, order)


def _reduced_saving(problem: Intervals, relaxation: Relaxation) -> Floats:
    """Bytes saved per byte held, less the price of the memory: near zero for what the relaxation splits."""
    rent = problem.sums(relaxation.price)
    saving: Floats = np.round(problem.reused + (problem.group >= 0) - rent, 6)
    return saving


def _missing(problem: Intervals, keep: Bools) -> Ints:
    worth = ~keep & problem.saves
    return np.flatnonzero(worth)
