"""The step simulator: its speed, and its prediction of a managed training run against the virtual accelerator.

python -m benchmarks.simulation

A chain of Linear layers (see benchmarks.chain) trains under a budget that holds part of its weights, on links whose
transfers take half as long as the operators, as long, and half as long again. Operators' times are those measured on a
fast link, scaled to the unmanaged step; the link is the one that was set.
"""

import argparse
import time
from typing import Any

import torch

from benchmarks.chain import CALIBRATION_BANDWIDTH, LATENCY
from benchmarks.prefetch import Job, scaled
from benchmarks.record import median, write
from hetero.cli.placing import choose_device
from hetero.devices import virtual
from hetero.eviction import Links, Trace, plan
from hetero.simulate import ProgramBuilder, lower_schedule, simulate_program

_SHARES = (0.5, 1.0, 1.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layer-seconds", type=float, default=0.008)
    parser.add_argument("--share", type=float, default=0.4, help="of the weights that the budget holds")
    parser.add_argument("--steps", type=int, default=4)
    arguments = parser.parse_args()
    speed = _events_per_second()
    print(f"{speed:.3g} events a second")
    torch.set_num_threads(1)
    device = choose_device(None)
    rows = []
    if device.type == "virtual":
        for share in _SHARES:
            rows += _measure(share, device, arguments)
    results = {"events_per_second": speed, "runs": rows}
    write("simulation", vars(arguments), results, device=device)


def _events_per_second() -> float:
    builder = ProgramBuilder(initial=0)
    operators = [builder.add("compute", 1.0, allocates=1) for _ in range(20_000)]
    for operator in operators[::2]:
        out = builder.add("d2h", 1.1, after=[operator], frees=2)
        builder.add("h2d", 0.9, after=[out])
    program = builder.build()
    simulate_program(program, limit=1_000, iterations=1)  # compiles where there is a compiler
    begin = time.perf_counter()
    events = simulate_program(program, limit=1_000, iterations=5).events
    return events / (time.perf_counter() - begin)


def _measure(share: float, device: torch.device, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    job = Job(
        device,
        layers=arguments.layers,
        width=arguments.width,
        seconds=arguments.layer_seconds,
        trains=True,
    )
    budget = torch.accelerator.memory_allocated() + int(arguments.share * job.model.nbytes)
    virtual.set_link(bandwidth=CALIBRATION_BANDWIDTH, latency=LATENCY)
    compute = median(job.unmanaged(arguments.steps))
    _, fast = job.managed(arguments.steps, budget=budget, prefetch=False)
    bandwidth = max(fast["fetched_bytes"], fast["written_bytes"]) / (share * compute)
    virtual.set_link(bandwidth=bandwidth)
    links = Links(h2d_bandwidth=bandwidth, d2h_bandwidth=bandwidth, latency=LATENCY)
    trace = scaled(fast["trace"], compute)
    rows = []
    for prefetch in (False, True):
        seconds, _ = job.managed(arguments.steps, budget=budget, prefetch=prefetch)
        predicted = _predicted(trace, links, prefetch=prefetch)
        row = {
            "transfer_over_compute": share,
            "prefetch": prefetch,
            "compute_seconds": compute,
            "samples": seconds,
            "measured_seconds": median(seconds),
            "predicted_seconds": predicted,
            "difference": predicted / median(seconds) - 1.0,
        }
        rows.append(row)
        print(
            f"transfer / compute {share}, prefetch {prefetch}: measured {row['measured_seconds']:.3f} s, "
            f"predicted {predicted:.3f} s ({100 * row['difference']:+.1f} %)",
            flush=True,
        )
    return rows


def _predicted(trace: Trace, links: Links, *, prefetch: bool) -> float:
    schedule = plan(trace, links=links, prefetch=prefetch)
    program, limit = lower_schedule(trace, schedule, links)
    return simulate_program(program, limit=limit).step_seconds


if __name__ == "__main__":
    main()
