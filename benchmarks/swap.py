"""AutoSwap's comparison, simulated: how far the load of CNNs can fall at no cost in time, and what it costs beyond.

python -m benchmarks.swap [NETWORK ...]

VGG and ResNet on CIFAR-10 shapes, batch 100, traced on fake tensors; operators' times from the roofline of a GTX
1080 Ti, transfers from the AutoSwap paper's model. Twice: at the roofline itself, and with operators as much slower as it
takes for VGG16's load to reach 95 % of its peak after the paper's 24 ms. Writes JSON and a picture.
"""

import argparse
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.record import RESULTS, write
from hetero.simulate import GTX_1080_TI, Machine
from hetero.swap import (
    Method,
    Step,
    SwapLimitError,
    least_limit,
    lower_bound_limit,
    plan_swaps,
)
from hetero.trace import StepTrace, operator_seconds, swap_step, trace_recipe

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import cnn

NETWORKS = [*cnn.VGG_LAYERS, *cnn.RESNET_BLOCKS]
METHODS: tuple[Method, ...] = ("doa", "aoa", "wdoa", "swdoa", "bo", "search")
CURVE = (0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.55, 0.5, 0.45, 0.4)
PAPER = {"vgg16": (647, 447), "resnet50": (4418, 2906)}
_PAPER_RAMP_SECONDS = 0.024
_MISSES = 4  # percentages in a row that must cost time before a method is said to go no lower


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("networks", nargs="*", default=NETWORKS)
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--bo-trials", type=int, default=30)
    parser.add_argument("--search-trials", type=int, default=300)
    arguments = parser.parse_args()
    traces = {name: trace_recipe(partial(cnn.recipe, name, arguments.batch)) for name in arguments.networks}
    factor = _calibrated(arguments.batch)
    machines = {"roofline": GTX_1080_TI, "calibrated": GTX_1080_TI.slowed(factor)}
    parameters = {**vars(arguments), "calibration_factor": factor, "misses": _MISSES, "curve": CURVE}
    rows = []
    for name, trace in traces.items():
        for called, machine in machines.items():
            row = {"machine": called, "network": name, **_measure(name, trace, machine, arguments)}
            rows.append(row)
            _show(row)
        write("swap", parameters, rows, device=None)  # after each: it takes a while
        _plot(rows, RESULTS / "swap.png")


def _calibrated(batch: int) -> float:
    """How much slower than the roofline the paper's VGG16 ran."""
    trace = trace_recipe(partial(cnn.recipe, "vgg16", batch))
    step = swap_step(trace, operator_seconds(trace, GTX_1080_TI))
    ramp = step.begin_of(int(np.argmax(step.load >= 0.95 * step.peak_bytes)))
    return _PAPER_RAMP_SECONDS / ramp


def _measure(name: str, trace: StepTrace, machine: Machine, arguments: argparse.Namespace) -> dict[str, Any]:
    step = swap_step(trace, operator_seconds(trace, machine))
    trials = {"bo": arguments.bo_trials, "search": arguments.search_trials}
    peak = step.peak_bytes
    row: dict[str, Any] = {
        "peak_bytes": peak,
        "step_seconds": step.total_seconds,
        "operators": step.span,
        "least_limit_bytes": least_limit(step, method="doa"),
        "bound_bytes": lower_bound_limit(step, machine),
        "paper_mb": PAPER.get(name),
        "methods": {},
    }
    lowest = 100
    for method in METHODS:
        began = time.perf_counter()
        # What no score costs, neither does BO nor the search: both begin with the scores.
        known = lowest if method in trials else 100
        zero = _zero(step, machine, method, trials.get(method), known)
        if method not in trials:
            lowest = min(lowest, zero)
        row["methods"][method] = {
            "zero_overhead_percent_of_peak": zero,
            "curve": [[share, _overhead(step, machine, method, share, trials.get(method))] for share in CURVE],
            "seconds": time.perf_counter() - began,
        }
    return row


def _zero(step: Step, machine: Machine, method: Method, trials: int | None, known: int) -> int:
    """The least limit without overhead, in whole percent of the peak."""
    best, missed, percent = known, 0, known
    while missed < _MISSES and percent > 1:
        percent -= 1
        overhead = _overhead(step, machine, method, percent / 100, trials)
        if overhead == 0.0:
            best, missed = percent, 0
        else:
            missed += 1
    return best


def _overhead(
    step: Step, machine: Machine, method: Method, share: float, trials: int | None
) -> float | None:
    try:
        plan = plan_swaps(step, int(share * step.peak_bytes), machine, method=method, trials=trials)
    except SwapLimitError:
        return None
    assert plan.timeline.over_bytes == 0
    return plan.overhead


def _show(row: dict[str, Any]) -> None:
    peak = row["peak_bytes"]
    methods = row["methods"]
    zeros = " ".join(f"{m} {100 - methods[m]['zero_overhead_percent_of_peak']:2d} %" for m in methods)
    at = "/".join(_percent(dict(map(tuple, methods[m]["curve"]))[0.4]) for m in ("bo", "search"))
    bound = 100 * (1 - row["bound_bytes"] / peak)
    print(
        f"{row['machine']:10} {row['network']:9} {peak / 1e6:6.0f} MB {1e3 * row['step_seconds']:6.1f} ms, free: {zeros}, "
        f"none above {bound:.1f} %; 60 % less costs {at} (bo/search)",
        flush=True,
    )


def _percent(overhead: float | None) -> str:
    return "-" if overhead is None else f"{100 * overhead:.1f} %"


def _plot(rows: list[dict[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(row["network"] for row in rows))
    machines = list(dict.fromkeys(row["machine"] for row in rows))
    figure = Figure(figsize=(4 * len(names), 3.2 * len(machines)), layout="constrained")
    axes = figure.subplots(len(machines), len(names), squeeze=False)
    for row in rows:
        ax = axes[machines.index(row["machine"])][names.index(row["network"])]
        for method, result in row["methods"].items():
            points = [(100 * share, 100 * over) for share, over in result["curve"] if over is not None]
            ax.plot(*zip(*points, strict=True), marker=".", label=method) if points else None
        ax.axvline(100 * row["bound_bytes"] / row["peak_bytes"], color="black", linestyle=":", label="bound at 0 %")
        ax.axhline(15, color="grey", linewidth=0.5)
        ax.set_title(f"{row['network']}, {row['machine']}")
        ax.set_xlabel("limit, % of peak load")
        ax.set_ylabel("overhead, %")
        ax.invert_xaxis()
    axes[0][0].legend(fontsize="small")
    figure.savefig(path, dpi=70)


if __name__ == "__main__":
    main()
