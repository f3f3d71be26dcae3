"""Offline placement of buffers with known lives, and simulators of the allocators that do without knowing.

Problems, solutions, planners by name (`plan`, `planner_names`), the `portfolio` that runs them within a
time limit, a naive validator, MiniMalloc CSV files, reports and pictures; `hetero.pool.allocators` holds
the simulators. `planned` runs a loop at planned offsets; it is imported when asked for, and torch with it.
Without it, no torch.
"""

from typing import TYPE_CHECKING, Any

from hetero.pool import allocators
from hetero.pool.blocks import binary_block, ge_two_level, max_block
from hetero.pool.greedy import smartpool, smartpool_first_fit, tflite, xla
from hetero.pool.minimalloc_csv import read_problem, read_solution, write_problem, write_solution
from hetero.pool.planner import Planner, plan, planner_names, register
from hetero.pool.plot import plot_solution
from hetero.pool.portfolio import exact, hill_climb, portfolio, random_keys, skyline
from hetero.pool.problem import (
    Buffer,
    BufferId,
    Problem,
    Solution,
    competitive_ratio,
    load_curve,
    lower_bound,
)
from hetero.pool.report import AllocatorRow, Report, allocator_rows, format_report, report, solve
from hetero.pool.validation import validate

if TYPE_CHECKING:
    from hetero.pool.arena import Arena, ArenaStats, planned

__all__ = [
    "AllocatorRow",
    "Arena",
    "ArenaStats",
    "Buffer",
    "BufferId",
    "Planner",
    "Problem",
    "Report",
    "Solution",
    "allocator_rows",
    "allocators",
    "binary_block",
    "competitive_ratio",
    "exact",
    "format_report",
    "ge_two_level",
    "hill_climb",
    "load_curve",
    "lower_bound",
    "max_block",
    "plan",
    "planned",
    "planner_names",
    "plot_solution",
    "portfolio",
    "random_keys",
    "read_problem",
    "read_solution",
    "register",
    "report",
    "skyline",
    "smartpool",
    "smartpool_first_fit",
    "solve",
    "tflite",
    "validate",
    "write_problem",
    "write_solution",
    "xla",
]


def __getattr__(name: str) -> Any:
    if name in ("Arena", "ArenaStats", "planned"):
        from hetero.pool import arena

        return getattr(arena, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
