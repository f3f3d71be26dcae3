"""SmartPool and the portfolio on the networks of the SmartPool paper: batch 100, CIFAR-10 images.

    python -m benchmarks.networks [--seconds 10]

A later training step (SGD with momentum) of each is traced under fake tensors. Ratios are footprint over peak load, as
in the paper's Table I; beside them what CNMeM, its baseline, PyTorch's caching allocator and TensorFlow's BFC reserve
for the same step twice.
"""

import argparse
from functools import partial
from typing import Any

import hetero.pool as pool
from benchmarks.record import write
from examples import cnn
from hetero.pool.allocators import CnmemAllocator, events_of_problem, simulate
from hetero.trace import trace_recipe
from hetero.units import format_bytes

# What the paper's text says of its Table I: SmartPool's worst ratio, and peak loads.
PAPER = {
    "worst ratio": "1.016 (VGG13)",
    "less than CNMeM": "up to 13.3 % (VGG11)",
    "peak load": {"vgg16": "647 MB", "resnet50": "4418 MB"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=10.0)
    arguments = parser.parse_args()
    rows = []
    heads = (
        "network",
        "buffers",
        "peak load",
        "smartpool",
        "portfolio",
        "cnmem",
        "one pool",
        "pytorch",
        "bfc",
    )
    print("{:<10} {:>7} {:>10} {:>9} {:>9} {:>7} {:>8} {:>8} {:>7}".format(*heads))
    for name in (*cnn.VGG_LAYERS, *cnn.RESNET_BLOCKS):
        rows.append(row := measure(name, partial(cnn.recipe, name), arguments.seconds))
        print(
            f"{name:<10} {row['buffers']:>7} {format_bytes(row['peak']):>10} {row['smartpool']:9.5f} "
            f"{row['portfolio']:9.5f} {row['cnmem']:7.4f} {row['cnmem_one_pool']:8.4f} {row['pytorch']:8.4f} "
            f"{row['bfc']:7.4f}",
            flush=True,
        )
    worst = max(rows, key=lambda row: row["smartpool"])
    print(
        f"worst SmartPool ratio: {worst['smartpool']:.5f} ({worst['network']}); the paper's: {PAPER['worst ratio']}"
    )
    write("networks", {"seconds": arguments.seconds}, {"paper": PAPER, "rows": rows}, device=None)


def measure(name: str, recipe: "partial[tuple[object, ...]]", seconds: float) -> dict[str, Any]:
    problem = trace_recipe(recipe).to_problem()
    peak = pool.lower_bound(problem)
    best = pool.solve(problem, "portfolio", seconds)
    reserved = {row.allocator: row.reserved_nbytes for row in pool.allocator_rows(problem)}
    cnmem = cnmem_bytes(problem)
    return {
        "network": name,
        "buffers": len(problem),
        "peak": peak,
        "smartpool": pool.solve(problem, "smartpool", seconds).footprint / peak,
        "portfolio": best.footprint / peak,
        "portfolio_seconds": best.seconds,
        "proven_optimal": best.proven_optimal,
        "cnmem": cnmem["cnmem"] / peak,
        "cnmem_one_pool": cnmem["cnmem, one pool"] / peak,
        "pytorch": reserved["pytorch"] / peak,
        "bfc": reserved["tensorflow bfc, allow_growth"] / peak,
    }


def cnmem_bytes(problem: pool.Problem) -> dict[str, int]:
    """What CNMeM takes for two iterations: growing from nothing, request by request, and of one pool large enough.

    The paper does not say which of them it compared with.
    """
    events = events_of_problem(problem, iterations=2)
    growing, whole = CnmemAllocator(), CnmemAllocator(initial=2**40, can_grow=False)
    simulate(events, growing)
    simulate(events, whole)
    return {"cnmem": growing.reserved, "cnmem, one pool": whole.reach}


if __name__ == "__main__":
    main()
