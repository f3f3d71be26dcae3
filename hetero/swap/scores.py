"""The four priority scores of AutoSwap (Zhang et al. 2019, section IV-B), as the paper has them.

Owns what each score means for the gaps of a step. Larger is swapped first. It selects nothing. `hetero.eviction.scores`
has the same for what training plans, where copies may be clean, worthless or gone; on a step that has none of that, a
property test holds both to the same numbers. These stay as the paper wrote them, to be compared with.
"""

from collections.abc import Sequence

import numpy as np

from hetero.eviction.scores import SCORES, Score, combine
from hetero.simulate import Machine
from hetero.swap.model import Floats, Gap, Ints, Step

__all__ = ["SCORES", "Score", "combine", "scores"]


def scores(step: Step, gaps: Sequence[Gap], machine: Machine) -> dict[Score, Floats]:
    """Every score of every gap: float64, shape (gaps,) each.

    ``doa``: seconds between the two uses, less those of both transfers. ``aoa``: DOA x bytes; where DOA is
    negative, DOA / bytes. ``wdoa``: byte-seconds under the load curve between the uses. ``swdoa``: WDOA under the load
    that the gaps chosen before leave, the largest chosen first.
    """
    nbytes = np.array([gap.nbytes for gap in gaps], dtype=np.float64)
    transfer = np.array([machine.d2h.seconds(g.nbytes) + machine.h2d.seconds(g.nbytes) for g in gaps])
    doa = np.array([step.begin_of(gap.before) - step.end_of(gap.after) for gap in gaps]) - transfer
    aoa = np.where(doa >= 0.0, doa * nbytes, doa / np.maximum(nbytes, 1.0))
    return {
        "doa": doa,
        "aoa": aoa,
        "wdoa": _areas(step, gaps, step.load),
        "swdoa": _submodular(step, gaps),
    }


def _areas(step: Step, gaps: Sequence[Gap], load: Ints) -> Floats:
    area = np.concatenate([[0.0], np.cumsum(load * np.diff(step.starts))])
    return np.array([sum(area[b] - area[a] for a, b in gap.spans(step.span)) for gap in gaps])


def _submodular(step: Step, gaps: Sequence[Gap]) -> Floats:
    """Each gap's area at the time it is chosen; the choices' values never rise."""
    load = step.load.copy()
    values = np.zeros(len(gaps))
    left = list(range(len(gaps)))
    spans = [gap.spans(step.span) for gap in gaps]
    durations = np.diff(step.starts)
    while left:
        area = np.concatenate([[0.0], np.cumsum(load * durations)])
        current = [sum(float(area[b] - area[a]) for a, b in spans[g]) for g in left]
        place = int(np.argmax(current))
        chosen = left.pop(place)
        values[chosen] = current[place]
        for low, high in spans[chosen]:
            load[low:high] -= gaps[chosen].nbytes
    return values
