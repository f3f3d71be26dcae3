"""Whether everything fits, by what was measured.

Owns the arithmetic: what an iteration needs beside the model's data when nothing of it ever leaves the device. Pure;
who acts on it is `hetero.stm.settled`.
"""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from hetero.msc import Phase, SegmentKey
from hetero.stm.plans import CyclePlan

__all__ = ["Growth", "Kind", "kind_of", "read_growth"]

Kind = tuple[bool, Hashable]
"""Of a forward: whether gradients are recorded, and the signature of its inputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """``peak``: bytes of the device beside model data, at most, over all measured kinds of iterations. ``by_kind``: how
    many more than at the beginning of a forward of that kind are in use at most until its iteration is over."""

    peak: int
    by_kind: dict[Kind, int]


def kind_of(key: SegmentKey) -> Kind:
    """Of a forward's segment: its key without the number of forwards that wait for their backward."""
    signature = key.signature
    return key.trains, signature[0] if isinstance(signature, tuple) else signature


def read_growth(plans: Iterable[CyclePlan], *, budget: int, step_bytes: int) -> Growth:
    """``step_bytes``: what the optimizer's own step allocates for a while. Saved tensors count as long as they live."""
    peak, by_kind = 0, dict[Kind, int]()
    for plan in plans:
        needs = _needs(plan, budget, step_bytes)
        peak = max(peak, *needs)
        for place, key in enumerate(plan.keys):
            if key.phase is Phase.FORWARD:
                begin = plan.bounds[place]
                growth = max(needs[begin:]) - plan.non_model[begin]
                by_kind[kind_of(key)] = max(by_kind.get(kind_of(key), 0), growth)
    return Growth(peak=peak, by_kind=by_kind)


def _needs(plan: CyclePlan, budget: int, step_bytes: int) -> list[int]:
    """Of each moment: its peak of everything but parameters, gradients, states and buffers."""
    alive: dict[int, None] = {}
    needs = []
    steps = [key.phase is Phase.STEP for key in plan.keys]
    place = 0
    for position, moment in enumerate(plan.trace.moments):
        while position >= plan.bounds[place + 1]:
            place += 1
        for tensor in moment.invalidates:
            alive.pop(tensor, None)
        alive.update(dict.fromkeys(moment.produces))
        beside = budget - plan.margin - plan.limits[position]
        saved = sum(plan.trace.sizes[tensor] for tensor in alive)
        needs.append(beside + saved + (step_bytes if steps[place] else 0))
    return needs
