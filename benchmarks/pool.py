"""Planners on the offline placement instances: footprints, ratios and times, as a table and as JSON.

    python -m benchmarks.pool [--seconds 60] [--data ../shared/data/dsa] [NAME ...]

Each instance is placed by SmartPool and by the portfolio within the limit; both are checked by the naive
validator. Greedy speed is measured on generated problems of 20,000 and 60,000 buffers. Kernels are compiled
before anything is timed.
"""

import argparse
import csv
import time
from pathlib import Path
from typing import Any

import numpy as np

import hetero.pool as pool
from benchmarks.record import write
from hetero.jit import COMPILED

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    arguments = parse()
    warm_up()
    known = read_best_known(arguments.data)
    print(
        f"{'instance':<42} {'buffers':>7} {'bound':>11} {'smartpool':>10} {'portfolio':>12} "
        f"{'best known':>11} {'time':>8}"
    )
    rows = []
    for path in sorted(arguments.data.glob("*.csv")):
        if path.name == "best_known.csv" or (arguments.names and path.stem not in arguments.names):
            continue
        row = measure(path, arguments.seconds, known.get(path.stem))
        rows.append(row)
        print(format_row(row), flush=True)
    greedy = greedy_speed()
    for line in greedy:
        print(f"{line['planner']:<20} {line['buffers']:>7} buffers {line['seconds']:8.2f} s")
    parameters = {"seconds": arguments.seconds, "compiled": COMPILED, "numpy": np.__version__}
    write("pool", parameters, {"instances": rows, "greedy": greedy}, device=None)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data" / "dsa")
    return parser.parse_args()


def warm_up() -> None:
    """Load every compiled kernel: a problem whose optimum lies above what the greedies find."""
    problem = generated(60, seed=1)
    for planner in ("smartpool", "skyline", "hill-climb"):
        pool.plan(problem, planner)
    pool.exact(problem, seconds=0.1)


def measure(path: Path, seconds: float, known: dict[str, str] | None) -> dict[str, object]:
    problem = pool.read_problem(path)
    smartpool = pool.solve(problem, "smartpool", seconds)
    best = pool.solve(problem, "portfolio", seconds)
    return {
        "instance": path.stem,
        "buffers": len(problem),
        "bound": pool.lower_bound(problem),
        "smartpool": smartpool.footprint,
        "smartpool_seconds": smartpool.seconds,
        "portfolio": best.footprint,
        "portfolio_seconds": best.seconds,
        "ratio": pool.competitive_ratio(problem, best),
        "proven_optimal": best.proven_optimal,
        "best_known": int(known["best_known"]) if known and known["best_known"] else None,
    }


def format_row(row: dict[str, Any]) -> str:
    known = row["best_known"]
    return (
        f"{row['instance']:<42} {row['buffers']:>7} {row['bound']:>11} "
        f"{row['smartpool'] / row['bound']:>10.5f} "
        f"{row['ratio']:>12.9f} {known / row['bound'] if known else float('nan'):>11.5f} "
        f"{row['portfolio_seconds']:6.2f} s {'proven' if row['proven_optimal'] else ''}"
    )


def greedy_speed() -> list[dict[str, Any]]:
    lines = []
    for count in (20_000, 60_000):
        problem = generated(count, seed=2)
        for planner in ("smartpool", "smartpool-first-fit", "tflite", "xla", "ge", "skyline"):
            started = time.perf_counter()
            pool.plan(problem, planner)
            lines.append({"planner": planner, "buffers": count, "seconds": time.perf_counter() - started})
    return lines


def generated(count: int, seed: int) -> pool.Problem:
    """Lives as in training: a third nested around the middle, the rest short."""
    rng = np.random.default_rng(seed)
    horizon = 2 * count
    begins = rng.integers(0, horizon - 1, count)
    nested = (rng.random(count) < 0.3) & (begins < horizon // 2)
    ends = np.where(nested, horizon - begins, np.minimum(begins + rng.integers(1, 60, count), horizon))
    sizes = rng.choice(512 * rng.integers(1, 20_000, 200), count)
    lives = zip(begins.tolist(), np.maximum(ends, begins + 1).tolist(), sizes.tolist(), strict=True)
    return pool.Problem.from_lives(lives)


def read_best_known(folder: Path) -> dict[str, dict[str, str]]:
    with (folder / "best_known.csv").open(newline="") as file:
        return {row["instance"]: row for row in csv.DictReader(file)}


if __name__ == "__main__":
    main()
