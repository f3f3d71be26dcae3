"""Which gaps may be swapped: the paper's two filters (AutoSwap, section IV-A), and all gaps, for better planners.

Owns the gaps of a step. A gap without an operator in between is none.
"""

from itertools import pairwise

from hetero.swap.model import Gap, Step, Variable

__all__ = ["THRESHOLD", "all_gaps", "candidates"]

THRESHOLD = 1_000_000
"""Smaller variables are not worth a transfer's latency: 1 MB in the paper."""


def candidates(step: Step, *, threshold: int = THRESHOLD) -> tuple[Gap, ...]:
    """The gaps of variables of at least ``threshold`` bytes during which the load is at its peak."""
    peak = step.peak_at
    return tuple(gap for gap in all_gaps(step, threshold=threshold) if gap.covers(peak, step.span))


def all_gaps(step: Step, *, threshold: int = THRESHOLD) -> tuple[Gap, ...]:
    """Every gap of variables of at least ``threshold`` bytes, by variable, then by time."""
    return tuple(
        Gap(variable=index, nbytes=variable.nbytes, after=after, before=before)
        for index, variable in enumerate(step.variables)
        if variable.nbytes >= threshold
        for after, before in pairwise(_uses(variable, step.span))
        if before > after + 1
    )


def _uses(variable: Variable, span: int) -> list[int]:
    uses = list(variable.accesses)
    if variable.persistent and uses:
        uses.append(uses[0] + span)
    elif not variable.persistent and variable.begin not in uses[:1]:
        uses.insert(0, variable.begin)
    return uses
