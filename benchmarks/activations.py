"""Step time where activations have to leave the device: hetero's plan beside two ways that move all of them.

python -m benchmarks activations

A chain of layers whose saved tensors are far larger than their weights runs forward and backward. Two yardsticks:
torch's `save_on_cpu` (every saved tensor goes to pinned memory and comes back when it is read), and swapping everything
beside compute (`benchmarks.swap_everything`). hetero gets the peak of each as its budget, and its plan's prediction is
beside what was measured. The weights of the yardsticks stay on the device, and so do their gradients.

Needs the virtual accelerator, because its link can be set. Most of a layer's time is a pause, in which the processor is
free as it is when a GPU computes (`benchmarks.chain`).
"""

import argparse
import contextlib
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import hetero
from benchmarks.chain import Pause
from benchmarks.record import median, write
from benchmarks.swap_everything import WAYS, Around
from hetero.cli.placing import choose_device
from hetero.devices import virtual

_LATENCY = 10e-6
_WARM_UP = 10  # measured, planned, timed, planned again


class Layer(nn.Module):
    """A small Linear, an activation function and a pause; saves two tensors of ``rows x width``."""

    def __init__(self, width: int, seconds: float) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        paused: Tensor = Pause.apply(self.linear(x).tanh(), self.seconds)
        return paused


class Job:
    """The same step again and again."""

    def __init__(self, device: torch.device, arguments: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.device = device
        layers = (Layer(arguments.width, arguments.layer_seconds) for _ in range(arguments.layers))
        self.model = nn.Sequential(*layers)
        self.batch = torch.randn(arguments.rows, arguments.width)

    def step(self, around: Around) -> None:
        with around():
            out = self.model(self.batch.to(self.device))
        out.backward(torch.ones_like(out))
        del out
        for parameter in self.model.parameters():
            parameter.grad = None

    def unmanaged(
        self, steps: int, way: Callable[[torch.device, nn.Module], Around]
    ) -> tuple[list[float], int]:
        """Seconds of each step, and the peak above what was in use before."""
        before = torch.accelerator.memory_allocated()
        self.model.to(self.device)
        around = way(self.device, self.model)
        self.step(around)
        torch.accelerator.reset_peak_memory_stats()
        seconds = timed(lambda: self.step(around), steps)
        peak = torch.accelerator.max_memory_allocated() - before
        self.model.to("cpu")
        return seconds, peak

    def managed(self, steps: int, budget: int) -> tuple[list[float], dict[str, Any]]:
        before = torch.accelerator.memory_allocated()
        torch.accelerator.reset_peak_memory_stats()
        with hetero.manage(self.model, device=self.device, device_budget=before + budget) as manager:
            for _ in range(_WARM_UP):
                self.step(contextlib.nullcontext)
            began = manager.stats
            seconds = timed(lambda: self.step(contextlib.nullcontext), steps)
            ended = manager.stats
            peak = torch.accelerator.max_memory_allocated() - before
            assert peak <= budget
        return seconds, {
            "peak_bytes": peak,
            "out_bytes": (ended.activation_out_bytes - began.activation_out_bytes) / steps,
            "in_bytes": (ended.activation_in_bytes - began.activation_in_bytes) / steps,
            "predicted_seconds": ended.predicted_seconds,
        }


def timed(step: Callable[[], None], count: int) -> list[float]:
    seconds = []
    for _ in range(count):
        begin = time.perf_counter()
        step()
        torch.accelerator.synchronize()
        seconds.append(time.perf_counter() - begin)
    return seconds


def main() -> None:
    arguments = _parse()
    torch.set_num_threads(1)
    device = choose_device(None)
    if device.type != "virtual":
        print(f"skipped: {device} has a link of its own, which cannot be set")
        return
    saved = 2 * arguments.rows * arguments.width * 4
    rows = []
    for share in (0.5, 1.0, 2.0):
        # ``share``: of a layer's forward time that its saved tensors take on the link.
        virtual.set_link(bandwidth=saved / (share * arguments.layer_seconds), latency=_LATENCY)
        row = _measure(Job(device, arguments), arguments)
        rows.append({"transfer_over_forward": share, **row})
        ways = ", ".join(f"{way} {median(times):.3f} s" for way, times in row["seconds"].items())
        print(f"transfer / forward {share}: {ways}", flush=True)
    write("activations", {**vars(arguments), "latency": _LATENCY}, rows, device=device)


def _measure(job: Job, arguments: argparse.Namespace) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {}
    peaks: dict[str, int] = {}
    facts: dict[str, list[dict[str, Any]]] = {}
    for _ in range(arguments.rounds):
        for name, way in WAYS.items():
            times, peak = job.unmanaged(arguments.steps, way)
            seconds.setdefault(name, []).extend(times)
            # The same budget in every round: a yardstick whose copies are late may need a little more in one.
            peaks.setdefault(name, peak)
            if name == "unmanaged":
                continue
            times, fact = job.managed(arguments.steps, peaks[name])
            seconds.setdefault(f"hetero_at_{name}", []).extend(times)
            facts.setdefault(f"hetero_at_{name}", []).append(fact)
    return {
        "medians": {way: median(times) for way, times in seconds.items()},
        "peak_bytes": peaks,
        "moved": facts,
        "seconds": seconds,
    }


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument(
        "--layer-seconds", type=float, default=0.012, help="a layer's pause in forward; backward twice"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="timed per round and way")
    return parser.parse_args()


if __name__ == "__main__":
    main()
