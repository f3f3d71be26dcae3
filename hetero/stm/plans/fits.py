"""Whether everything fits, by what was measured.

Owns the arithmetic: what an iteration needs beside the model's data when nothing of it ever leaves the device. Pure;
who acts on it is `hetero.stm.settled`.
"""

import operator
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from hetero.msc import BackwardSignature, Phase, SegmentKey
from hetero.stm.plans.plan import CyclePlan

__all__ = [
    "ForwardKind",
    "KindGrowth",
    "Needs",
    "before_each_backward",
    "kind_of",
    "read_needs",
]

_SPARE = 2  # times as much as was measured has to be there, where that is no bound

ForwardKind = tuple[bool, Hashable]
"""Of a forward: whether gradients are recorded, and the signature of its inputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KindGrowth:
    """How many bytes more than at the beginning of a forward are in use at most until its iteration is over, where
    gradients are there when it begins (``with_gradients``), and where they are made in it."""

    with_gradients: int
    without: int

    def most(self, *, are_there: bool) -> int:
        """By whether gradients are."""
        return self.with_gradients if are_there else self.without


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """``peak``: bytes of the device beside parameters, states and buffers, at most, over all measured kinds of
    iterations. ``by_kind``: of a forward of that kind; ``by_kind_beside``: and where all data of other managers stay on
    the device as well, which then make no room. ``has_others_within``: their iterations are under way at the same
    time."""

    peak: int
    by_kind: dict[ForwardKind, KindGrowth]
    by_kind_beside: dict[ForwardKind, KindGrowth]
    has_others_within: bool

    def of(self, *, beside: bool) -> dict[ForwardKind, KindGrowth]:
        """``by_kind_beside``, if others on the device are settled (``beside``), or come and go within; else
        ``by_kind``."""
        return self.by_kind_beside if beside or self.has_others_within else self.by_kind


def kind_of(key: SegmentKey) -> ForwardKind:
    """Of a forward's segment: its key without the number of forwards that wait for their backward."""
    signature = key.signature
    return key.trains, signature[0] if isinstance(signature, tuple) else signature


def before_each_backward(keys: Iterable[SegmentKey]) -> Iterator[list[ForwardKind]]:
    """Forwards that train, and wait for the same backward that adds to gradients."""
    waiting: list[ForwardKind] = []
    for key in keys:
        if key.phase is Phase.FORWARD and key.trains:
            waiting.append(kind_of(key))
        elif key.phase is Phase.BACKWARD and _returning(key) is None:
            yield waiting
            waiting = []


def _returning(key: SegmentKey) -> BackwardSignature | None:
    """Of a backward's segment that returns gradients, and adds to none."""
    signature = key.signature
    return signature if isinstance(signature, BackwardSignature) and signature.returns else None


def read_needs(
    plans: Sequence[CyclePlan],
    *,
    budget: int,
    parameters: Sequence[int],
    gradients: Mapping[int, int],
    step_bytes: int,
    saves_elsewhere: Callable[[Hashable], bool],
) -> Needs:
    """``parameters``: bytes of each; ``gradients``: of each that is trained, bytes of its gradient; ``step_bytes``:
    what the optimizer's own step allocates for a while; ``saves_elsewhere``: of a forward's signature, whether hooks of
    the user's have what it saves. Saved tensors and gradients count as long as they live, and gradients that a backward
    returns until the iteration is over: nobody tells how long they are held."""
    peak, by_kind, by_kind_beside = 0, dict[ForwardKind, KindGrowth](), dict[ForwardKind, KindGrowth]()
    gradient_bytes = sum(gradients.values())
    for plan in plans:
        saved = _saved_bytes(plan)
        needs = _needs(plan, budget, step_bytes, saved, gradients)
        if any(key.phase is Phase.FORWARD and saves_elsewhere(kind_of(key)[1]) for key in plan.keys):
            needs = list(map(operator.add, needs, _given_back(plan, parameters)))
        if plan.by_values:
            needs = [_SPARE * nbytes for nbytes in needs]
        made = _gradients(plan, gradient_bytes)
        peak = max(peak, *map(operator.add, needs, made))
        # What forwards before one have saved is there when it begins.
        there = list(map(operator.add, plan.non_model, saved))
        _add_growth(by_kind, plan, needs, made, there, gradient_bytes)
        needs = list(map(operator.add, needs, plan.others_away_at_peak))
        there = list(map(operator.add, there, plan.others_away))
        _add_growth(by_kind_beside, plan, needs, made, there, gradient_bytes)
    return Needs(
        peak=peak,
        by_kind=by_kind,
        by_kind_beside=by_kind_beside,
        has_others_within=any(plan.has_others_within for plan in plans),
    )


def _add_growth(
    by_kind: dict[ForwardKind, KindGrowth],
    plan: CyclePlan,
    needs: list[int],
    made: list[int],
    there: list[int],
    gradient_bytes: int,
) -> None:
    """Of each forward of ``plan``, or more, if another of its kind takes more. Of each moment: ``needs`` beside
    gradients, those that are ``made`` by then, and what was ``there`` when it began."""
    totals = list(map(operator.add, needs, made))
    for number, key in enumerate(plan.keys):
        if key.phase is Phase.FORWARD:
            begin = plan.bounds[number]
            with_gradients, without = max(needs[begin:]) - there[begin], max(totals[begin:]) - there[begin]
            if plan.whole_gradients[begin]:  # what it is without them has not been measured
                without = with_gradients + gradient_bytes
            before = by_kind.get(kind_of(key))
            by_kind[kind_of(key)] = KindGrowth(
                with_gradients=max(with_gradients, 0 if before is None else before.with_gradients),
                without=max(without, 0 if before is None else before.without),
            )


def _gradients(plan: CyclePlan, gradient_bytes: int) -> list[int]:
    """Of each moment; those that it has not seen made, of a parameter that was frozen then, count all along."""
    if not any(key.phase is Phase.BACKWARD for key in plan.keys):
        return list(plan.whole_gradients)
    unseen = max(0, gradient_bytes - max(plan.whole_gradients))
    return [nbytes + unseen for nbytes in plan.whole_gradients]


def _saved_bytes(plan: CyclePlan) -> list[int]:
    """Of saved tensors, at each moment: each counts from the one after it was saved in."""
    sizes = plan.trace.sizes
    alive: set[int] = set()
    saved, total = list[int](), 0
    for moment in plan.trace.moments:
        gone = alive.intersection(moment.invalidates)
        alive -= gone
        come = set(moment.produces) - alive
        alive |= come
        total += sum(sizes[tensor] for tensor in come) - sum(sizes[tensor] for tensor in gone)
        saved.append(total)
    return saved


def _needs(
    plan: CyclePlan, budget: int, step_bytes: int, saved: list[int], gradients: Mapping[int, int]
) -> list[int]:
    """Of each moment: its peak of everything but parameters, their ``p.grad``, states and buffers."""
    needs = list[int]()
    # What is held of those before a forward is seen as it begins, with all else that is in use.
    returned = since_forward = 0
    for number, key in enumerate(plan.keys):
        since_forward = 0 if key.phase is Phase.FORWARD else since_forward + _returned_bytes(key, gradients)
        returned = max(returned, since_forward)
        beside = returned + (step_bytes if key.phase is Phase.STEP else 0)
        for position in range(plan.bounds[number], plan.bounds[number + 1]):
            needs.append(budget - plan.margin - plan.limits[position] + saved[position] + beside)
    return needs


def _given_back(plan: CyclePlan, parameters: Sequence[int]) -> list[int]:
    """Of each moment, at most, what hooks of the user's on saved tensors give an operator's backward: a copy of each of
    its parameters. They are given none as long as these may leave, so that nobody has measured it."""
    most = max((sum(parameters[x] for x in indices) for indices in plan.operands), default=0)
    given = [0] * len(plan.operands)
    for key, begin, end in zip(plan.keys, plan.bounds, plan.bounds[1:], strict=False):
        if key.phase is Phase.BACKWARD:
            given[begin:end] = [most] * (end - begin)
    return given


def _returned_bytes(key: SegmentKey, gradients: Mapping[int, int]) -> int:
    """Of the gradients that a segment returns, which were at home when it was measured, and of what a loop is to be
    expected to make of them: where they may be differentiated again, a gradient of each."""
    signature = _returning(key)
    if signature is None:
        return 0
    asked_of = signature.asked_of
    ours = gradients if asked_of is None or asked_of.ours is None else asked_of.ours
    nbytes = sum(gradients.get(index, 0) for index in ours)
    return 2 * nbytes if signature.graph_is_kept else nbytes
