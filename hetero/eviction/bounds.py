"""Bytes that no schedule can go below.

Owns `lower_bound`. The bound is on bytes alone: it knows neither links nor prefetching.
"""

from hetero.eviction.intervals import read_intervals
from hetero.eviction.model import Trace
from hetero.eviction.relaxation import bound_from_prices, relax

__all__ = ["lower_bound"]


def lower_bound(trace: Trace) -> int:
    """Bytes (fetched and written back) per iteration that no schedule of ``trace`` can go below.

    The interval LP (FOO, Berger et al. 2018) extended to cyclic traces, invalidation and write backs. Up to 8,000
    moments it is solved whole. Longer traces are solved in overlapping windows of time, whose prices of memory give
    a bound that is just as valid and, as a rule, slightly lower. Raises `CapacityError` as `plan` does.
    """
    problem = read_intervals(trace)
    return bound_from_prices(problem, relax(problem, problem.room).price)
