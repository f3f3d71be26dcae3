"""Planning time against the length of the trace, for every policy, with and without prefetch.

python -m benchmarks planning

Traces are transformer-like (`benchmarks.eviction_traces`): frozen base weights with adapters, and more and more
micro-batches per step, which is what makes iterations long; 40 % of the weights fit. Processor time is what is
compared with the bound: the planner runs on one thread, and the machine may be shared. With ``--step``, instead: a
training step of a 7 B decoder of 32 layers in which activations may leave, planned as training plans it.
"""

import argparse
import time
from typing import Any

from benchmarks.eviction_traces import Shape, trace_of, with_activations
from benchmarks.record import median, write
from hetero.eviction import Links, Trace, check, lower_bound, lower_bound_seconds, plan, plan_iteration

_POLICIES = ("opt", "cost-opt", "lru", "fifo")
_LINKS = Links(h2d_bandwidth=25e9, d2h_bandwidth=25e9, latency=10e-6)


def main() -> None:
    arguments = _parse()
    if arguments.step:
        write("planning_step", {"repeats": arguments.repeats}, _time_seven(arguments.repeats), device=None)
        return
    rows = []
    _time_all(_trace(100), 1)  # imports the solver
    for accesses in arguments.accesses:
        trace = _trace(accesses)
        count = sum(len(moment.operands) for moment in trace.moments)
        timed = _time_all(trace, arguments.repeats)
        for row in timed:
            rows.append({"accesses": count, **row})
        print(f"{count:7} accesses: " + "  ".join(_cell(row) for row in timed), flush=True)
    parameters = {"repeats": arguments.repeats, "share": 0.4, "bound_seconds_at_100000": 1.0}
    write("planning", parameters, rows, device=None)


def _time_seven(repeats: int) -> list[dict[str, Any]]:
    """The 7 B step under shares of all its weights and activations: seconds to plan, and what the plan reaches."""
    rows = []
    for share in (0.6, 0.3, 0.15):
        trace = with_activations(Shape(), share)
        for thorough in (False, True):
            samples = []
            for _ in range(repeats):
                begin, cpu = time.perf_counter(), time.process_time()
                schedule = plan_iteration(trace, links=_LINKS, thorough=thorough)
                samples.append((time.perf_counter() - begin, time.process_time() - cpu))
            check(trace, schedule)
            row = _row(
                f"7 B with activations, {share:.0%}, {'competing' if thorough else 'next use'}", True, samples
            )
            row |= {
                "moments": len(trace.moments),
                "step_seconds": schedule.predicted_seconds,
                "lower_bound_seconds": lower_bound_seconds(trace, _LINKS),
                "moved_bytes": schedule.moved_bytes,
                "lower_bound_bytes": lower_bound(trace),
            }
            rows.append(row)
            print(
                f"{row['policy']}: {len(trace.moments)} moments planned in {row['cpu_seconds']:.1f} s; step "
                f"{row['step_seconds']:.3f} s, bound {row['lower_bound_seconds']:.3f} s; "
                f"{row['moved_bytes'] / 1e9:.1f} GB, bound {row['lower_bound_bytes'] / 1e9:.1f} GB",
                flush=True,
            )
    return rows


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--accesses", nargs="+", type=int, default=[1_000, 3_000, 10_000, 30_000, 100_000])
    parser.add_argument("--step", action="store_true", help="only the 7 B step with activations")
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args()


def _trace(accesses: int) -> Trace:
    """At least so many accesses, as few more as whole micro-batches allow."""
    one = Shape(training="lora", layers=8)
    per_batch = sum(len(moment.operands) for moment in trace_of(one, 0.4).moments)
    return trace_of(Shape(training="lora", layers=8, micro_batches=-(-accesses // per_batch)), 0.4)


def _time_all(trace: Trace, repeats: int) -> list[dict[str, Any]]:
    """In turns: every way once, then every way again."""
    ways: list[tuple[str, bool]] = [(policy, prefetch) for policy in _POLICIES for prefetch in (True, False)]
    samples: dict[tuple[str, bool], list[tuple[float, float]]] = {way: [] for way in ways}
    bound: list[tuple[float, float]] = []
    for _ in range(repeats):
        for policy, prefetch in ways:
            begin, cpu = time.perf_counter(), time.process_time()
            plan(trace, links=_LINKS, policy=policy, prefetch=prefetch)
            samples[policy, prefetch].append((time.perf_counter() - begin, time.process_time() - cpu))
        begin, cpu = time.perf_counter(), time.process_time()
        lower_bound(trace)
        bound.append((time.perf_counter() - begin, time.process_time() - cpu))
    rows = [_row(policy, prefetch, samples[policy, prefetch]) for policy, prefetch in ways]
    return [*rows, _row("lower bound", None, bound)]


def _row(what: str, prefetch: bool | None, samples: list[tuple[float, float]]) -> dict[str, Any]:
    wall, cpu = [sample[0] for sample in samples], [sample[1] for sample in samples]
    return {
        "policy": what,
        "prefetch": prefetch,
        "seconds": median(wall),
        "cpu_seconds": median(cpu),
        "samples": {"seconds": wall, "cpu_seconds": cpu},
    }


def _cell(row: dict[str, Any]) -> str:
    mark = {True: "+", False: "-", None: ""}[row["prefetch"]]
    return f"{row['policy']}{mark} {row['cpu_seconds']:.2f} s"


if __name__ == "__main__":
    main()
