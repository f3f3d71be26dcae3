"""Batches of one shape, of many lengths, and of equal tokens: how long until steps are as fast as with one shape.

python -m benchmarks lengths

A small Llama trains on the same batches unmanaged and managed, in one process, in turns of a few steps each, under a
budget of a part of what unmanaged takes for the largest batch. Reported by windows of steps: seconds of a step over
unmanaged's (median; in brackets mean, in which planning takes part), bytes moved a step, fetches that no plan foresaw;
at the end, how many plans there are, and peak against budget. Losses have to be equal; if not, the exit code is 1.
"""

import argparse
import random
import sys
import time
from itertools import pairwise
from typing import Any

import torch
from torch import nn

import hetero
from benchmarks.models import MODELS, adamw
from benchmarks.record import median, write
from hetero.cli.placing import choose_device

Shape = tuple[int, int]

_VOCABULARY = 512
_LONGEST = 72
_WINDOWS = (0, 10, 50, 100, 150)


def _one(_: random.Random) -> Shape:
    return 4, _LONGEST


def _lengths(draws: random.Random) -> Shape:
    return 4, draws.randint(_LONGEST - 59, _LONGEST)


def _equal_tokens(draws: random.Random) -> Shape:
    """None is as large in both dimensions as another."""
    rows = draws.randint(4, 24)
    return rows, 4 * _LONGEST // rows


WORKLOADS = {"one shape": _one, "60 lengths": _lengths, "equal tokens": _equal_tokens}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--share", type=float, default=0.6, help="of the unmanaged peak")
    parser.add_argument("--turn", type=int, default=5, help="steps in a turn")
    arguments = parser.parse_args()
    device = choose_device(None)
    if device.type == "virtual":
        torch.set_num_threads(1)
    rows = [_measure(name, device, arguments) for name in WORKLOADS]
    write("lengths", {**vars(arguments), "windows": _WINDOWS}, rows, device=device)
    return 0 if all(row["losses_equal_unmanaged"] for row in rows) else 1


class Job:
    """A model of its own, trained on given batches."""

    def __init__(self, device: torch.device, batches: list[torch.Tensor]) -> None:
        build, _ = MODELS["Llama"]
        torch.manual_seed(0)
        self.device, self.batches = device, batches
        self.model: nn.Module = build()
        self.optimizer = adamw(self.model)
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def step(self) -> None:
        begin = time.perf_counter()
        tokens = self.batches[len(self.losses)].to(self.device)
        loss = self.model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())
        torch.accelerator.synchronize()
        self.seconds.append(time.perf_counter() - begin)


def _measure(name: str, device: torch.device, arguments: argparse.Namespace) -> dict[str, Any]:
    draws = random.Random(0)
    shapes = [WORKLOADS[name](draws) for _ in range(_WINDOWS[-1])]
    torch.manual_seed(1)
    batches = [torch.randint(_VOCABULARY, shape) for shape in shapes]
    peak = _unmanaged_peak(device, batches)
    unmanaged, managed = Job(device, batches), Job(device, batches)
    budget = int(arguments.share * peak)
    moved, unplanned, peaks = [], [], []
    with hetero.manage(managed.model, managed.optimizer, device=device, device_budget=budget) as manager:
        counted = manager._stm.collector.total  # as in manager.stats, which does more than count
        for begin in range(0, len(batches), arguments.turn):
            unmanaged.model.to(device)
            _move_states(unmanaged.optimizer, device)
            for _ in range(arguments.turn):
                unmanaged.step()
            # Away: they share the device.
            unmanaged.model.to("cpu")
            _move_states(unmanaged.optimizer, torch.device("cpu"))
            torch.accelerator.synchronize()
            torch.accelerator.reset_peak_memory_stats()
            for _ in range(arguments.turn):
                managed.step()
                moved.append(counted.fetched_bytes + counted.written_bytes)
                unplanned.append(counted.unplanned_fetches)
            peaks.append(manager.stats.peak_device_bytes)
            assert begin + arguments.turn == len(managed.losses)
        plans = len(manager._stm.plans)
    windows = [
        {
            "from": first,
            "to": last,
            "seconds": median(managed.seconds[first:last]),
            "unmanaged_seconds": median(unmanaged.seconds[first:last]),
            "mean_seconds": sum(managed.seconds[first:last]) / (last - first),
            "unmanaged_mean_seconds": sum(unmanaged.seconds[first:last]) / (last - first),
            "moved_bytes_a_step": _gained(moved, first, last) / (last - first),
            "unplanned_fetches": _gained(unplanned, first, last),
        }
        for first, last in pairwise(_WINDOWS)
    ]
    row = {
        "batches": name,
        "shapes": len(set(shapes)),
        "unmanaged_peak_bytes": peak,
        "device_budget": budget,
        "peak_device_bytes": max(peaks),
        "plans": plans,
        "losses_equal_unmanaged": managed.losses == unmanaged.losses,
        "windows": windows,
        "samples": {"managed": managed.seconds, "unmanaged": unmanaged.seconds},
    }
    said = ", ".join(
        f"{w['from']}-{w['to']}: x {w['seconds'] / w['unmanaged_seconds']:.2f} "
        f"({w['mean_seconds'] / w['unmanaged_mean_seconds']:.2f})"
        for w in windows
    )
    equal = "equal" if row["losses_equal_unmanaged"] else "NOT EQUAL"
    print(f"{name} ({row['shapes']} shapes, {plans} plans, losses {equal}): {said}", flush=True)
    return row


def _gained(counts: list[int], first: int, last: int) -> int:
    return counts[last - 1] - (counts[first - 1] if first else 0)


def _unmanaged_peak(device: torch.device, batches: list[torch.Tensor]) -> int:
    """Of the largest batch, and a second step."""
    largest = max(batches, key=lambda tokens: (tokens.numel(), tokens.shape[1]))
    job = Job(device, [largest, largest])
    job.model.to(device)
    torch.accelerator.reset_peak_memory_stats()
    job.step()
    job.step()
    return torch.accelerator.max_memory_allocated()


def _move_states(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim():
                state[key] = value.to(device)


if __name__ == "__main__":
    sys.exit(main())
