"""What management adds to an operator whose parameters are all resident, and to a step when everything fits.

python -m benchmarks overhead [--profile]

A chain of small layers (LayerNorm and Linear in turns) runs unmanaged and managed on the same device, in turns. The
budget is large, every copy is resident, the plan is made. Managed it runs twice: as a plan is followed where not
everything fits, so that what remains is interception, and as it is, settled, with nothing intercepted:

* ``inference``: forward without gradients;
* ``frozen``: forward and backward to the input; weights take no gradient, so that nothing moves;
* ``training``: forward, backward, AdamW. Gradients leave and stepped weights come back, each step.
"""

import argparse
import cProfile
import pstats
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import hetero
from benchmarks.record import Samples, interleaved, median, write
from hetero.cli.placing import choose_device

_MODES = ("inference", "frozen", "training")
_WARM_UP = 5


def main() -> None:
    arguments = _parse()
    torch.set_num_threads(1)
    device = choose_device(None)
    rows = []
    for mode in _MODES:
        row = _measure(
            mode, device, blocks=arguments.blocks, width=arguments.width, repeats=arguments.repeats
        )
        rows.append(row)
        print(
            f"{mode:10} {row['operators']:4} operators  +{row['added_microseconds']:.1f} us each (quickest "
            f"+{row['added_microseconds_at_best']:.1f}, processor +{row['added_cpu_microseconds']:.1f})  "
            f"step x {row['step_ratio']:.3f} (processor x {row['step_cpu_ratio']:.3f})  everything fits: "
            f"x {row['settled_step_ratio']:.3f} (processor x {row['settled_step_cpu_ratio']:.3f})",
            flush=True,
        )
        if arguments.profile:
            _profile(mode, device, blocks=arguments.blocks, width=arguments.width)
    if not arguments.profile:
        parameters = {"blocks": arguments.blocks, "width": arguments.width, "repeats": arguments.repeats}
        write(
            "overhead",
            {**parameters, "bound_microseconds": 10, "bound_step_ratio": 1.01},
            rows,
            device=device,
        )


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--blocks", type=int, default=64, help="pairs of LayerNorm and Linear")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=41)
    parser.add_argument(
        "--profile", action="store_true", help="print where the managed step's time goes instead"
    )
    return parser.parse_args()


def _measure(mode: str, device: torch.device, *, blocks: int, width: int, repeats: int) -> dict[str, Any]:
    plain, _ = _job(mode, device, blocks, width, managed=False)
    managed, manager = _job(mode, device, blocks, width, managed=True)
    with manager:
        manager._settled.forbid()
        for _ in range(_WARM_UP):
            plain()
            managed()
        before = manager.stats.unplanned_fetches
        samples = interleaved({"unmanaged": plain, "managed": managed}, repeats=repeats)
        operators = _operators(manager)
        unplanned = manager.stats.unplanned_fetches - before
        fetched = manager._stm.plans.last.schedule.fetched_bytes
    settled = _measure_settled(mode, device, blocks=blocks, width=width, repeats=repeats)
    return {
        "mode": mode,
        "operators": operators,
        "unplanned_fetches": unplanned,
        "fetched_bytes": fetched,
        "added_microseconds": _added(samples, "seconds") / operators * 1e6,
        "added_cpu_microseconds": _added(samples, "cpu_seconds") / operators * 1e6,
        "added_microseconds_at_best": _added_at_best(samples) / operators * 1e6,
        "step_ratio": _ratio(samples, "seconds"),
        "step_cpu_ratio": _ratio(samples, "cpu_seconds"),
        "settled_step_ratio": _ratio(settled, "seconds"),
        "settled_step_cpu_ratio": _ratio(settled, "cpu_seconds"),
        "settled_samples": settled,
        "medians": {name: {k: median(v) for k, v in clocks.items()} for name, clocks in samples.items()},
        "samples": samples,
    }


def _measure_settled(mode: str, device: torch.device, *, blocks: int, width: int, repeats: int) -> Samples:
    """The same where nothing is intercepted."""
    plain, _ = _job(mode, device, blocks, width, managed=False)
    managed, manager = _job(mode, device, blocks, width, managed=True)
    with manager:
        for _ in range(_WARM_UP):
            plain()
            managed()
        assert manager.plan.everything_fits, "warm-up was too short: it has not settled"
        return interleaved({"unmanaged": plain, "managed": managed}, repeats=repeats)


def _job(
    mode: str, device: torch.device, blocks: int, width: int, *, managed: bool
) -> tuple[Callable[[], object], Any]:
    """A function that runs one step, and the manager or None."""
    torch.manual_seed(0)
    layers = [layer for _ in range(blocks) for layer in (nn.LayerNorm(width), nn.Linear(width, width))]
    model = nn.Sequential(*layers).requires_grad_(mode == "training")
    optimizer = None
    if not managed:
        model.to(device)
    if mode == "training":
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    manager = hetero.manage(model, optimizer, device=device, device_budget="1GiB") if managed else None
    x = torch.randn(4, width).to(device).requires_grad_(mode == "frozen")

    def infer() -> None:
        with torch.no_grad():
            model(x)

    def train() -> None:
        model(x).sum().backward()
        x.grad = None
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
            if manager is not None:  # what is queued would else run beside the other's turn
                manager._stm.home_access.finish_updates()

    return (infer if mode == "inference" else train), manager


def _operators(manager: hetero.Manager) -> int:
    """Sampling moments of one iteration at which an operator uses managed parameters."""
    plan = manager._stm.plans.last
    assert plan is not None, "warm-up was too short: nothing is planned"
    return sum(bool(operands) for operands in plan.operands)


def _added(samples: Samples, clock: str) -> float:
    """Median over the pairs: both of a pair ran right after one another."""
    pairs = zip(samples["managed"][clock], samples["unmanaged"][clock], strict=True)
    return median([managed - plain for managed, plain in pairs])


def _added_at_best(samples: Samples) -> float:
    """Between the quickest of each: what nobody interrupted."""
    return min(samples["managed"]["seconds"]) - min(samples["unmanaged"]["seconds"])


def _ratio(samples: Samples, clock: str) -> float:
    return median(samples["managed"][clock]) / median(samples["unmanaged"][clock])


def _profile(mode: str, device: torch.device, *, blocks: int, width: int, steps: int = 30) -> None:
    """Python functions by own time. The profiler itself adds much to short ones: shares, not times."""
    step, manager = _job(mode, device, blocks, width, managed=True)
    with manager:
        manager._settled.forbid()
        for _ in range(_WARM_UP):
            step()
        profiler = cProfile.Profile()
        # Backward runs on a thread of autograd's; on this one, all of it can be seen.
        with torch.autograd.set_multithreading_enabled(False):
            profiler.enable()
            for _ in range(steps):
                step()
            profiler.disable()
        pstats.Stats(profiler).sort_stats("tottime").print_stats(28)


if __name__ == "__main__":
    main()
