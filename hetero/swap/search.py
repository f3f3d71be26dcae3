"""A planner that is not bound to one order of scores: a local search in the simulator.

Owns the moves. It starts from the best of the four scores, may use every gap (not only those across the peak), and
keeps what makes the simulated step shorter, or moves fewer bytes in the same time. Deterministic for a seed.
"""

import random
from collections.abc import Sequence

from hetero.swap.evaluation import Evaluation
from hetero.swap.model import Gap, Ints, SwapLimitError, SwapPlan
from hetero.swap.scores import SCORES, scores
from hetero.swap.selection import load_without, select

__all__ = ["search"]

_MOST_REMOVED = 3
_PATIENCE = 0.02  # relative: how much longer a step is accepted at first, so that the search leaves a hollow


def search(
    evaluation: Evaluation,
    gaps: Sequence[Gap],
    *,
    start: Sequence[SwapPlan] = (),
    trials: int = 600,
    seed: int = 0,
) -> SwapPlan:
    """The best plan that swaps some of ``gaps`` found in ``trials`` simulations.

    ``start``: plans to begin from, besides those of the four scores. Raises `SwapLimitError` if swapping all of
    ``gaps`` does not meet the limit.
    """
    found = _Search(evaluation, gaps, seed)
    best = found.first(start)
    current = best
    for trial in range(trials):
        if best.overhead <= 0.0:
            break
        plan = found.neighbour(current)
        patience = _PATIENCE * (1.0 - trial / trials) ** 2
        if Evaluation.better(plan, current) or found.forgives(plan, current, patience):
            current = plan
        if Evaluation.better(plan, best):
            best = plan
    return best


class _Search:
    def __init__(self, evaluation: Evaluation, gaps: Sequence[Gap], seed: int) -> None:
        self.evaluation = evaluation
        self.gaps = tuple(gaps)
        self.random = random.Random(seed)
        self.span = evaluation.step.span
        # Bytes that are away for long cost the same as others: prefer them, as AOA does.
        by_score = scores(evaluation.step, self.gaps, evaluation.machine)
        self.by_score = by_score
        ranks = by_score["aoa"].argsort().argsort()
        self.rank = {gap: int(rank) for gap, rank in zip(self.gaps, ranks, strict=True)}

    def first(self, start: Sequence[SwapPlan]) -> SwapPlan:
        evaluation = self.evaluation
        plans = list(start)
        for name in SCORES:
            chosen = select(evaluation.step, self.gaps, self.by_score[name], evaluation.limit)
            plans.append(evaluation.plan(self._pruned(list(chosen)), method="search"))
        best = plans[0]
        for plan in plans[1:]:
            best = plan if Evaluation.better(plan, best) else best
        return best

    def neighbour(self, plan: SwapPlan) -> SwapPlan:
        """A plan with a few gaps fewer, as many others as the limit then needs, and none that it does not."""
        chosen = [swap.gap for swap in plan.swaps]
        removed: list[Gap] = []
        kind = self.random.random()
        if chosen and kind < 0.8:
            for _ in range(self.random.randint(1, min(_MOST_REMOVED, len(chosen)))):
                removed.append(chosen.pop(self.random.randrange(len(chosen))))
        if kind > 0.6:
            self._add_one(chosen, removed)
        self._repair(chosen, removed)
        if self.random.random() < 0.7:
            chosen = self._pruned(chosen)
        return self.evaluation.plan(chosen, method="search", eager=self.random.random() < 0.2)

    def forgives(self, plan: SwapPlan, current: SwapPlan, patience: float) -> bool:
        """Whether to go on from a plan that is not better, now and then."""
        return plan.overhead <= current.overhead + patience * self.random.random()

    def _add_one(self, chosen: list[Gap], removed: Sequence[Gap]) -> None:
        taken = {*chosen, *removed}
        free = [gap for gap in self.gaps if gap not in taken]
        if free:
            chosen.append(self.random.choice(free))

    def _repair(self, chosen: list[Gap], removed: list[Gap]) -> None:
        """Add gaps until the planned load is within the limit; those just removed only if nothing else does."""
        load = load_without(self.evaluation.step, chosen)
        limit = self.evaluation.limit
        taken = {*chosen, *removed}
        while load[worst := int(load.argmax())] > limit:
            free = [gap for gap in self.gaps if gap not in taken and gap.covers(worst, self.span)]
            if not free:
                free = [gap for gap in removed if gap.covers(worst, self.span)]
                if not free:
                    raise SwapLimitError(limit=limit, least=int(load[worst]))
            gap = max(self.random.sample(free, min(3, len(free))), key=self.rank.__getitem__)
            if gap in removed:
                removed.remove(gap)
            taken.add(gap)
            chosen.append(gap)
            _take(load, gap, self.span, -1)

    def _pruned(self, chosen: list[Gap]) -> list[Gap]:
        """Without gaps that the limit does not need, in random order."""
        load = load_without(self.evaluation.step, chosen)
        limit = self.evaluation.limit
        for gap in self.random.sample(chosen, len(chosen)):
            if all(load[a:b].max(initial=0) + gap.nbytes <= limit for a, b in gap.spans(self.span)):
                chosen.remove(gap)
                _take(load, gap, self.span, 1)
        return chosen


def _take(load: Ints, gap: Gap, span: int, sign: int) -> None:
    for low, high in gap.spans(span):
        load[low:high] += sign * gap.nbytes
