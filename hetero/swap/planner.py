"""Plans by method name, so that the paper's comparison can be repeated.

Owns the names. ``doa``, ``aoa``, ``wdoa``, ``swdoa`` and ``bo`` are AutoSwap's; ``search`` is ours.
"""

from typing import Literal, get_args

from hetero.errors import ConfigError
from hetero.simulate import Machine
from hetero.swap.bayes import bayesian
from hetero.swap.candidates import THRESHOLD, all_gaps, candidates
from hetero.swap.evaluation import Evaluation
from hetero.swap.model import Step, SwapPlan
from hetero.swap.scores import scores
from hetero.swap.search import search
from hetero.swap.selection import load_without, select

__all__ = ["METHODS", "Method", "least_limit", "plan_swaps", "swap_everything"]

Method = Literal["doa", "aoa", "wdoa", "swdoa", "bo", "search"]
METHODS: tuple[Method, ...] = get_args(Method)


def plan_swaps(
    step: Step,
    limit: int,
    machine: Machine,
    *,
    method: Method = "search",
    threshold: int = THRESHOLD,
    trials: int | None = None,
    seed: int = 0,
) -> SwapPlan:
    """What to swap so that the load stays at or under ``limit`` bytes, and how long the step then takes.

    ``trials``: simulations that ``bo`` (30) and ``search`` (600) may use. Raises `ConfigError` for an unknown method or
    if ``bo`` lacks optuna, `SwapLimitError` if the method's gaps do not suffice.
    """
    if method not in METHODS:
        raise ConfigError(f"swap method {method!r} is not one of {', '.join(METHODS)}")
    evaluation = Evaluation(step, machine, limit)
    gaps = candidates(step, threshold=threshold)
    if method == "search":
        # The scores over the candidates alone may do better than over all gaps: begin with them too.
        start = []
        if least_limit(step, method="doa", threshold=threshold) <= limit:
            by_score = scores(step, gaps, machine)
            start = [
                evaluation.plan(select(step, gaps, s, limit), method="search") for s in by_score.values()
            ]
        every = all_gaps(step, threshold=threshold)
        return search(evaluation, every, start=start, trials=600 if trials is None else trials, seed=seed)
    if method == "bo":
        return bayesian(evaluation, gaps, trials=30 if trials is None else trials, seed=seed)
    score = scores(step, gaps, machine)[method]
    return evaluation.plan(select(step, gaps, score, limit), method=method)


def swap_everything(step: Step, limit: int, machine: Machine, *, threshold: int = THRESHOLD) -> SwapPlan:
    """The plan that swaps every candidate, needed or not: what there is without a planner."""
    return Evaluation(step, machine, limit).plan(candidates(step, threshold=threshold), method="everything")


def least_limit(step: Step, *, method: Method = "search", threshold: int = THRESHOLD) -> int:
    """The least limit in bytes that ``method`` can meet, whatever time it takes.

    For the paper's methods this is its minimum memory load (section VI-B1): every candidate is away between its uses.
    """
    gaps = (
        all_gaps(step, threshold=threshold) if method == "search" else candidates(step, threshold=threshold)
    )
    return int(load_without(step, gaps).max())
