"""Models of other libraries, as they come: trained managed and unmanaged, and compared bit by bit.

python -m benchmarks zoo [--libraries timm peft]

Some steps with AdamW and clipping, each followed by an evaluation; then losses, what was evaluated, parameters and
buffers are compared. Each model (`benchmarks.zoo_models`) has the smallest share of its unmanaged peak, of a few, that
is not refused. A library that is not installed keeps the rows that it has.

Transformers' own architectures are in `tests/manage/test_architectures.py`.
"""

import argparse
import gc
import importlib
from typing import Any

import torch
from torch import Tensor, nn

import hetero
from benchmarks.record import read, write
from benchmarks.zoo_models import LIBRARIES, Loss, Model
from hetero.cli.placing import choose_device
from hetero.units import format_bytes

_SHARES = (0.5, 0.6, 0.75, 0.9)
_STEPS = 4


def main() -> None:
    arguments_parser = argparse.ArgumentParser(description=__doc__)
    arguments_parser.add_argument("--libraries", nargs="+", default=list(LIBRARIES), choices=LIBRARIES)
    arguments = arguments_parser.parse_args()
    device = choose_device(None)
    if device.type != "virtual":
        print(f"skipped: {device} rounds optimizers' steps otherwise than the host, where some are made")
        return
    record = read("zoo")
    rows: list[dict[str, Any]] = [] if record is None else record["results"]
    for name in arguments.libraries:
        try:
            library = importlib.import_module(name)
            models = list(LIBRARIES[name](library))
        except ImportError as error:
            print(f"{name} is left out: {error}", flush=True)
            continue
        rows = [row for row in rows if row["library"] != name]
        for model in models:
            row = {
                "library": name,
                "version": library.__version__,
                "model": model.name,
                **_row(model, device),
            }
            print(_line(row), flush=True)
            rows.append(row)
    write("zoo", {"steps": _STEPS, "shares": _SHARES}, rows, device=device)


def _row(model: Model, device: torch.device) -> dict[str, Any]:
    expected, peak, _ = _run(model, device, None)
    again, _, _ = _run(model, device, None)
    row: dict[str, Any] = {"peak_bytes": peak, "repeats": _are_equal(again, expected)}
    for share in _SHARES:
        budget = int(share * peak)
        try:
            got, managed_peak, moved = _run(model, device, budget)
        except hetero.BudgetError:
            continue
        return {
            **row,
            "share": share,
            "equal": _are_equal(got, expected),
            "managed_peak_bytes": managed_peak,
            "is_within": managed_peak <= budget,
            "moved_bytes": moved,
        }
    return {**row, "share": None}


def _line(row: dict[str, Any]) -> str:
    if row["share"] is None:
        return f"{row['library']} {row['model']}: refused with {_SHARES[-1]:.0%} of its memory"
    equal = "equal" if row["equal"] else "NOT EQUAL" if row["repeats"] else "does not repeat"
    within = "" if row["is_within"] else ", BEYOND ITS BUDGET"
    memory = f"{row['share']:.0%} of {format_bytes(row['peak_bytes'])}"
    return f"{row['library']} {row['model']}: {equal} with {memory}{within}"


def _run(model: Model, device: torch.device, budget: int | None) -> tuple[list[Tensor], int, int]:
    """What is compared, the peak in bytes, and the bytes that were moved."""
    gc.collect()
    torch.manual_seed(0)
    module = model.build()
    optimizer = torch.optim.AdamW((p for p in module.parameters() if p.requires_grad), lr=1e-3, fused=True)
    base = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    manager = None
    if budget is None:
        module.to(device)
    else:
        manager = hetero.manage(module, optimizer, device=device, device_budget=base + budget)
    moved = 0
    try:
        seen = _train(module, optimizer, model.loss, device)
        peak = torch.accelerator.max_memory_allocated() - base
        if manager is not None:
            moved = manager.stats.bytes_moved
    finally:
        if manager is not None:
            manager.close()
    return (
        [*seen, *(t.detach().cpu().clone() for t in (*module.parameters(), *module.buffers()))],
        peak,
        moved,
    )


def _train(
    module: nn.Module, optimizer: torch.optim.Optimizer, loss_of: Loss, device: torch.device
) -> list[Tensor]:
    torch.manual_seed(1)
    seen = []
    for step in range(_STEPS):
        module.train()
        loss = loss_of(module, step, device)
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.detach().cpu())
        module.eval()
        with torch.no_grad():
            seen.append(loss_of(module, step + 1000, device).cpu())
    return seen


def _are_equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return len(some) == len(others) and all(map(torch.equal, some, others))


if __name__ == "__main__":
    main()
