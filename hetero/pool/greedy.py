"""Planners that place each buffer once, in an order fixed beforehand.

Owns SmartPool (Zhang et al. 2019: size descending, best fit by default, or first fit), TensorFlow Lite's
greedy by size (first gap), and XLA's best of several orders. Invariant: one pass of `Placer` an order; no
search.
"""

import time
from collections.abc import Iterable

import numpy as np

from hetero.pool.placement import NO_LIMIT, Placer
from hetero.pool.planner import register
from hetero.pool.problem import IntArray, Problem, Solution, lower_bound, solution_from_offsets

__all__ = ["smartpool", "smartpool_first_fit", "tflite", "xla"]


@register("smartpool")
def smartpool(problem: Problem) -> Solution:
    """SmartPool: size descending, smallest hole that fits, extend otherwise."""
    return _best_of(problem, "smartpool", [_by_size(problem)], best_fit=True)


@register("smartpool-first-fit")
def smartpool_first_fit(problem: Problem) -> Solution:
    """SmartPool's other option: size descending, first hole that fits."""
    return _best_of(problem, "smartpool-first-fit", [_by_size(problem)], best_fit=False)


@register("tflite")
def tflite(problem: Problem) -> Solution:
    """TensorFlow Lite's greedy by size: size descending, earlier begin first among equals, first gap."""
    order = np.lexsort([problem.begins, -problem.sizes])
    return _best_of(problem, "tflite", [order], best_fit=False)


@register("xla")
def xla(problem: Problem) -> Solution:
    """XLA's global decreasing size best fit over three orders (size, duration, size x duration); the best."""
    durations = (problem.ends - problem.begins).astype(np.float64)
    area = problem.sizes * durations
    keys = (problem.sizes.astype(np.float64), durations, area)
    orders = [np.lexsort([-problem.sizes, -key]) for key in keys]
    return _best_of(problem, "xla", orders, best_fit=True)


def _by_size(problem: Problem) -> IntArray:
    return np.argsort(-problem.sizes, kind="stable")


def _best_of(problem: Problem, name: str, orders: Iterable[IntArray], *, best_fit: bool) -> Solution:
    started = time.perf_counter()
    placer = Placer(problem.begins, problem.ends, problem.sizes)
    bound = lower_bound(problem)
    best = np.zeros(len(problem), dtype=np.int64)
    limit = NO_LIMIT
    for order in orders:
        result = placer.place(order, best_fit=best_fit, limit=limit)
        if result is not None:
            best, footprint = result
            # Later orders are given up as soon as they are no better.
            limit = footprint - 1
            if footprint == bound:
                break
    return solution_from_offsets(problem, best, planner=name, seconds=time.perf_counter() - started)
