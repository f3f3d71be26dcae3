"""AutoSwap's comparison, simulated: how far the load of CNNs can fall at no cost in time, and what it costs beyond.

python -m benchmarks.swap [--keep] [--machines NAME ...] [-- NETWORK ...]

VGG and ResNet on CIFAR-10 shapes, batch 100, traced on fake tensors; operators' times from the roofline of a GTX
1080 Ti, transfers from the AutoSwap paper's model. Three times: at the roofline itself; with operators slower by what
published times of that generation's kernels say (`benchmarks.published`); and by what it takes for VGG16's load to
reach 95 % of its peak after the paper's 24 ms. ``plan`` is the one plan under the paper's rules, which begins with
what all others found; ``plan, clean`` drops what was not written since it was last copied; ``training`` is the
planner that training uses, under its own rules: transfers start where operators do. ``bounds``: what no plan is
faster than. Writes JSON and a picture.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from benchmarks.published import slowdown
from benchmarks.record import read, write
from examples import cnn
from hetero.eviction import CapacityError, check, lower_bound, lower_bound_seconds
from hetero.eviction import plan as next_use
from hetero.eviction.fluid import fluid
from hetero.simulate import GTX_1080_TI, Machine
from hetero.swap import (
    Method,
    OnePlan,
    Step,
    SwapLimitError,
    SwapPlan,
    best_plan,
    least_limit,
    links_of,
    lower_bound_limit,
    one_plan,
    plan_swaps,
)
from hetero.trace import StepTrace, operator_seconds, swap_step, trace_recipe

NETWORKS = [*cnn.VGG_LAYERS, *cnn.RESNET_BLOCKS]
METHODS: tuple[Method, ...] = ("doa", "aoa", "wdoa", "swdoa", "bo", "search")
MACHINES = ("roofline", "published", "calibrated")
SHOWN = ("bo", "search", "plan", "training")
CURVE = (0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.55, 0.5, 0.45, 0.4)
PAPER = {"vgg16": (647, 447), "resnet50": (4418, 2906)}
_PAPER_RAMP_SECONDS = 0.024
_CHECKPOINTS, _CHECKPOINTS_AT_LEAST = 96, 160  # of the bound: at most shares, and at 60 % less
_MISSES = 4  # percentages in a row that must cost time before a method is said to go no lower


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("networks", nargs="*", default=NETWORKS)
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--bo-trials", type=int, default=30)
    parser.add_argument("--search-trials", type=int, default=300)
    parser.add_argument("--plan-trials", type=int, default=600)
    parser.add_argument("--machines", nargs="+", choices=MACHINES, default=MACHINES)
    parser.add_argument("--keep", action="store_true", help="keep the last run's results of others")
    arguments = parser.parse_args()
    factor = calibrated(arguments.batch)
    last = read("swap") if arguments.keep else None
    again = {(machine, name) for machine in arguments.machines for name in arguments.networks}
    rows = [row for row in last["results"] if (row["machine"], row["network"]) not in again] if last else []
    parameters = {
        **{
            key: value
            for key, value in vars(arguments).items()
            if key not in ("keep", "networks", "machines")
        },
        "calibration_factor": factor,
        "misses": _MISSES,
        "curve": CURVE,
    }
    for name in arguments.networks:
        trace = trace_recipe(partial(cnn.recipe, name, arguments.batch))
        slower = {"roofline": 1.0, "published": slowdown(name), "calibrated": factor}
        for called in arguments.machines:
            times = slower[called]
            machine = GTX_1080_TI.slowed(times)
            row = {"machine": called, "network": name, **_measure(name, trace, machine, arguments)}
            rows.append({**row, "slowed": times})
            _show(row)
        rows.sort(key=lambda row: (NETWORKS.index(row["network"]), MACHINES.index(row["machine"])))
        write("swap", parameters, rows, device=None)  # after each: it takes a while


def calibrated(batch: int) -> float:
    """How much slower than the roofline the paper's VGG16 ran."""
    trace = trace_recipe(partial(cnn.recipe, "vgg16", batch))
    step = swap_step(trace, operator_seconds(trace, GTX_1080_TI))
    ramp = step.begin_of(int(np.argmax(step.load >= 0.95 * step.peak_bytes)))
    return _PAPER_RAMP_SECONDS / ramp


def _measure(name: str, trace: StepTrace, machine: Machine, arguments: argparse.Namespace) -> dict[str, Any]:
    step = swap_step(trace, operator_seconds(trace, machine))
    trials = {"bo": arguments.bo_trials, "search": arguments.search_trials}
    methods: dict[str, Any] = {}
    starts: dict[float, list[SwapPlan]] = {share: [] for share in CURVE}
    lowest = 100
    for method in METHODS:
        began = time.perf_counter()
        judge = partial(_swaps, step, machine, method, trials=trials.get(method))
        # What no score costs, neither does BO nor the search: both begin with the scores.
        zero = _zero(judge, lowest if method in trials else 100)
        lowest = min(lowest, zero)
        curve = [(share, judge(share)) for share in CURVE]
        for share, plan in curve:
            starts[share] += [] if plan is None else [plan]
        methods[method] = _result(zero, curve, began)
    ours = _Ours(step, machine, arguments.plan_trials, arguments.search_trials, starts)
    for called, planned in (("plan", ours.plan), ("plan, clean", ours.clean), ("training", ours.training)):
        began = time.perf_counter()
        zero = _zero(planned, 100 if called == "training" else lowest)
        methods[called] = _result(zero, [(share, planned(share)) for share in CURVE], began)
    methods["plan"]["bounds"] = [_bounds(step, machine, share, clean=False) for share in CURVE]
    methods["plan, clean"]["bounds"] = [_bounds(step, machine, share, clean=True) for share in CURVE]
    return {
        "peak_bytes": step.peak_bytes,
        "step_seconds": step.total_seconds,
        "operators": step.span,
        "least_limit_bytes": least_limit(step, method="doa"),
        "bound_bytes": lower_bound_limit(step, machine),
        "paper_mb": PAPER.get(name),
        "methods": methods,
    }


_Judged = SwapPlan | OnePlan | None


def _result(zero: int, curve: Sequence[tuple[float, _Judged]], began: float) -> dict[str, Any]:
    return {
        "zero_overhead_percent_of_peak": zero,
        "curve": [[share, None if plan is None else plan.overhead] for share, plan in curve],
        "seconds": time.perf_counter() - began,
    }


def _zero(judge: Callable[[float], _Judged], known: int) -> int:
    """The least limit without overhead, in whole percent of the peak."""
    best, missed, percent = known, 0, known
    while missed < _MISSES and percent > 1:
        percent -= 1
        plan = judge(percent / 100)
        if plan is not None and plan.overhead == 0.0:
            best, missed = percent, 0
        else:
            missed += 1
    return best


def _swaps(
    step: Step, machine: Machine, method: Method, share: float, *, trials: int | None
) -> SwapPlan | None:
    try:
        plan = plan_swaps(step, int(share * step.peak_bytes), machine, method=method, trials=trials)
    except SwapLimitError:
        return None
    assert plan.timeline.over_bytes == 0
    return plan


class _Ours:
    """The one plan at a share of the peak, each way once."""

    def __init__(
        self,
        step: Step,
        machine: Machine,
        trials: int,
        search_trials: int,
        starts: dict[float, list[SwapPlan]],
    ) -> None:
        self.step, self.machine, self.trials, self.starts = step, machine, trials, starts
        self.search_trials = search_trials
        self.trained: dict[float, OnePlan | None] = {}
        self.planned: dict[float, OnePlan | None] = {}

    def training(self, share: float) -> OnePlan | None:
        if share not in self.trained:
            self.trained[share] = self._checked(
                partial(one_plan, self.step, self._limit(share), self.machine)
            )
        return self.trained[share]

    def plan(self, share: float) -> OnePlan | None:
        if share not in self.planned:
            trained = self.training(share)
            if trained is not None and share not in self.starts:
                found = _swaps(self.step, self.machine, "search", share, trials=self.search_trials)
                self.starts[share] = [] if found is None else [found]
            self.planned[share] = trained and self._best(
                share, self.starts[share], trained, trials=self.trials
            )
        return self.planned[share]

    def clean(self, share: float) -> OnePlan | None:
        """Begins with the plan that copies every time, and is that where clean copies only disturb the order."""
        copied = self.plan(share)
        if copied is None or copied.swaps is None:
            return copied
        quick = one_plan(self.step, self._limit(share), self.machine, clean=True, planner=next_use)
        best = self._best(share, [copied.swaps], quick, clean=True, trials=0)
        return copied if best is None or copied.overhead < best.overhead else best

    def _best(self, share: float, start: list[SwapPlan], trained: OnePlan, **more: Any) -> OnePlan | None:
        limit = self._limit(share)
        best = self._checked(
            partial(best_plan, self.step, limit, self.machine, start=start, trained=trained, **more)
        )
        if best is not None and not more.get("clean"):
            assert best.overhead <= min([trained.overhead, *(plan.overhead for plan in start)]) + 1e-9
        return best

    def _limit(self, share: float) -> int:
        return int(share * self.step.peak_bytes)

    def _checked(self, planner: Callable[[], OnePlan]) -> OnePlan | None:
        try:
            plan = planner()
        except CapacityError:
            return None
        check(plan.trace, plan.schedule)
        assert plan.timeline.over_bytes == 0
        return plan


def _bounds(step: Step, machine: Machine, share: float, *, clean: bool) -> dict[str, Any] | None:
    """What no plan moves less than, and is not faster than, beside what the plan by next use alone reaches."""
    try:
        plan = one_plan(step, int(share * step.peak_bytes), machine, clean=clean, planner=next_use)
    except CapacityError:
        return None
    links = links_of(machine)
    points = _CHECKPOINTS_AT_LEAST if share == CURVE[-1] else _CHECKPOINTS
    soonest = max(
        lower_bound_seconds(plan.trace, links), fluid(plan.trace, links, checkpoints=points).step_seconds
    )
    return {
        "share": share,
        "bytes": lower_bound(plan.trace),
        "overhead": max(soonest / step.total_seconds - 1.0, 0.0),
        "next_use_overhead": plan.overhead,
        "next_use_bytes": plan.schedule.moved_bytes,
    }


def _show(row: dict[str, Any]) -> None:
    peak = row["peak_bytes"]
    methods = row["methods"]
    zeros = " ".join(f"{m} {100 - methods[m]['zero_overhead_percent_of_peak']:2d} %" for m in methods)
    at = "/".join(_percent(dict(map(tuple, methods[m]["curve"]))[0.4]) for m in SHOWN)
    least = methods["plan"]["bounds"][-1]
    bound = 100 * (1 - row["bound_bytes"] / peak)
    print(
        f"{row['machine']:10} {row['network']:9} {peak / 1e6:6.0f} MB {1e3 * row['step_seconds']:6.1f} ms, free: "
        f"{zeros}, none above {bound:.1f} %; 60 % less costs {at} ({'/'.join(SHOWN)}), at least "
        f"{_percent(least and least['overhead'])}",
        flush=True,
    )


def _percent(overhead: float | None) -> str:
    return "-" if overhead is None else f"{100 * overhead:.1f} %"


if __name__ == "__main__":
    main()
