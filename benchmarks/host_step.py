"""Step time with the optimizer's step on the host: at once, deferred, on the device in part, and begun in backward.

python -m benchmarks host_step [--rows 1.0@0.4 ...]

The chain of layers of `benchmarks.chain`, trained with SGD and clipping by the global norm. In one process, in turns:

* ``at once``: deferral off.
* ``deferred``: the step is queued, and hides behind the next forward.
* ``homes``: the same, and the plan may let parameters live on the device, where they are stepped.
* ``tried``: deferred, and updates are begun in backward, as gradients come, and taken back if the step clips.
* ``both``: the last two together, which is what `hetero.manage` does by default.

A row ``S@B``: the busier direction's transfers take S times the compute time, and so does the host's step, with
everything at home; the device holds B of the weights. ``S@B!``: with a norm that clips every time, so that no update
can be begun early. ``S@B+C``: what a trial overwrites is copied first, which takes C times as long as its update. Two
yardsticks: ``max`` of compute, transfers and step; and the least that any schedule could reach
(`benchmarks.step_bounds`).

Emulated: operators and updates on the host are mostly pauses, in which the processor is free, as it is when a GPU
computes and as a host's cores are when there are enough of them. The device's arithmetic is quick: an update there
takes no pause. Nor does the copy that a trial makes of what it overwrites, but for ``+C``: where memory is what limits
the host, it takes about as long as the update of AdamW does (C = 1), and where there is bandwidth to spare, nothing.
"""

import argparse
import contextlib
import datetime
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

import hetero
from benchmarks.chain import CALIBRATION_BANDWIDTH, LATENCY, Chain, parser, settable_device, traffic
from benchmarks.record import commit, median, read, write
from benchmarks.step_bounds import Layers, least_seconds, least_with_homes
from hetero.devices import virtual
from hetero.stm.step import jobs, trials
from hetero.stm.updates import captured
from hetero.stm.updates.captured import ParameterUpdate

_WARM_UP = 24  # until times have been looked at again
# Of what `manage` is told, and whether the step is deferred.
_WAYS: dict[str, dict[str, Any]] = {
    "at once": {"device_homes": False, "speculate": False, "defers": False},
    "deferred": {"device_homes": False, "speculate": False, "defers": True},
    "homes": {"device_homes": True, "speculate": False, "defers": True},
    "tried": {"device_homes": False, "speculate": True, "defers": True},
    "both": {"defers": True},
}
_ROWS = ("1.0@0.4", "1.0@0.6", "1.0@0.8", "0.333@0.4", "0.167@0.4", "1.0@0.4!", "1.0@0.6+1.0")
_NEVER_CLIPS, _ALWAYS_CLIPS = 1e3, 1e-3


@contextlib.contextmanager
def slow_updates(seconds: float, *, copies: float) -> Iterator[None]:
    """An update on the host takes ``seconds`` more, and ``copies`` of them the copy that a trial begins with."""
    original, take = captured.run_together, trials.Snapshot.take

    def slow(batch: Sequence[ParameterUpdate]) -> None:
        time.sleep(seconds * sum(update._home.device.type == "cpu" for update in batch))
        original(batch)

    def slow_take(snapshot: trials.Snapshot) -> None:
        time.sleep(copies * seconds)
        take(snapshot)

    places: list[Any] = [captured, jobs]
    for module in places:
        module.run_together = slow
    snapshots: Any = trials.Snapshot
    snapshots.take = slow_take
    try:
        yield
    finally:
        snapshots.take = take
        for module in places:
            module.run_together = original


class Job:
    """One model, again and again."""

    def __init__(self, device: torch.device, *, layers: int, width: int, seconds: float) -> None:
        self.device = device
        self.model = Chain(layers=layers, width=width, seconds=seconds)
        self.layers = layers
        self.x = torch.randn(1, width).to(device)

    def managed(
        self, steps: int, *, budget: int, update_seconds: float, copies: float, most_norm: float, way: str
    ) -> tuple[list[float], dict[str, Any]]:
        """Seconds of each planned step, and what moved in one."""
        keywords = dict(_WAYS[way])
        defers = keywords.pop("defers")
        optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-6)
        if not defers:  # torch's own step has them all
            optimizer.register_step_pre_hook(lambda *_: time.sleep(update_seconds * self.layers))
        manager = hetero.manage(self.model, optimizer, device=self.device, device_budget=budget, **keywords)
        with slow_updates(update_seconds, copies=copies), manager:
            host_step = manager._host_step
            assert host_step is not None
            host_step.defers = defers
            for _ in range(_WARM_UP):
                self._step(optimizer, most_norm)
            before, queued = manager.stats, host_step.queued
            seconds = []
            # Looking at the statistics waited for what was queued: one more step, for what the first one takes over.
            self._step(optimizer, most_norm)
            for _ in range(steps):
                begin = time.perf_counter()
                self._step(optimizer, most_norm)
                seconds.append(time.perf_counter() - begin)
            after = manager.stats
            return seconds, {
                **traffic(before, after, steps + 1),
                "queued": (host_step.queued - queued) / (steps + 1),
                "tried": (after.tried_updates - before.tried_updates) / (steps + 1),
                "taken_back": (after.taken_back_updates - before.taken_back_updates) / (steps + 1),
                "snapshot_bytes": host_step.speculation.snapshots.nbytes,
                "on_device": len(host_step.on_device),
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

    def _step(self, optimizer: torch.optim.SGD, most_norm: float) -> None:
        self.model(self.x).sum().backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), most_norm)
        optimizer.step()
        optimizer.zero_grad()


def main() -> None:
    arguments_parser = parser(__doc__, rounds=2, steps=4)
    arguments_parser.add_argument(
        "--rows", nargs="+", default=list(_ROWS), help=f"of {', '.join(_ROWS)}, or alike"
    )
    arguments = arguments_parser.parse_args()
    device = settable_device()
    if device is None:
        return
    record = read("host_step")
    rows = {row["row"]: row for row in (record["results"] if record else []) if "row" in row}
    for name in arguments.rows:
        rows[name] = row = _measure(name, device, arguments)
        print(_line(row), flush=True)
    parameters = {
        key: value for key, value in vars(arguments).items() if key not in ("rows", "layer_seconds")
    }
    write("host_step", {**parameters, "latency": LATENCY}, list(rows.values()), device=device)


def _line(row: dict[str, Any]) -> str:
    ratios = ", ".join(
        f"{way} x {ratio:.3f}" + (f" (least {row['least'][way]:.3f})" if way in row["least"] else "")
        for way, ratio in row["ratios"].items()
    )
    return f"{row['row']}: max {row['max_seconds']:.3f} s; {ratios}"


def _measure(name: str, device: torch.device, arguments: argparse.Namespace) -> dict[str, Any]:
    clips, (load, _, copies) = name.endswith("!"), name.rstrip("!").partition("+")
    share, held = map(float, load.split("@"))
    most_norm = _ALWAYS_CLIPS if clips else _NEVER_CLIPS
    job = Job(device, layers=arguments.layers, width=arguments.width, seconds=arguments.layer_seconds)
    budget = torch.accelerator.memory_allocated() + int(held * job.model.nbytes)
    virtual.set_link(bandwidth=CALIBRATION_BANDWIDTH, latency=LATENCY)
    compute = job.compute(arguments.steps)
    update = share * compute / arguments.layers

    def run(way: str, steps: int) -> tuple[list[float], dict[str, Any]]:
        return job.managed(
            steps,
            budget=budget,
            update_seconds=update,
            copies=float(copies or 0),
            most_norm=most_norm,
            way=way,
        )

    _, fast = run("deferred", 1)
    bandwidth = max(fast["fetched_bytes"], fast["written_bytes"]) / (share * compute)
    virtual.set_link(bandwidth=bandwidth)
    seconds: dict[str, list[float]] = {way: [] for way in _WAYS}
    moved: dict[str, list[dict[str, Any]]] = {way: [] for way in _WAYS}
    for _ in range(arguments.rounds):
        for way in _WAYS:
            times, facts = run(way, arguments.steps)
            seconds[way] += times
            moved[way].append(facts)
    bound = max(compute, share * compute)
    medians = {way: median(times) for way, times in seconds.items()}
    copy = job.model.nbytes / arguments.layers / bandwidth
    layers = Layers(
        count=arguments.layers,
        compute=compute / arguments.layers,
        update=update,
        upload=copy,
        download=copy,
        room=int(held * arguments.layers),
    )
    return {
        "row": name,
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "load": round(os.getloadavg()[0], 2),
        "share": share,
        "held": held,
        "clips": clips,
        "copies": float(copies or 0),
        "layer_seconds": arguments.layer_seconds,
        "bandwidth": bandwidth,
        "device_budget": budget,
        "weights_bytes": job.model.nbytes,
        "compute_seconds": compute,
        "update_seconds": update,
        "max_seconds": bound,
        "ratios": {way: value / bound for way, value in medians.items()},
        "least": {way: max(seconds, bound) / bound for way, seconds in _least(layers, clips=clips).items()},
        "medians": medians,
        "samples": seconds,
        "moved": moved,
    }


def _least(layers: Layers, *, clips: bool) -> dict[str, float]:
    ways: dict[str, Callable[[bool], float]] = {
        "deferred": lambda early: least_seconds(layers, speculates=False),
        "homes": lambda early: least_with_homes(layers, speculates=False)[0],
        "tried": lambda early: least_seconds(layers, speculates=early),
        "both": lambda early: least_with_homes(layers, speculates=early)[0],
    }
    return {way: least(not clips) for way, least in ways.items()}


if __name__ == "__main__":
    main()
