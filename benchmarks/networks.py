"""SmartPool and the portfolio on the networks of the SmartPool paper: batch 100, CIFAR-10 images.

    python -m benchmarks.networks [--seconds 10] [--out benchmarks/results/networks.json]

A later training step (SGD with momentum) of each is traced under fake tensors. Ratios are footprint over peak load, as
in the paper's Table I; beside them what PyTorch's caching allocator and TensorFlow's BFC reserve for the same step
twice.
"""

import argparse
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import hetero.pool as pool
from benchmarks.allocators import ROOT
from examples import cnn
from hetero.trace import trace_recipe
from hetero.units import format_bytes

# What the paper's text says of its Table I: SmartPool's worst ratio, and peak loads.
PAPER = {
    "worst ratio": "1.016 (VGG13)",
    "peak load": {"vgg16": "647 MB", "resnet50": "4418 MB"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "networks.json")
    arguments = parser.parse_args()
    rows = []
    print(
        f"{'network':<10} {'buffers':>7} {'peak load':>10} {'smartpool':>9} {'portfolio':>9} {'pytorch':>8} {'bfc':>7}"
    )
    for name in (*cnn.VGG_LAYERS, *cnn.RESNET_BLOCKS):
        rows.append(row := measure(name, partial(cnn.recipe, name), arguments.seconds))
        print(
            f"{name:<10} {row['buffers']:>7} {format_bytes(row['peak']):>10} {row['smartpool']:9.5f} "
            f"{row['portfolio']:9.5f} {row['pytorch']:8.4f} {row['bfc']:7.4f}",
            flush=True,
        )
    worst = max(rows, key=lambda row: row["smartpool"])
    print(
        f"worst SmartPool ratio: {worst['smartpool']:.5f} ({worst['network']}); the paper's: {PAPER['worst ratio']}"
    )
    result = {"date": time.strftime("%Y-%m-%d"), "seconds": arguments.seconds, "paper": PAPER, "rows": rows}
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")


def measure(name: str, recipe: "partial[tuple[object, ...]]", seconds: float) -> dict[str, Any]:
    problem = trace_recipe(recipe).to_problem()
    peak = pool.lower_bound(problem)
    best = pool.solve(problem, "portfolio", seconds)
    reserved = {row.allocator: row.reserved_nbytes for row in pool.allocator_rows(problem)}
    return {
        "network": name,
        "buffers": len(problem),
        "peak": peak,
        "smartpool": pool.solve(problem, "smartpool", seconds).footprint / peak,
        "portfolio": best.footprint / peak,
        "portfolio_seconds": best.seconds,
        "proven_optimal": best.proven_optimal,
        "pytorch": reserved["pytorch"] / peak,
        "bfc": reserved["tensorflow bfc, allow_growth"] / peak,
    }


if __name__ == "__main__":
    main()
