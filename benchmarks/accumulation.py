"""Step time with several micro-batches, on a link whose transfers take as long as the operators.

python -m benchmarks accumulation

A chain of Linear layers trains under a budget that holds a part of its weights; what each micro-batch contributes to a
gradient at home is added there. In one process, in turns: all on the device without hetero; managed, autograd adding in
backward, as it would by itself; managed, the queue's thread adding; the same with clipping by the norm.

Needs the virtual accelerator, because its link can be set.
"""

import contextlib
from functools import partial
from typing import Any
from unittest import mock

import torch

import hetero
from benchmarks.chain import CALIBRATION_BANDWIDTH, LATENCY, Chain, parse, settable_device, timed, traffic
from benchmarks.record import median, write
from hetero.devices import virtual
from hetero.stm.gradients.additions import Additions

_WARM_UP = 4
_MICRO_BATCHES = (1, 2, 4)


class Job:
    """The same model again and again: ``count`` times forward and backward, then SGD."""

    def __init__(self, device: torch.device, count: int, *, layers: int, width: int, seconds: float) -> None:
        self.device, self.count = device, count
        self.model = Chain(layers=layers, width=width, seconds=seconds)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-6, foreach=False)
        self.x = torch.randn(1, width).to(device)

    def step(self, *, clips: bool = False) -> None:
        for _ in range(self.count):
            self.model(self.x).sum().backward()
        if clips:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1e9)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def unmanaged(self, steps: int) -> list[float]:
        self.model.to(self.device)
        self.step()
        seconds = timed(self.step, steps)
        self.model.to("cpu")
        return seconds

    def managed(self, steps: int, way: str, *, budget: int) -> tuple[list[float], dict[str, Any]]:
        """Seconds of each planned step, and what moved in it."""
        adds = mock.patch.object(Additions, "begin", _refuse)
        with (
            adds if way == "autograd" else contextlib.nullcontext(),
            hetero.manage(self.model, self.optimizer, device=self.device, device_budget=budget) as manager,
        ):
            clips = way == "clipped"
            for _ in range(_WARM_UP):
                self.step(clips=clips)
            before = manager.stats
            seconds = timed(partial(self.step, clips=clips), steps)
            return seconds, traffic(before, manager.stats, steps)


def _refuse(*_: object) -> None:
    """No memory for what comes down: autograd has to add. (A mock of its own would remember gradients.)"""


_WAYS = ("autograd", "behind", "clipped")


def main() -> None:
    arguments = parse(__doc__, rounds=2, steps=2)
    device = settable_device()
    if device is None:
        return
    rows = []
    for count in _MICRO_BATCHES:
        job = Job(
            device, count, layers=arguments.layers, width=arguments.width, seconds=arguments.layer_seconds
        )
        budget = torch.accelerator.memory_allocated() + int(arguments.share * job.model.nbytes)
        virtual.set_link(bandwidth=CALIBRATION_BANDWIDTH, latency=LATENCY)
        compute = median(job.unmanaged(arguments.steps))
        _, moved = job.managed(1, "behind", budget=budget)
        busier = max(moved["fetched_bytes"], moved["written_bytes"])
        bandwidth = busier / compute
        virtual.set_link(bandwidth=bandwidth)
        seconds: dict[str, list[float]] = {way: [] for way in ("unmanaged", *_WAYS)}
        for _ in range(arguments.rounds):
            seconds["unmanaged"] += job.unmanaged(arguments.steps)
            for way in _WAYS:
                times, moved = job.managed(arguments.steps, way, budget=budget)
                seconds[way] += times
        medians = {way: median(times) for way, times in seconds.items()}
        longer = max(medians["unmanaged"], busier / bandwidth)
        ratios = {way: medians[way] / longer for way in _WAYS}
        rows.append(
            {
                "micro_batches": count,
                "bandwidth": bandwidth,
                "device_budget": budget,
                "weights_bytes": job.model.nbytes,
                "max_seconds": longer,
                "ratios": ratios,
                "medians": medians,
                "samples": seconds,
                "moved": moved,
            }
        )
        said = ", ".join(f"{way} x {ratio:.3f}" for way, ratio in ratios.items())
        print(f"{count} micro-batches: max {longer:.3f} s; {said}", flush=True)
    write("accumulation", {**vars(arguments), "latency": LATENCY}, rows, device=device)


if __name__ == "__main__":
    main()
