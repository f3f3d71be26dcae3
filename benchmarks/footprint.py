"""SmartPool and AutoSwap together, as in section VI-C of their paper: footprints beside CNMeM's, simulated.

python -m benchmarks footprint [--machines NAME ...] [-- NETWORK ...]

Networks, machines and transfers as in `benchmarks.swap`. The baseline is what CNMeM takes for the step without swaps:
growing from nothing, request by request (``cnmem``), or out of one pool that is large enough (``cnmem, one pool``). The
paper does not say which of them it had; it saw up to 1.15 times the peak load. A plan's footprint is where SmartPool
puts what the plan leaves resident, iteration after iteration; its overhead is the simulated step's. Three questions for
each: what 60 % less footprint than CNMeM's costs (the paper: less than 15 % of the step), how much less is to be had
for nothing (the paper: up to a third), and for 15 %.
"""

import argparse
import math
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import hetero.pool as pool
from benchmarks.networks import cnmem_bytes
from benchmarks.published import slowdown
from benchmarks.record import write
from benchmarks.swap import MACHINES, NETWORKS, calibrated
from examples import cnn
from hetero.simulate import GTX_1080_TI, Machine
from hetero.swap import Step, SwapLimitError, SwapPlan, footprint, least_limit, plan_swaps
from hetero.trace import StepTrace, operator_seconds, swap_step, trace_recipe

_LESS = 0.6
_PAPER_OVERHEAD = 0.15
_STEP = 0.005  # of the baseline: how finely limits are tried
_TRIED, _FEW = 20, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("networks", nargs="*", default=NETWORKS)
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--trials", type=int, default=300)
    parser.add_argument("--machines", nargs="+", choices=MACHINES, default=MACHINES)
    arguments = parser.parse_args()
    factor = calibrated(arguments.batch)
    rows = []
    for name in arguments.networks:
        trace = trace_recipe(partial(cnn.recipe, name, arguments.batch))
        bases = cnmem_bytes(trace.to_problem())
        for called in arguments.machines:
            slower = {"roofline": 1.0, "published": slowdown(name), "calibrated": factor}[called]
            machine = GTX_1080_TI.slowed(slower)
            row = {
                "network": name,
                "machine": called,
                "slowed": slower,
                **_measure(trace, machine, bases, arguments),
            }
            rows.append(row)
            print(_line(row), flush=True)
    write(
        "footprint", {k: v for k, v in vars(arguments).items() if k in ("batch", "trials")}, rows, device=None
    )


@dataclass(frozen=True, slots=True)
class _Combined:
    """Plans by their limit, each made once."""

    step: Step
    machine: Machine
    trials: int
    made: dict[int, tuple[float, int] | None] = field(default_factory=dict)

    def __call__(self, limit: int) -> tuple[float, int] | None:
        """Overhead and footprint; None where no swaps reach the limit."""
        if limit not in self.made:
            plan = self._plan(limit)
            found = None if plan is None else (plan.overhead, footprint(self.step, plan, pool.smartpool))
            self.made[limit] = found
        return self.made[limit]

    def _plan(self, limit: int) -> SwapPlan | None:
        try:
            plan = plan_swaps(self.step, limit, self.machine, trials=self.trials)
        except SwapLimitError:
            return None
        assert plan.timeline.over_bytes == 0
        return plan


def _measure(
    trace: StepTrace, machine: Machine, bases: dict[str, int], arguments: argparse.Namespace
) -> dict[str, Any]:
    step = swap_step(trace, operator_seconds(trace, machine))
    combined = _Combined(step, machine, arguments.trials)
    return {
        "peak_bytes": step.peak_bytes,
        "least_limit_bytes": least_limit(step),
        "step_seconds": step.total_seconds,
        "baselines": {
            name: {
                "bytes": nbytes,
                "less": _at(combined, nbytes, 1 - _LESS),
                "for_nothing": _most_saved(combined, nbytes, 0.0),
                "for_the_paper_s_overhead": _most_saved(combined, nbytes, _PAPER_OVERHEAD),
            }
            for name, nbytes in bases.items()
        },
    }


def _at(combined: _Combined, base: int, share: float, most: float = math.inf) -> dict[str, float] | None:
    """A plan whose footprint is at most ``share`` of ``base``, if there is one of at most that overhead.

    Limits below it leave room for gaps in the placement; the lower the limit, the longer the step. Of those that fit,
    the quickest of the first few: plans come from a search.
    """
    found: list[tuple[float, int]] = []
    for below in range(_TRIED):
        plan = combined(int((share - below * _STEP) * base))
        if plan is None or (plan[0] > most + _STEP and not found):
            break
        if plan[1] <= share * base:
            found.append(plan)
            if plan[0] <= 0.0 or len(found) == _FEW:
                break
    overhead, nbytes = min(found, default=(math.inf, 0))
    return {"overhead": overhead, "footprint_bytes": nbytes} if overhead <= most and found else None


def _most_saved(combined: _Combined, base: int, overhead: float) -> float:
    """The largest share of ``base`` that a plan of at most that overhead saves, in whole percent, by bisection."""
    low, high = 0, 100  # percent saved: `low` is to be had
    while high - low > 1:
        middle = (low + high) // 2
        fits = _at(combined, base, 1 - middle / 100, overhead) is not None
        low, high = (middle, high) if fits else (low, middle)
    return low / 100


def _line(row: dict[str, Any]) -> str:
    parts = []
    for name, found in row["baselines"].items():
        less = found["less"]
        costs = f"{100 * less['overhead']:.1f} %" if less else "-"
        parts.append(
            f"{name} {found['bytes'] / row['peak_bytes']:.3f} of the load: 60 % less costs {costs}, for nothing "
            f"{100 * found['for_nothing']:.0f} % less, for 15 % {100 * found['for_the_paper_s_overhead']:.0f} %"
        )
    return f"{row['machine']:10} {row['network']:9} " + "; ".join(parts)


if __name__ == "__main__":
    main()
