"""Step time with the optimizer's step on the host deferred, and done at once; clipping on.

python -m benchmarks host_step

The chain of layers of `benchmarks.chain`, trained with clipping by the global norm and an optimizer on the host that
takes a set time for each parameter. In one process, in turns: managed with deferral off, and with it on. Two
yardsticks:

* ``max``: of compute, the busier direction's transfers and the host's step. No run is faster.
* ``least``: the best that *exact* clipping allows. No update may begin before the last gradient's norm is known, no
  layer may be used before its update and upload; so what of step and uploads does not fit under one forward shows.

Operators and updates are mostly pauses, in which the processor is free, as it is when a GPU computes and as a host's
cores are when there are enough of them.
"""

import argparse
import time
from typing import Any

import torch

import hetero
from benchmarks.chain import CALIBRATION_BANDWIDTH, LATENCY, Chain, parse, settable_device, traffic
from benchmarks.record import median, write
from hetero.devices import virtual

_WARM_UP = 5


class SlowSGD(torch.optim.Optimizer):
    """SGD whose update of one parameter takes ``seconds`` more."""

    steps_parameters_independently = True

    def __init__(self, parameters: Any, lr: float, seconds: float) -> None:
        super().__init__(parameters, {"lr": lr, "seconds": seconds})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    time.sleep(group["seconds"])
                    parameter.add_(parameter.grad, alpha=-group["lr"])


class Job:
    """One model, again and again."""

    def __init__(self, device: torch.device, *, layers: int, width: int, seconds: float) -> None:
        self.device = device
        self.model = Chain(layers=layers, width=width, seconds=seconds)
        self.x = torch.randn(1, width).to(device)

    def managed(
        self, steps: int, *, budget: int, update_seconds: float, defers: bool
    ) -> tuple[list[float], dict[str, Any]]:
        """Seconds of each planned step, and what moved in one."""
        optimizer = SlowSGD(self.model.parameters(), lr=1e-6, seconds=update_seconds)
        with hetero.manage(self.model, optimizer, device=self.device, device_budget=budget) as manager:
            host_step = manager._host_step
            assert host_step is not None
            host_step.defers = defers
            for _ in range(_WARM_UP):
                self._step(optimizer)
            before = manager.stats
            queued = host_step.queued
            seconds = []
            # Looking at the statistics waited for what was queued: one more step, for what the first one takes over.
            self._step(optimizer)
            for _ in range(steps):
                begin = time.perf_counter()
                self._step(optimizer)
                seconds.append(time.perf_counter() - begin)
            after = manager.stats
            return seconds, {
                **traffic(before, after, steps + 1),
                "queued": (host_step.queued - queued) / (steps + 1),
            }

    def compute(self, steps: int) -> float:
        """Median seconds of forward and backward with all on the device."""
        self.model.to(self.device)
        seconds = []
        for _ in range(steps + 1):
            begin = time.perf_counter()
            self.model(self.x).sum().backward()
            self.model.zero_grad()
            seconds.append(time.perf_counter() - begin)
        self.model.to("cpu")
        return median(seconds[1:])

    def _step(self, optimizer: SlowSGD) -> None:
        self.model(self.x).sum().backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1e-3)
        optimizer.step()
        optimizer.zero_grad()


def least_seconds(*, layers: int, compute: float, update: float, upload: float, download: float) -> float:
    """Of one iteration: a chain of equal layers, backward twice as long as forward, each number a layer's."""
    forward = compute / 3
    down = 0.0  # downloads follow one another, each after its layer's backward; the first updates need the last ones
    arrived = []
    for layer in range(layers):
        down = max(down, (layer + 1) * 2 * forward) + download
        arrived.append(down)
    norm_known = layers * 2 * forward
    updated = sent = done = norm_known
    for layer in range(layers):
        updated = max(updated, arrived[layers - 1 - layer]) + update
        sent = max(sent, updated) + upload
        done = max(done, sent) + forward
    return done


def main() -> None:
    arguments = parse(__doc__, rounds=3, steps=4)
    device = settable_device()
    if device is None:
        return
    rows = []
    for share in (1.0, 1 / 3, 1 / 6):
        row = _measure(share, device, arguments)
        rows.append(row)
        print(
            f"transfer = step = {share:.2f} x compute: max {row['max_seconds']:.3f} s, at once x "
            f"{row['ratio_at_once']:.3f}, deferred x {row['ratio_deferred']:.3f} (exact clipping allows x "
            f"{row['ratio_least']:.3f}; deferred / that {row['ratio_deferred'] / row['ratio_least']:.3f})",
            flush=True,
        )
    write("host_step", {**vars(arguments), "latency": LATENCY}, rows, device=device)


def _measure(share: float, device: torch.device, arguments: argparse.Namespace) -> dict[str, Any]:
    """``share``: of the compute time that the busier direction's transfers, and the step, are to take."""
    job = Job(device, layers=arguments.layers, width=arguments.width, seconds=arguments.layer_seconds)
    budget = torch.accelerator.memory_allocated() + int(arguments.share * job.model.nbytes)
    virtual.set_link(bandwidth=CALIBRATION_BANDWIDTH, latency=LATENCY)
    compute = job.compute(arguments.steps)
    update = share * compute / arguments.layers
    _, fast = job.managed(arguments.steps, budget=budget, update_seconds=update, defers=False)
    busier = max(fast["fetched_bytes"], fast["written_bytes"])
    bandwidth = busier / (share * compute)
    virtual.set_link(bandwidth=bandwidth)
    ways = {"at_once": False, "deferred": True}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    moved: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    for _ in range(arguments.rounds):
        for way, defers in ways.items():
            times, facts = job.managed(arguments.steps, budget=budget, update_seconds=update, defers=defers)
            seconds[way] += times
            moved[way].append(facts)
    medians = {way: median(times) for way, times in seconds.items()}
    bound = max(compute, share * compute)
    copy = job.model.nbytes / arguments.layers / bandwidth
    least = least_seconds(
        layers=arguments.layers,
        compute=compute / arguments.layers,
        update=update,
        upload=copy,
        download=copy,
    )
    return {
        "share": share,
        "bandwidth": bandwidth,
        "device_budget": budget,
        "weights_bytes": job.model.nbytes,
        "compute_seconds": compute,
        "update_seconds": update,
        "max_seconds": bound,
        "least_seconds": least,
        "ratio_at_once": medians["at_once"] / bound,
        "ratio_deferred": medians["deferred"] / bound,
        "ratio_least": max(least, bound) / bound,
        "medians": medians,
        "samples": seconds,
        "moved": moved,
    }


if __name__ == "__main__":
    main()
