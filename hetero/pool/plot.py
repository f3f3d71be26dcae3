"""Drawing a solution: every buffer as a rectangle of time and offset, and the load curve below.

Owns `plot_solution`. Matplotlib is imported when it is called, not before. It shows nothing on a screen.
"""

import os
from typing import TYPE_CHECKING

import numpy as np

from hetero.pool.problem import Problem, Solution, load_curve, lower_bound
from hetero.units import format_bytes, unit_for

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["plot_solution"]


def plot_solution(
    problem: Problem, solution: Solution, path: str | os.PathLike[str] | None = None
) -> "Figure":
    """Rectangles (time x offset) above, live bytes against the bound and the footprint below.

    Returns the figure; also saves it if ``path`` is given, in the format of its suffix. Raises what
    Matplotlib raises.
    """
    from matplotlib.collections import PolyCollection
    from matplotlib.figure import Figure

    bound = lower_bound(problem)
    scale, unit = unit_for(solution.footprint)
    figure = Figure(figsize=(10, 6.5), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    low = np.array(solution.offsets, dtype=np.float64) / scale
    high = low + problem.sizes / scale
    begin, end = problem.begins.astype(np.float64), problem.ends.astype(np.float64)
    corners = np.stack([begin, low, end, low, end, high, begin, high], axis=1).reshape(-1, 4, 2)
    # By when it was allocated: neighbours in memory differ in it, and what belongs together is alike.
    buffers = PolyCollection(list(corners), cmap="viridis", array=begin, edgecolors="white", linewidths=0.3)
    upper.add_collection(buffers)
    upper.autoscale()
    upper.margins(x=0)
    upper.set_ylim(0, max(1, solution.footprint) / scale)
    upper.set_ylabel(f"offset, {unit}")
    proven = "no placement needs less" if solution.footprint == bound else f"at least {format_bytes(bound)}"
    upper.set_title(
        f"{len(problem)} buffers, each as wide as its life and as high as its size, placed in "
        f"{format_bytes(solution.footprint)} ({proven})\n{problem.name or 'problem'}; planner: "
        f"{solution.planner}; coloured by when they were allocated",
        fontsize="medium",
    )
    times, load = load_curve(problem)
    lower.fill_between(times, load / scale, step="post", color="#9ecae1", label="in use")
    if solution.footprint != bound:
        lower.axhline(bound / scale, color="C2", linestyle=":", label="lower bound")
    lower.axhline(solution.footprint / scale, color="#e6842a", label="footprint")
    lower.set_ylim(0, None)
    lower.set_xlabel("time, in allocations and frees")
    lower.set_ylabel(unit)
    lower.legend(loc="upper right", frameon=False)
    if path is not None:
        figure.savefig(path)
    return figure
