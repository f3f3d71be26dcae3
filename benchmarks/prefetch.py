"""Step time with and without prefetch, on a link whose transfers take as long as the operators, and half as long.

python -m benchmarks prefetch

A chain of Linear layers trains under a budget that holds a part of its weights. In one process, in turns: all of it
on the device without hetero; managed without prefetch; managed with it. No transfer can be hidden better than
``max(compute, transfer)``.

Needs the virtual accelerator, because its link can be set. Operators there run on the CPU, at whatever speed its
other users leave; so most of a layer's time is a pause, in which the processor is free as it is when a GPU
computes. ``max`` is then stable, and the copies do not compete with the operators for the processor.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import hetero
from benchmarks.record import median, write
from hetero.cli.placing import choose_device
from hetero.devices import virtual
from hetero.eviction import Links, Trace, lower_bound_seconds, plan

_LATENCY = 10e-6
_CALIBRATION_BANDWIDTH = 4e9
_WARM_UP = 4
_SHARES = (1.0, 0.5)


class Pause(torch.autograd.Function):
    """The identity; its forward takes ``seconds``, its backward twice as long."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:  # type: ignore[override]
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        time.sleep(2 * ctx.seconds)
        return gradient, None


class Layer(nn.Linear):
    """A small Linear and a pause: the pause begins when the operator has run, and so after its weights have come."""

    def __init__(self, width: int, seconds: float) -> None:
        super().__init__(width, width, bias=False)
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        paused: Tensor = Pause.apply(super().forward(x), self.seconds)
        return paused


class Job:
    """The same model again and again: forward, backward, SGD on the host's weights."""

    def __init__(
        self, device: torch.device, *, layers: int, width: int, seconds: float, trains: bool
    ) -> None:
        torch.manual_seed(0)
        self.device, self.trains = device, trains
        self.model = nn.Sequential(*(Layer(width, seconds) for _ in range(layers)))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-6, foreach=False)
        self.x = torch.randn(1, width).to(device)

    def step(self) -> None:
        if not self.trains:
            with torch.no_grad():
                self.model(self.x)
            return
        self.model(self.x).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def unmanaged(self, steps: int) -> list[float]:
        """Seconds of each step with all on the device, its parameters back home afterwards."""
        self.model.to(self.device)
        self.step()
        seconds = _timed(self.step, steps)
        self.model.to("cpu")
        return seconds

    def managed(self, steps: int, *, budget: int, prefetch: bool) -> tuple[list[float], dict[str, Any]]:
        """Seconds of each planned step, and what was planned and moved."""
        optimizer = self.optimizer if self.trains else None
        with hetero.manage(
            self.model, optimizer, device=self.device, device_budget=budget, prefetch=prefetch
        ) as manager:
            for _ in range(_WARM_UP):
                self.step()
            before = manager.stats
            seconds = _timed(self.step, steps)
            after = manager.stats
            cycle = manager._stm.cycles.last_plan
            assert cycle is not None
            links = manager._stm.cycles._links
            return seconds, {
                "fetched_bytes": (after.total_fetched_bytes - before.total_fetched_bytes) / steps,
                "written_bytes": (after.total_written_bytes - before.total_written_bytes) / steps,
                "unplanned_fetches": after.unplanned_fetches - before.unplanned_fetches,
                "planned_bytes": cycle.schedule.moved_bytes,
                "predicted_seconds": cycle.schedule.predicted_seconds,
                "trace": cycle.trace,
                "probed_bandwidth": links.h2d_bandwidth,
                "fetches": sum(len(actions.fetch) for actions in cycle.schedule.actions),
            }


def _timed(step: Callable[[], None], count: int) -> list[float]:
    """Steps in a row: a plan starts the next step's first copies in this one, so none is waited for in between."""
    seconds = []
    for _ in range(count):
        begin = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - begin)
    torch.accelerator.synchronize()
    return seconds


def main() -> None:
    arguments = _parse()
    torch.set_num_threads(1)
    device = choose_device(None)
    if device.type != "virtual":
        print(f"skipped: {device} has a link of its own, which cannot be set; benchmarks.sweep measures it")
        return
    rows = []
    for mode in ("inference", "training"):
        for share in _SHARES:
            row = _measure(mode, share, device, arguments)
            rows.append(row)
            print(
                f"{mode:10} transfer / compute {row['transfer_over_compute']:.2f}: max {row['max_seconds']:.3f} s, "
                f"without prefetch x {row['ratio_without_prefetch']:.3f}, with x {row['ratio_with_prefetch']:.3f} "
                f"(plan x {row['ratio_predicted']:.3f}, no schedule below x {row['ratio_least']:.3f})",
                flush=True,
            )
    write("prefetch", {**vars(arguments), "latency": _LATENCY, "bound_ratio": 1.05}, rows, device=device)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument(
        "--layer-seconds", type=float, default=0.008, help="a layer's pause in forward; backward twice"
    )
    parser.add_argument("--share", type=float, default=0.4, help="of the weights that the budget holds")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="timed per round and way")
    return parser.parse_args()


def _measure(mode: str, share: float, device: torch.device, arguments: argparse.Namespace) -> dict[str, Any]:
    """``share``: of the compute time that the busier direction's transfers are to take."""
    job = Job(
        device,
        layers=arguments.layers,
        width=arguments.width,
        seconds=arguments.layer_seconds,
        trains=mode == "training",
    )
    weights = sum(p.nbytes for p in job.model.parameters())
    budget = torch.accelerator.memory_allocated() + int(arguments.share * weights)
    virtual.set_link(bandwidth=_CALIBRATION_BANDWIDTH, latency=_LATENCY)
    compute = median(job.unmanaged(arguments.steps))
    # Operators' times are measured on a fast link, where waiting for gradients to leave does not add to them.
    _, fast = job.managed(arguments.steps, budget=budget, prefetch=False)
    busier = max(fast["fetched_bytes"], fast["written_bytes"])
    bandwidth = busier / (share * compute)
    virtual.set_link(bandwidth=bandwidth)
    seconds: dict[str, list[float]] = {"unmanaged": [], "without_prefetch": [], "with_prefetch": []}
    moved: dict[str, list[dict[str, Any]]] = {"without_prefetch": [], "with_prefetch": []}
    for _ in range(arguments.rounds):
        seconds["unmanaged"] += job.unmanaged(arguments.steps)
        for way, prefetch in (("without_prefetch", False), ("with_prefetch", True)):
            times, facts = job.managed(arguments.steps, budget=budget, prefetch=prefetch)
            del facts["trace"]
            seconds[way] += times
            moved[way].append(facts)
    medians = {way: median(times) for way, times in seconds.items()}
    # The yardstick counts the bytes of the schedule without prefetch: a plan that moves more pays for it itself.
    transfer = busier / bandwidth
    bound = max(medians["unmanaged"], transfer)
    links = Links(h2d_bandwidth=bandwidth, d2h_bandwidth=bandwidth, latency=_LATENCY)
    trace = _scaled(fast["trace"], medians["unmanaged"])
    predicted = plan(trace, links=links)
    return {
        "mode": mode,
        "transfer_over_compute": transfer / medians["unmanaged"],
        "bandwidth": bandwidth,
        "device_budget": budget,
        "weights_bytes": weights,
        "compute_seconds": medians["unmanaged"],
        "transfer_seconds": transfer,
        "max_seconds": bound,
        "ratio_without_prefetch": medians["without_prefetch"] / bound,
        "ratio_with_prefetch": medians["with_prefetch"] / bound,
        "ratio_predicted": predicted.predicted_seconds / bound,
        "ratio_least": lower_bound_seconds(trace, links) / bound,
        "medians": medians,
        "samples": seconds,
        "moved": moved,
    }


def _scaled(trace: Trace, seconds: float) -> Trace:
    """With operators that take ``seconds`` in all: each was measured once, on a machine with other users."""
    factor = seconds / sum(moment.seconds for moment in trace.moments)
    moments = tuple(replace(moment, seconds=factor * moment.seconds) for moment in trace.moments)
    return replace(trace, moments=moments)


if __name__ == "__main__":
    main()
