"""One training step in the ways that `benchmarks.activations` and `benchmarks.activations_models` compare.

Owns the loop. Unmanaged ways keep weights, gradients and optimizer states on the device; hetero gets the peak of each
yardstick as its budget, parameters included, and its plan's prediction is kept beside what was measured.
"""

import contextlib
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import hetero
from benchmarks.record import median
from benchmarks.swap_everything import WAYS, Around

__all__ = ["LATENCY", "Job", "lines", "measure", "timed"]

LATENCY = 10e-6
# Measured, planned, timed, planned again; what lives on the device has been on trial, and, if it was in vain, the
# iterations without it have been timed again; and all have been looked at again eight iterations later.
_WARM_UP = 28

# On a real device blocks are up to 1 MiB larger than what was asked for, and a warm-up's cap is on segments.
_GAPS = 22 << 20

Way = Callable[[torch.device, nn.Module], Around]


class Job:
    """One model and how it is trained; the same weights every time. ``loss(model, device)``: a forward, its result a
    scalar. ``optimizer`` None: gradients are dropped."""

    def __init__(
        self,
        device: torch.device,
        build: Callable[[], nn.Module],
        loss: Callable[[nn.Module, torch.device], Tensor],
        optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
    ) -> None:
        self.device = device
        self.build = build
        self.loss = loss
        self.make_optimizer = optimizer

    def unmanaged(self, steps: int, way: Way) -> tuple[list[float], int]:
        """Seconds of each step, and the peak above what was in use before."""
        before = torch.accelerator.memory_allocated()
        model = self._model().to(self.device)
        step = self._step(model, self._optimizer(model), way(self.device, model))
        step()
        torch.accelerator.reset_peak_memory_stats()
        seconds = timed(step, steps)
        return seconds, torch.accelerator.max_memory_allocated() - before

    def managed(self, steps: int, budget: int) -> tuple[list[float], dict[str, Any]]:
        """Seconds of each step, and what was planned and moved in it; the peak is within ``budget``."""
        before = torch.accelerator.memory_allocated()
        model = self._model()
        optimizer = self._optimizer(model)
        step = self._step(model, optimizer, contextlib.nullcontext)
        torch.accelerator.reset_peak_memory_stats()
        with hetero.manage(model, optimizer, device=self.device, device_budget=before + budget) as manager:
            timed(step, _WARM_UP)
            began = manager.stats
            seconds = timed(step, steps)
            ended, plan = manager.stats, manager.plan
            peak = torch.accelerator.max_memory_allocated() - before
        assert peak <= budget + (_GAPS if self.device.type != "virtual" else 0)
        assert plan is not None
        return seconds, {
            "peak_bytes": peak,
            "out_bytes": (ended.activation_out_bytes - began.activation_out_bytes) / steps,
            "in_bytes": (ended.activation_in_bytes - began.activation_in_bytes) / steps,
            "fetched_bytes": (ended.total_fetched_bytes - began.total_fetched_bytes) / steps,
            "lives_on_device": len(plan.lives_on_device),
            "predicted_seconds": plan.predicted_seconds,
            "measured_over_predicted": median(seconds) / plan.predicted_seconds,
        }

    def _model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.build()

    def _optimizer(self, model: nn.Module) -> torch.optim.Optimizer | None:
        return None if self.make_optimizer is None else self.make_optimizer(model)

    def _step(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None, around: Around
    ) -> Callable[[], None]:
        def step() -> None:
            with around():
                loss = self.loss(model, self.device)
            loss.backward()
            del loss
            if optimizer is not None:
                optimizer.step()
            for parameter in model.parameters():
                parameter.grad = None

        return step


def timed(step: Callable[[], None], count: int) -> list[float]:
    """Seconds of each of ``count`` steps, until compute has come to its end, as for a loss that is printed.

    Copies for the next step are not waited for, because nothing in training does; what is left of a step to be done
    counts in the next one.
    """
    seconds = []
    compute = torch.accelerator.current_stream()
    for _ in range(count):
        begin = time.perf_counter()
        step()
        compute.synchronize()
        seconds.append(time.perf_counter() - begin)
    return seconds


def measure(job: Job, *, rounds: int, steps: int) -> dict[str, Any]:
    """All ways in turns. What the machine varies by is seen in the unmanaged steps, before and after the others."""
    seconds: dict[str, list[float]] = {}
    peaks: dict[str, int] = {}
    facts: dict[str, list[dict[str, Any]]] = {}
    for _ in range(rounds):
        for name, way in (*WAYS.items(), ("unmanaged", WAYS["unmanaged"])):
            times, peak = job.unmanaged(steps, way)
            seconds.setdefault(name, []).extend(times)
            # The same budget in every round: a yardstick whose copies are late may need a little more in one.
            peaks.setdefault(name, peak)
            if name == "unmanaged":
                continue
            times, fact = job.managed(steps, peaks[name])
            seconds.setdefault(f"hetero_at_{name}", []).extend(times)
            facts.setdefault(f"hetero_at_{name}", []).append(fact)
    return {
        "medians": {way: median(times) for way, times in seconds.items()},
        "spread": {way: [min(times), max(times)] for way, times in seconds.items()},
        "peak_bytes": peaks,
        "moved": facts,
        "seconds": seconds,
    }


def lines(row: dict[str, Any]) -> str:
    """What `measure` found, to be read."""
    found = [", ".join(f"{way} {seconds:.3f} s" for way, seconds in row["medians"].items())]
    low, high = row["spread"]["unmanaged"]
    found.append(f"  unmanaged steps from {low:.3f} to {high:.3f} s")
    for way, facts in row["moved"].items():
        ratios = [round(fact["measured_over_predicted"], 3) for fact in facts]
        found.append(f"  {way}: measured / predicted {ratios}")
    return "\n".join(found)
