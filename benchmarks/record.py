"""What every result file has in common: the machine, the versions, the commit, the date; and how to time.

Owns the format of the files under ``results/`` and the interleaved measurement.
"""

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from hetero.cli.provenance import commit, provenance
from hetero.devices import host_memory_total

__all__ = ["RESULTS", "Samples", "commit", "interleaved", "median", "read", "write"]

RESULTS = Path(__file__).resolve().parent / "results"

Samples = dict[str, dict[str, list[float]]]
"""By what was timed: ``seconds`` of the clock and ``cpu_seconds`` of all of the process's threads, one a repeat."""


def interleaved(timed: Mapping[str, Callable[[], object]], *, repeats: int) -> Samples:
    """Time each function ``repeats`` times in turns, so that a slow minute of the machine meets all of them alike.

    On a shared machine the processor time tells what work was added; only the clock shows overlap.
    """
    samples: Samples = {name: {"seconds": [], "cpu_seconds": []} for name in timed}
    for _ in range(repeats):
        for name, function in timed.items():
            begin, cpu = time.perf_counter(), time.process_time()
            function()
            samples[name]["cpu_seconds"].append(time.process_time() - cpu)
            samples[name]["seconds"].append(time.perf_counter() - begin)
    return samples


def median(values: list[float]) -> float:
    return statistics.median(values)


def write(name: str, parameters: Mapping[str, Any], results: Any, *, device: torch.device | None) -> Path:
    """Write ``results/NAME.json``, or ``results/cuda/NAME.json`` and alike on a real device: the tables compare numbers
    of one machine. ``device`` None: nothing was computed on one."""
    facts = provenance(device)
    accelerator = facts.pop("accelerator")
    record = {
        "benchmark": name,
        **facts,
        "machine": {**_machine(), "accelerator": accelerator},
        "parameters": dict(parameters),
        "results": results,
    }
    path = _path(name, device)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"wrote {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}", flush=True)
    return path


def read(name: str, *, device: torch.device | None = None) -> dict[str, Any] | None:
    """What was written of benchmark ``name``, on ``device``, or None if it has not been run."""
    path = _path(name, device)
    record: dict[str, Any] | None = json.loads(path.read_text()) if path.exists() else None
    return record


def _path(name: str, device: torch.device | None) -> Path:
    folder = RESULTS if device is None or device.type == "virtual" else RESULTS / device.type
    return folder / f"{name}.json"


def _machine() -> dict[str, Any]:
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2),
        "memory_bytes": host_memory_total(),
        "system": platform.platform(),
    }


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line] \
        if info.exists() else []  # fmt: skip
    return names[0] if names else platform.processor() or platform.machine()
