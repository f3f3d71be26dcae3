"""AutoSwap's four priority scores (Zhang et al. 2019, section IV-B), over the intervals of a trace.

Owns what the scores mean here, their combination, and the choice in the order of a score. What is clean leaves for
nothing and costs only its way back; what is not used again costs only its way out. `hetero.swap.scores` has them for
AutoSwap's own steps, where every variable is copied both ways. Every choice returned fits.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import numpy as np

from hetero.errors import ConfigError
from hetero.eviction.intervals import Bools, Floats, Intervals, Ints, covering
from hetero.eviction.model import Links, Trace
from hetero.eviction.sweep import fill, spans

__all__ = ["SCORES", "Score", "across_peak", "by_score", "choose", "combine"]

Score = Literal["doa", "aoa", "wdoa", "swdoa"]
SCORES: tuple[Score, ...] = get_args(Score)


def by_score(trace: Trace, problem: Intervals, links: Links) -> dict[Score, Floats]:
    """Every score of every interval: float64, shape (uses,) each. Larger leaves first.

    ``doa``: seconds during which it could be away, less its transfers'. ``aoa``: DOA x bytes; where DOA is negative,
    DOA / bytes. ``wdoa``: byte-seconds under the load curve while it could be away. ``swdoa``: WDOA under the load
    that the intervals before it leave, the largest first.
    """
    seconds = np.fromiter((moment.seconds for moment in trace.moments), dtype=np.float64)
    back = np.array([links.h2d_seconds(n) for n in problem.nbytes.tolist()])
    out = np.array([links.d2h_seconds(n) for n in problem.nbytes.tolist()])
    transfers = back * problem.reused + out * (problem.group >= 0)
    doa = problem.sums(seconds) - transfers
    aoa = np.where(doa >= 0.0, doa * problem.nbytes, doa / np.maximum(problem.nbytes, 1))
    load = _load(trace, problem)
    return {
        "doa": doa,
        "aoa": aoa,
        "wdoa": problem.sums(load * seconds),
        "swdoa": _submodular(problem, load, seconds),
    }


def combine(scores: Mapping[Score, Floats], weights: Sequence[float]) -> Floats:
    """The weighted sum of the four standardised scores, in the order of `SCORES` (section IV-C).

    A score that is the same for all counts nothing. Raises `ConfigError` unless there are four weights.
    """
    if len(weights) != len(SCORES):
        raise ConfigError(f"{len(weights)} weights: give one for each of {', '.join(SCORES)}")
    total = np.zeros(len(scores["doa"]))
    for name, weight in zip(SCORES, weights, strict=True):
        values = scores[name]
        spread = float(values.std()) if len(values) else 0.0
        if spread > 0.0:
            total += weight * (values - values.mean()) / spread
    return total


def across_peak(trace: Trace, problem: Intervals) -> Bools:
    """The paper's candidates: what could be away in the period of the highest load."""
    if not problem.periods:
        return np.zeros(0, dtype=bool)
    peak = int(_load(trace, problem).argmax())
    return covering(problem.begin, problem.end, peak, problem.periods)


def choose(problem: Intervals, room: Ints, score: Floats, *, among: Bools | None = None) -> Bools | None:
    """What stays if intervals leave in the order of ``score`` until the rest fits.

    ``among``: only these leave, needed or not, as in the paper; None if that does not suffice. Without it anything may,
    if it frees a period that is too full, and what turns out not to have been needed stays, the lowest score first.
    """
    keep = problem.saves
    excess = problem.load(keep) - room
    order = np.argsort(-score, kind="stable")
    movable = keep & problem.occupies & (problem.nbytes > 0)
    order = order[(movable if among is None else movable & among)[order]]
    left = int((excess > 0).sum())
    dropped: list[int] = []
    for j in order.tolist():
        if not left:
            break
        parts = spans(int(problem.begin[j]), int(problem.end[j]), problem.periods)
        if among is None and not any((excess[a:b] > 0).any() for a, b in parts):
            continue
        for a, b in parts:
            left -= int((excess[a:b] > 0).sum())
            excess[a:b] -= problem.nbytes[j]
            left += int((excess[a:b] > 0).sum())
        keep[j] = False
        dropped.append(j)
    if among is not None:
        return None if left else keep
    return fill(problem, room, keep, np.array(dropped[::-1], dtype=np.int64))


def _load(trace: Trace, problem: Intervals) -> Ints:
    """Bytes per period if nothing leaves, all that takes from the capacity included."""
    capacity = np.fromiter((moment.capacity for moment in trace.moments), dtype=np.int64)
    operands = capacity - problem.room
    everything = problem.load(problem.saves)
    load: Ints = everything + operands + (capacity.max(initial=0) - capacity)
    return load


def _submodular(problem: Intervals, load: Ints, seconds: Floats) -> Floats:
    """Each interval's area when it is the largest left; the values never rise."""
    load = load.copy()
    values = np.zeros(len(problem.use))
    left = np.flatnonzero(problem.occupies & (problem.nbytes > 0))
    while len(left):
        current = problem.sums(load * seconds, left)
        place = int(current.argmax())
        j = int(left[place])
        values[j] = current[place]
        for a, b in spans(int(problem.begin[j]), int(problem.end[j]), problem.periods):
            load[a:b] -= problem.nbytes[j]
        left = np.delete(left, place)
    return values
