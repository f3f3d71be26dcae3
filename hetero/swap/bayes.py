"""The Bayesian-optimised combination of the scores (AutoSwap, section IV-C).

Owns the search for four weights in [-1, 1] with optuna's Gaussian process sampler; the objective is the simulated
overhead. The four scores alone are its first trials, so that it is never worse than the best of them. Optuna is an
optional dependency, imported when asked for.
"""

import importlib
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from hetero.errors import ConfigError
from hetero.swap.evaluation import Evaluation
from hetero.swap.model import Gap, SwapPlan
from hetero.swap.scores import SCORES, combine, scores
from hetero.swap.selection import select

__all__ = ["bayesian"]


def bayesian(evaluation: Evaluation, gaps: Sequence[Gap], *, trials: int = 30, seed: int = 0) -> SwapPlan:
    """The best plan of ``trials`` combinations of the scores; fewer if one costs no time at all.

    Raises `ConfigError` if optuna is not installed, `SwapLimitError` if swapping all of ``gaps`` does not meet the
    limit.
    """
    optuna = _optuna()
    by_score = scores(evaluation.step, gaps, evaluation.machine)
    plans: dict[tuple[Gap, ...], SwapPlan] = {}

    def judged(weights: Sequence[float]) -> SwapPlan:
        chosen = select(evaluation.step, gaps, combine(by_score, weights), evaluation.limit)
        if chosen not in plans:
            plans[chosen] = evaluation.plan(chosen, method="bo")
        return plans[chosen]

    best = judged((1.0, 0.0, 0.0, 0.0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the sampler calls itself experimental
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        study = optuna.create_study(direction="minimize", sampler=optuna.samplers.GPSampler(seed=seed))
        for row in np.eye(len(SCORES)):
            study.enqueue_trial({name: float(w) for name, w in zip(SCORES, row, strict=True)})
        for _ in range(trials):
            if best.overhead == 0.0:
                break
            trial = study.ask()
            plan = judged([trial.suggest_float(name, -1.0, 1.0) for name in SCORES])
            study.tell(trial, plan.overhead)
            if Evaluation.better(plan, best):
                best = plan
    return best


def _optuna() -> Any:
    try:
        return importlib.import_module("optuna")
    except ImportError as error:
        raise ConfigError(
            "method 'bo' needs optuna, which is not installed: pip install 'hetero[bo]', or choose 'search'"
        ) from error
