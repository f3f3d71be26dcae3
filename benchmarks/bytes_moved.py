"""Bytes that each policy moves on traces of real models, against the least that any schedule could (interval LP).

python -m benchmarks bytes

Each model is managed with room for everything, trained a few steps, and its trace taken. That trace is planned anew
with the model data allowed on the device set to 80 to 20 % of the parameters' bytes. Gradients leave in any case
and are not counted here. With prefetch a plan may move more in order to be sooner; for that, the link is
such that the least bytes take as long as the operators.

``measured``: the running manager, under device budgets that leave that share of the parameters beside the model's
own activations; its bytes over its own trace's bound, once the plan has stayed the same for some steps (until then
times are measured, and plans made anew with them; ``settling`` has the bytes of those steps). Only copies of parameters
move here: activations, device homes and updates begun in backward are switched off.
"""

import argparse
from dataclasses import dataclass, replace
from typing import Any

import torch

import hetero
from benchmarks.models import MODELS, adamw
from benchmarks.record import write
from hetero.cli.placing import choose_device
from hetero.eviction import Links, Trace, check, lower_bound, lower_bound_seconds, plan, simulate
from hetero.stm.plans.plan import CyclePlan

_POLICIES = ("opt", "cost-opt", "lru", "fifo")
_SHARES = (0.8, 0.6, 0.4, 0.3, 0.2)
_LATENCY = 10e-6
_STEPS = 4
_MEASURED_STEPS = 3
_SAME, _MOST = 4, 30
# What else would leave or stay has bounds of its own (`manager.plan`, `benchmarks.activations`).
_COPIES_ALONE: dict[str, Any] = {"activations": False, "device_homes": False, "speculate": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """One model's trace, and the most that everything but parameters takes on the device."""

    trace: Trace
    non_model_bytes: int
    gradient_reserve: int

    @property
    def parameter_bytes(self) -> int:
        return sum(self.trace.sizes)


def main() -> None:
    arguments = _parse()
    torch.set_num_threads(1)
    device = choose_device(None)
    planned, measured = [], []
    for name in arguments.models:
        recorded = _record(name, device)
        moments = recorded.trace.moments
        accesses = sum(len(moment.operands) for moment in moments)
        print(f"{name}: {recorded.parameter_bytes} bytes of parameters, {accesses} accesses", flush=True)
        for share in _SHARES:
            rows = _planned(name, recorded, share)
            planned += rows
            print(f"  {share:.0%} " + "  ".join(_cell(row) for row in rows), flush=True)
        for share in arguments.measure:
            for policy in _POLICIES:
                for prefetch in (False, True):
                    row = _measured(name, device, recorded, share, policy, prefetch=prefetch)
                    measured.append(row)
                    print(f"  measured {share:.0%} {_measured_cell(row)}", flush=True)
    parameters = {
        "shares": _SHARES,
        "measured_shares": arguments.measure,
        "latency": _LATENCY,
        "models": arguments.models,
        "bound_ratio": 1.02,
    }
    write("bytes", parameters, {"planned": planned, "measured": measured}, device=device)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument(
        "--measure", nargs="*", type=float, default=[0.6, 0.3], help="shares to run, not only plan"
    )
    return parser.parse_args()


def _record(name: str, device: torch.device) -> Recorded:
    with _Run(name, device, budget="2GiB") as run:
        cycle, stats = run.until_planned(), run.manager.stats
        return Recorded(
            trace=cycle.trace,
            non_model_bytes=max(period.device_non_model_bytes for period in stats.periods),
            gradient_reserve=max(way.begin for way in cycle.gradient_reserves),
        )


class _Run:
    """A model under management, from the same seed every time."""

    def __init__(self, name: str, device: torch.device, *, budget: int | str, **keywords: Any) -> None:
        build, self._loss = MODELS[name]
        torch.manual_seed(0)
        self._model = build()
        self._optimizer = adamw(self._model)
        self._device = device
        self.manager = hetero.manage(
            self._model, self._optimizer, device=device, device_budget=budget, **_COPIES_ALONE, **keywords
        )

    def __enter__(self) -> "_Run":
        return self

    def __exit__(self, *_: object) -> None:
        self.manager.close()

    def steps(self, count: int) -> None:
        for _ in range(count):
            self._loss(self._model, self._device).backward()
            self._optimizer.step()
            self._optimizer.zero_grad()

    def until_planned(self) -> CyclePlan:
        """Experts take another path now and then, and such an iteration is measured again."""
        self.steps(_STEPS)
        while self.manager._stm.plans.last is None:
            self.steps(1)
        return self.manager._stm.plans.last

    def until_settled(self) -> list[int]:
        """Bytes fetched by each step until the plan has stayed the same for `_SAME`, or `_MOST` have passed."""
        fetched: list[int] = []
        same = 0
        while same < _SAME and len(fetched) < _MOST:
            before = self.manager._stm.plans.last
            fetched.append(self.step_fetching())
            after = self.manager._stm.plans.last
            same = same + 1 if after is before and after is not None else 0
        return fetched

    def step_fetching(self) -> int:
        """One step; the bytes that it has fetched."""
        begin = self.manager.stats.total_fetched_bytes
        self.steps(1)
        return self.manager.stats.total_fetched_bytes - begin


def _at(trace: Trace, share: float) -> Trace:
    """The trace with this share of its bytes allowed on the device, or what one operator needs if that is more."""
    capacity = int(share * sum(trace.sizes))
    moments = []
    for moment in trace.moments:
        needed = sum(trace.sizes[tensor] for tensor in set(moment.operands))
        moments.append(replace(moment, capacity=max(capacity, needed)))
    return replace(trace, moments=tuple(moments))


def _planned(name: str, recorded: Recorded, share: float) -> list[dict[str, Any]]:
    trace = _at(recorded.trace, share)
    least = lower_bound(trace)
    compute = sum(moment.seconds for moment in trace.moments)
    bandwidth = least / compute
    links = Links(h2d_bandwidth=bandwidth, d2h_bandwidth=bandwidth, latency=_LATENCY)
    soonest = lower_bound_seconds(trace, links)
    rows = []
    for policy in _POLICIES:
        for prefetch in (False, True):
            schedule = plan(trace, links=links, policy=policy, prefetch=prefetch)
            check(trace, schedule)
            simulation = simulate(trace, schedule, links)
            rows.append(
                {
                    "model": name,
                    "share": share,
                    "policy": policy,
                    "prefetch": prefetch,
                    "parameter_bytes": recorded.parameter_bytes,
                    "accesses": sum(len(moment.operands) for moment in trace.moments),
                    "moved_bytes": schedule.moved_bytes,
                    "lower_bound_bytes": least,
                    "ratio": schedule.moved_bytes / least,
                    "predicted_over_max": simulation.step_seconds / simulation.bound_seconds,
                    "predicted_over_least_seconds": simulation.step_seconds / soonest,
                }
            )
    return rows


def _measured(
    name: str, device: torch.device, recorded: Recorded, share: float, policy: str, *, prefetch: bool
) -> dict[str, Any]:
    budget = (
        torch.accelerator.memory_allocated()
        + recorded.non_model_bytes
        + recorded.gradient_reserve
        + int(share * recorded.parameter_bytes)
    )
    with _Run(name, device, budget=budget, policy=policy, prefetch=prefetch) as run:
        cycle = run.until_planned()
        settling = run.until_settled()
        before = run.manager.stats
        fetched = [run.step_fetching() for _ in range(_MEASURED_STEPS)]
        after = run.manager.stats
        cycle = run.manager._stm.plans.last or cycle
        trace, schedule = cycle.trace, cycle.schedule
        least = lower_bound(trace)
        return {
            "model": name,
            "share": share,
            "policy": policy,
            "prefetch": prefetch,
            "device_budget": budget,
            "peak_device_bytes": after.peak_device_bytes,
            "settling": settling,
            "fetched_bytes": fetched,
            "planned_bytes": schedule.moved_bytes,
            "lower_bound_bytes": least,
            "unplanned_fetches": after.unplanned_fetches - before.unplanned_fetches,
            "ratio": sum(fetched) / len(fetched) / least,
            "planned_ratio": schedule.moved_bytes / least,
        }


def _cell(row: dict[str, Any]) -> str:
    late = "+" if row["prefetch"] else "-"
    return f"{row['policy']}{late} {row['ratio']:.3f}"


def _measured_cell(row: dict[str, Any]) -> str:
    return (
        f"{row['policy']}{'+' if row['prefetch'] else '-'}: moved / bound {row['ratio']:.3f} (planned "
        f"{row['planned_ratio']:.3f}), {row['unplanned_fetches']} unplanned fetches, peak / budget "
        f"{row['peak_device_bytes'] / row['device_budget']:.3f}"
    )


if __name__ == "__main__":
    main()
