"""Step time with and without prefetch, on a link whose transfers take as long as the operators, and half as long.

python -m benchmarks prefetch

A chain of Linear layers trains under a budget that holds a part of its weights. In one process, in turns: all of it
on the device without hetero; managed without prefetch; managed with it. No transfer can be hidden better than
``max(compute, transfer)``.

On the virtual accelerator the link is set to that speed; a real device's is what it is, so there the operators are made
as slow (`benchmarks.chain`). The host's step is the host's: on a real device it may be the longest of the three, and
counts in the bound.
"""

import argparse
from dataclasses import replace
from typing import Any

import torch

import hetero
from benchmarks.chain import CALIBRATION_BANDWIDTH, LATENCY, Chain, Layer, parse, timed, traffic
from benchmarks.record import median, write
from hetero.cli.placing import choose_device
from hetero.devices import virtual
from hetero.eviction import Links, Trace, lower_bound_seconds, plan

_WARM_UP = 4  # steps; on a real device more, so that who lives there has been chosen
_WARM_UP_THERE = 12
_SHARES = (1.0, 0.5)


class Job:
    """The same model again and again: forward, backward, SGD on the host's weights."""

    def __init__(
        self, device: torch.device, *, layers: int, width: int, seconds: float, trains: bool
    ) -> None:
        self.device, self.trains = device, trains
        self.model = Chain(layers=layers, width=width, seconds=seconds)
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

    def take(self, seconds: float, measured: float) -> None:
        """Let a step's operators take ``seconds``; it has been ``measured`` as it is."""
        pauses = len(self.model) * (3 if self.trains else 1)
        for layer in self.model:
            assert isinstance(layer, Layer)
            layer.seconds = max(0.0, layer.seconds + (seconds - measured) / pauses)

    def host_step(self, steps: int) -> float:
        """Median seconds of an optimizer's step at home."""
        if not self.trains:
            return 0.0
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        seconds = timed(self.optimizer.step, steps)
        self.optimizer.zero_grad()
        return median(seconds)

    def unmanaged(self, steps: int) -> list[float]:
        """Seconds of each step with all on the device, its parameters back home afterwards."""
        self.model.to(self.device)
        self.step()
        seconds = timed(self.step, steps)
        self.model.to("cpu")
        return seconds

    def managed(self, steps: int, *, budget: int, prefetch: bool) -> tuple[list[float], dict[str, Any]]:
        """Seconds of each planned step, and what was planned and moved."""
        optimizer = self.optimizer if self.trains else None
        with hetero.manage(
            self.model, optimizer, device=self.device, device_budget=budget, prefetch=prefetch
        ) as manager:
            for _ in range(_WARM_UP if self.device.type == "virtual" else _WARM_UP_THERE):
                self.step()
            before = manager.stats
            seconds = timed(self.step, steps)
            after = manager.stats
            cycle = manager._stm.plans.last
            assert cycle is not None
            links = manager._stm.plans.timings.links(cycle.keys)
            return seconds, {
                **traffic(before, after, steps),
                "planned_bytes": cycle.schedule.moved_bytes,
                "predicted_seconds": cycle.schedule.predicted_seconds,
                "trace": cycle.trace,
                "probed_bandwidth": links.h2d_bandwidth,
                "probed_bandwidth_down": links.d2h_bandwidth,
                "fetches": sum(len(actions.fetch) for actions in cycle.schedule.actions),
            }


def main() -> None:
    device = choose_device(None)
    is_real = device.type != "virtual"
    arguments = parse(__doc__, rounds=5, steps=3, width=4096 if is_real else 512)
    if not is_real:
        torch.set_num_threads(1)
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
    write("prefetch", {**vars(arguments), "latency": LATENCY, "bound_ratio": 1.05}, rows, device=device)


def _measure(mode: str, share: float, device: torch.device, arguments: argparse.Namespace) -> dict[str, Any]:
    """``share``: of the compute time that the busier direction's transfers are to take."""
    job = Job(
        device,
        layers=arguments.layers,
        width=arguments.width,
        seconds=arguments.layer_seconds,
        trains=mode == "training",
    )
    budget = torch.accelerator.memory_allocated() + int(arguments.share * job.model.nbytes)
    is_real = device.type != "virtual"
    if not is_real:
        virtual.set_link(bandwidth=CALIBRATION_BANDWIDTH, latency=LATENCY)
    compute = median(job.unmanaged(arguments.steps))
    # Operators' times are measured on a fast link, where waiting for gradients to leave does not add to them.
    _, fast = job.managed(arguments.steps, budget=budget, prefetch=False)
    busier = max(fast["fetched_bytes"], fast["written_bytes"])
    host = 0.0
    if is_real:
        is_up = busier == fast["fetched_bytes"]
        bandwidth = fast["probed_bandwidth" if is_up else "probed_bandwidth_down"]
        job.take(busier / bandwidth / share, compute)
        host = job.host_step(arguments.steps)
    else:
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
    bound = max(medians["unmanaged"], transfer, host)
    links = Links(h2d_bandwidth=bandwidth, d2h_bandwidth=bandwidth, latency=LATENCY)
    trace = scaled(fast["trace"], medians["unmanaged"])
    predicted = plan(trace, links=links)
    return {
        "mode": mode,
        "transfer_over_compute": transfer / medians["unmanaged"],
        "bandwidth": bandwidth,
        "device_budget": budget,
        "weights_bytes": job.model.nbytes,
        "compute_seconds": medians["unmanaged"],
        "transfer_seconds": transfer,
        "host_step_seconds": host if is_real else None,
        "max_seconds": bound,
        "ratio_without_prefetch": medians["without_prefetch"] / bound,
        "ratio_with_prefetch": medians["with_prefetch"] / bound,
        "ratio_predicted": predicted.predicted_seconds / bound,
        "ratio_least": lower_bound_seconds(trace, links) / bound,
        "medians": medians,
        "samples": seconds,
        "moved": moved,
    }


def scaled(trace: Trace, seconds: float) -> Trace:
    """With operators that take ``seconds`` in all: each was measured once, on a machine with other users."""
    factor = seconds / sum(moment.seconds for moment in trace.moments)
    moments = tuple(
        replace(
            moment,
            seconds=factor * moment.seconds,
            sends=tuple(replace(send, seconds=factor * send.seconds) for send in moment.sends),
        )
        for moment in trace.moments
    )
    return replace(trace, moments=moments)


if __name__ == "__main__":
    main()
