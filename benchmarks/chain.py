"""A chain of layers that mostly pause, on a link that can be set: what step times are measured on.

Operators on the virtual accelerator run on the CPU, at whatever speed its other users leave; so most of a layer's time
is a pause, in which the processor is free as it is when a GPU computes: for copies, and for the host's own work, which
goes on until an operator has to run. Times are then stable, and the copies do not compete with the operators for the
processor.

A real device's link is as fast as it is; there, pauses (kernels that spin) are set instead, to as long as transfers
take.
"""

import argparse
import functools
import itertools
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hetero.cli.placing import choose_device
from hetero.devices import virtual
from hetero.report import MemoryStats

__all__ = [
    "CALIBRATION_BANDWIDTH",
    "LATENCY",
    "Chain",
    "Layer",
    "parse",
    "parser",
    "settable_device",
    "timed",
    "traffic",
]

LATENCY = 10e-6
# Bytes moved are counted on a link this fast; then it is set so that their transfer takes the time that is wanted.
CALIBRATION_BANDWIDTH = 4e9


class Pause(torch.autograd.Function):
    """The identity; its forward takes ``seconds``, its backward twice as long.

    As a kernel does: it begins after what compute has been told to wait for, and the host goes on at once.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        _keep_busy(x.device, seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        _keep_busy(gradient.device, 2 * ctx.seconds)
        return gradient, None


def _keep_busy(device: torch.device, seconds: float) -> None:
    if device.type == "virtual":
        virtual.keep_busy(seconds)
    else:
        torch.cuda._sleep(int(seconds * _cycles_per_second()))


@functools.cache
def _cycles_per_second() -> float:
    """Of the current device, at the speed to which it has sped up."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    cycles = 1 << 28
    torch.cuda._sleep(cycles)
    begin.record()
    torch.cuda._sleep(cycles)
    end.record()
    end.synchronize()
    return float(cycles / max(begin.elapsed_time(end) / 1e3, 1e-6))


class Layer(nn.Linear):
    """A small Linear and a pause: the pause begins when the operator has run, and so after its weights have come."""

    def __init__(self, width: int, seconds: float) -> None:
        super().__init__(width, width, bias=False)
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        paused: Tensor = Pause.apply(super().forward(x), self.seconds)
        return paused


class Chain(nn.Sequential):
    """``layers`` of them; the same weights every time."""

    def __init__(self, *, layers: int, width: int, seconds: float) -> None:
        torch.manual_seed(0)
        super().__init__(*(Layer(width, seconds) for _ in range(layers)))
        self.nbytes = sum(p.nbytes for p in self.parameters())


def settable_device() -> torch.device | None:
    """The virtual accelerator, and one thread for its operators; None, after saying so, where there is a real one."""
    torch.set_num_threads(1)
    device = choose_device(None)
    if device.type == "virtual":
        return device
    print(f"skipped: {device} has a link of its own, which cannot be set; benchmarks.prefetch measures it")
    return None


def parse(description: str | None, *, rounds: int, steps: int, width: int = 512) -> argparse.Namespace:
    """The chain's size and how often it is timed; ``rounds``, ``steps`` and ``width`` unless told otherwise."""
    arguments = parser(description, rounds=rounds, steps=steps, width=width)
    arguments.add_argument("--share", type=float, default=0.4, help="of the weights that the budget holds")
    return arguments.parse_args()


def parser(description: str | None, *, rounds: int, steps: int, width: int = 512) -> argparse.ArgumentParser:
    """What `parse` parses with, less the budget."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=width)
    parser.add_argument(
        "--layer-seconds", type=float, default=0.008, help="a layer's pause in forward; backward twice"
    )
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--steps", type=int, default=steps, help="timed per round and way")
    return parser


def traffic(before: MemoryStats, after: MemoryStats, steps: int) -> dict[str, Any]:
    """What moved in each of ``steps``, bytes."""
    return {
        "fetched_bytes": (after.total_fetched_bytes - before.total_fetched_bytes) / steps,
        "written_bytes": (after.total_written_bytes - before.total_written_bytes) / steps,
        "unplanned_fetches": after.unplanned_fetches - before.unplanned_fetches,
    }


def timed(step: Callable[[], None], count: int) -> list[float]:
    """Seconds of each of ``count`` steps in a row: a plan starts the next step's first copies in this one, so none is
    waited for in between. A real device runs behind the host: there, from the end of one step on it to the next's."""
    device = torch.accelerator.current_accelerator()
    assert device is not None
    marks, events = [time.perf_counter()], [_event_now(device)]
    for _ in range(count):
        step()
        marks.append(time.perf_counter())
        events.append(_event_now(device))
    torch.accelerator.synchronize()
    if device.type == "virtual":
        return [end - begin for begin, end in itertools.pairwise(marks)]
    return [begin.elapsed_time(end) / 1e3 for begin, end in itertools.pairwise(events)]


def _event_now(device: torch.device) -> torch.Event:
    event = torch.Event(device=device, enable_timing=True)
    event.record()
    return event
