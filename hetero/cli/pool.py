"""``hetero pool FILE``: how small a memory the buffers of a trace fit into, and what allocators would take."""

import csv
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from hetero import pool as placement
from hetero.errors import ConfigError
from hetero.files import check_readable, check_writable
from hetero.trace import read_trace

__all__ = ["pool"]


def pool(
    file: Annotated[
        Path,
        typer.Argument(help="A trace (.json), a MiniMalloc CSV, or a CUDA memory snapshot (.pickle)."),
    ],
    planner: Annotated[str, typer.Option(help="Which planner places the buffers.")] = "portfolio",
    every: Annotated[bool, typer.Option("--all", help="Run every planner.")] = False,
    seconds: Annotated[float, typer.Option(min=0.0, help="Limit of each planner that searches.")] = 10.0,
    solution: Annotated[
        Path | None, typer.Option(help="Write the rows with the best solution's offsets to this CSV.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the best solution (PNG, SVG, PDF).")] = None,
) -> None:
    """Place the buffers of a trace in one memory.

    Prints the lower bound; the footprint, ratio and time of each planner, and whether it is proven optimal; what
    PyTorch's and TensorFlow's allocators would reserve for the same, and what PyTorch's settings would save.
    """
    check_readable(file)
    check_writable(solution, plot)
    problem, given = _read(file)
    console = Console(stderr=True)
    if not every and planner not in placement.planner_names():
        raise ConfigError(
            f"--planner {planner}: unknown; use one of {', '.join(placement.planner_names())}, or --all"
        )
    with console.status(f"placing {len(problem)} buffers"):
        report = placement.report(problem, seconds, planners=None if every else [planner])
    if given is not None:
        report = replace(report, solutions=(*report.solutions, given))
    typer.echo(placement.format_report(report))
    if solution is not None:
        placement.write_solution(solution, problem, report.best)
    if plot is not None:
        placement.plot_solution(problem, report.best, plot)


def _read(file: Path) -> tuple[placement.Problem, placement.Solution | None]:
    """The problem, and the solution that a CSV with offsets brings along, if it is one."""
    if file.suffix.lower() != ".csv":
        return read_trace(file).to_problem(), None
    if not _has_offsets(file):
        return placement.read_problem(file), None
    problem, given = placement.read_solution(file)
    placement.validate(problem, given)
    return problem, given


def _has_offsets(file: Path) -> bool:
    with file.open(newline="", encoding="utf-8-sig", errors="replace") as lines:
        return "offset" in [name.strip().lower() for name in next(csv.reader(lines), [])]
