"""Drawing a solution: every buffer as a rectangle of time and offset, and the load curve below.

Owns `plot_solution`. Matplotlib is imported when it is called, not before. It shows nothing on a screen.
"""

import os
from typing import TYPE_CHECKING

import numpy as np

from hetero.pool.problem import Problem, Solution, competitive_ratio, load_curve, lower_bound

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

    figure = Figure(figsize=(12, 8), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    low = np.array(solution.offsets, dtype=np.float64)
    high = low + problem.sizes
    begin, end = problem.begins.astype(np.float64), problem.ends.astype(np.float64)
    corners = np.stack([begin, low, end, low, end, high, begin, high], axis=1).reshape(-1, 4, 2)
    # Colours only tell neighbours apart: ten in turn suffice.
    colours = [f"C{index % 10}" for index in range(len(problem))]
    upper.add_collection(
        PolyCollection(list(corners), facecolors=colours, edgecolors="black", linewidths=0.2, alpha=0.7)
    )
    upper.autoscale()
    upper.set_ylim(0, max(1, solution.footprint))
    upper.set_ylabel("offset (bytes)")
    upper.set_title(
        f"{problem.name or 'problem'}: {solution.planner}, {solution.footprint} bytes, "
        f"{competitive_ratio(problem, solution):.4f} x peak live bytes"
    )
    times, load = load_curve(problem)
    lower.step(times, load, where="post", color="C0", label="live bytes")
    lower.axhline(lower_bound(problem), color="C2", linestyle=":", label="lower bound")
    lower.axhline(solution.footprint, color="C3", linestyle="--", label="footprint")
    lower.set_ylim(0, None)
    lower.set_xlabel("time (events)")
    lower.set_ylabel("bytes")
    lower.legend(loc="lower center", ncols=3)
    if path is not None:
        figure.savefig(path)
    return figure
