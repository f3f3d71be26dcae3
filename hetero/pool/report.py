"""Comparing planners and allocators on one problem.

Owns `report`, `Report` and its text form. Invariant: every solution in a report has passed `validate`. It
prints nothing and reads no files: the command line does.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from hetero.pool.allocators import (
    Allocator,
    BfcAllocator,
    CachingSettings,
    CudaCachingAllocator,
    events_of_problem,
    simulate,
)
from hetero.pool.planner import plan, planner_names
from hetero.pool.portfolio import exact, portfolio
from hetero.pool.problem import Problem, Solution, lower_bound
from hetero.pool.validation import validate
from hetero.units import format_bytes, format_seconds

__all__ = ["AllocatorRow", "Report", "allocator_rows", "format_report", "report", "solve"]

_MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorRow:
    """What an allocator reserves for the problem replayed twice; ``saved_nbytes``: less than PyTorch's
    default by that.
    """

    allocator: str
    reserved_nbytes: int
    saved_nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One problem: its lower bound (bytes), a valid solution a planner, a row an allocator."""

    name: str
    buffers: int
    bound_nbytes: int
    solutions: tuple[Solution, ...]
    allocators: tuple[AllocatorRow, ...]

    @property
    def best(self) -> Solution:
        """That of the smallest footprint, bytes; of equal ones the first."""
        return min(self.solutions, key=lambda solution: solution.footprint)


def report(problem: Problem, seconds: float = 10.0, *, planners: Sequence[str] | None = None) -> Report:
    """``problem`` placed by each of ``planners`` (default: all), each checked, and replayed by each
    allocator.

    ``seconds`` limits the portfolio, and the exact search, each. Raises `ConfigError` for an unknown planner.
    """
    names = planner_names() if planners is None else tuple(planners)
    return Report(
        name=problem.name,
        buffers=len(problem),
        bound_nbytes=lower_bound(problem),
        solutions=tuple(solve(problem, name, seconds) for name in names),
        allocators=allocator_rows(problem),
    )


def solve(problem: Problem, planner: str, seconds: float) -> Solution:
    """The solution of one planner, validated; ``seconds`` limits those planners that search by the clock."""
    if planner == "portfolio":
        solution = portfolio(problem, seconds=seconds)
    elif planner == "exact":
        solution = exact(problem, seconds=seconds)
    else:
        solution = plan(problem, planner)
    validate(problem, solution)
    return solution


def allocator_rows(problem: Problem) -> tuple[AllocatorRow, ...]:
    """Peak reserved bytes of each allocator over two repetitions of the problem's lives."""
    events = events_of_problem(problem, iterations=2)
    allocators: dict[str, Allocator] = {
        "pytorch": CudaCachingAllocator(),
        "pytorch, max_split_size_mb:64": CudaCachingAllocator(CachingSettings(max_split_size=64 * _MIB)),
        "pytorch, roundup_power2_divisions:4": CudaCachingAllocator(
            CachingSettings(roundup_power2_divisions=4)
        ),
        "pytorch, expandable_segments:True": CudaCachingAllocator(CachingSettings(expandable_segments=True)),
        "tensorflow bfc, allow_growth": BfcAllocator(),
    }
    reserved = {name: simulate(events, allocator).peak_reserved for name, allocator in allocators.items()}
    return tuple(
        AllocatorRow(allocator=name, reserved_nbytes=nbytes, saved_nbytes=reserved["pytorch"] - nbytes)
        for name, nbytes in reserved.items()
    )


def format_report(report: Report) -> str:
    """The report as aligned text: the bound, planners from best to worst, allocators from best to worst."""
    bound = report.bound_nbytes
    lines = [
        f"{report.name or 'problem'}: {report.buffers} buffers, lower bound {bound} bytes "
        f"({format_bytes(bound)})"
    ]
    lines.append(f"{'planner':<36} {'bytes':>16} {'ratio':>9} {'time':>10}  proven")
    for solution in sorted(report.solutions, key=lambda s: s.footprint):
        lines.append(
            f"{solution.planner:<36} {solution.footprint:>16} {_ratio(solution.footprint, bound):>9} "
            f"{format_seconds(solution.seconds):>10}  {'yes' if solution.proven_optimal else 'no'}"
        )
    lines.append(f"{'allocator (reserved)':<36} {'bytes':>16} {'ratio':>9} {'saves':>10}")
    for row in sorted(report.allocators, key=lambda r: r.reserved_nbytes):
        saved = f"{100 * row.saved_nbytes / max(1, row.reserved_nbytes + row.saved_nbytes):.1f} %"
        ratio = _ratio(row.reserved_nbytes, bound)
        lines.append(f"{row.allocator:<36} {row.reserved_nbytes:>16} {ratio:>9} {saved:>10}")
    return "\n".join(lines)


def _ratio(nbytes: int, bound: int) -> str:
    return f"{nbytes / bound:.5f}" if bound else "-"
