"""Selecting gaps in the order of a score until the peak load is at or under the limit (section IV-D).

Owns the load that remains when swaps are in time. It places no transfer in time.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from hetero.swap.model import Floats, Gap, Ints, Step, SwapLimitError

__all__ = ["load_without", "select"]


def load_without(step: Step, gaps: Iterable[Gap]) -> Ints:
    """The load while each operator runs if the variables of ``gaps`` are away in them: int64, shape (span,)."""
    load = step.load.copy()
    for gap in gaps:
        take_away(load, gap, step)
    return load


def take_away(load: Ints, gap: Gap, step: Step) -> None:
    """Change ``load`` to what it is while the variable of ``gap`` is away."""
    for low, high in gap.spans(step.span):
        load[low:high] -= gap.nbytes


def select(step: Step, gaps: Sequence[Gap], score: Floats, limit: int) -> tuple[Gap, ...]:
    """The gaps chosen, best first; of equal scores, the earlier in ``gaps``.

    Raises `SwapLimitError` if all of them together do not bring the load down to ``limit``.
    """
    load = step.load.copy()
    chosen: list[Gap] = []
    for index in np.argsort(-score, kind="stable"):
        if load.max() <= limit:
            return tuple(chosen)
        take_away(load, gaps[index], step)
        chosen.append(gaps[index])
    if load.max() > limit:
        raise SwapLimitError(limit=limit, least=int(load.max()))
    return tuple(chosen)
