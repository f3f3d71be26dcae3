"""AutoSwap: which activations, weights and states leave the device between two uses, and when they come back.

Candidates and their scores, selection under a limit, the schedule of transfers, its simulation, and two planners that
choose by simulating: the paper's Bayesian optimisation, and a local search. No torch, no traces: plain data.
"""

from hetero.swap.bayes import bayesian
from hetero.swap.best import best_plan
from hetero.swap.bound import lower_bound_limit
from hetero.swap.candidates import all_gaps, candidates
from hetero.swap.lives import footprint, resident_lives
from hetero.swap.model import Gap, Step, Swap, SwapLimitError, SwapPlan, Variable
from hetero.swap.moments import OnePlan, links_of, one_plan, to_trace
from hetero.swap.planner import METHODS, Method, least_limit, plan_swaps, swap_everything
from hetero.swap.schedule import lower, schedule
from hetero.swap.scores import SCORES, Score, combine, scores
from hetero.swap.search import search
from hetero.swap.selection import select

__all__ = [
    "METHODS",
    "SCORES",
    "Gap",
    "Method",
    "OnePlan",
    "Score",
    "Step",
    "Swap",
    "SwapLimitError",
    "SwapPlan",
    "Variable",
    "all_gaps",
    "bayesian",
    "best_plan",
    "candidates",
    "combine",
    "footprint",
    "least_limit",
    "links_of",
    "lower",
    "lower_bound_limit",
    "one_plan",
    "plan_swaps",
    "resident_lives",
    "schedule",
    "scores",
    "search",
    "select",
    "swap_everything",
    "to_trace",
]
