"""``hetero demo``: a model whose data do not fit its device, trained managed and unmanaged, side by side."""

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional

from hetero.cli.comparison import compare
from hetero.cli.gpt import ByteGPT, batches_of, standard_library_text
from hetero.cli.output import open_console, progress, write_json
from hetero.cli.placing import (
    choose_device,
    keep_workspaces_small,
    limit_memory,
    steps_differ,
    unlimit_memory,
)
from hetero.cli.provenance import provenance
from hetero.cli.training import Job, Outcome, train_managed, train_unmanaged
from hetero.errors import ConfigError
from hetero.files import check_writable
from hetero.units import format_bytes, format_seconds, parse_budget

__all__ = ["demo"]

_WIDTH, _LAYERS, _HEADS, _LENGTH, _BATCH = 512, 8, 8, 64, 4
_ADAM_BYTES = 16  # of model data per parameter in float32: itself, its gradient, two moments
_SHOWN_LOSSES = 8


def demo(
    steps: Annotated[int, typer.Option(min=3, help="Training steps, each way.")] = 20,
    device_budget: Annotated[
        str, typer.Option(help="Device memory to use: '100MiB', or a share of the model data: '25%'.")
    ] = "25%",
    device: Annotated[
        str | None, typer.Option(help="Default: the machine's accelerator, else 'virtual'.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of weights and batches.")] = 0,
    json: Annotated[Path | None, typer.Option(help="Write the numbers to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw memory over one iteration (PNG, SVG, PDF).")] = None,
) -> None:
    """Train a byte-level GPT in less device memory than its model data; compare every bit with the plain run.

    Exit code 0 if the budget is smaller than the model data, the peak is within the budget, and losses and
    parameters are bit-identical; 1 if not.
    """
    console = open_console()
    check_writable(json, plot)
    keep_workspaces_small()
    place = choose_device(device)
    text = standard_library_text()
    estimate = _ADAM_BYTES * sum(p.numel() for p in _model(seed).parameters())
    budget = parse_budget(device_budget, estimate, name="--device-budget")
    if budget >= estimate:
        raise ConfigError(
            f"--device-budget {device_budget} is {budget} bytes, the model data are {estimate}: the demo "
            "is about training what does not fit; pass less"
        )
    console.print(
        f"Byte-level GPT, {estimate // _ADAM_BYTES:,} parameters, {format_bytes(estimate)} of model data; "
        f"{format_bytes(budget)} of {place}; text: {len(text):,} bytes of Python's standard library"
    )
    result = _run(console, place, text, steps=steps, seed=seed, budget=budget, plot=plot)
    _print_losses(console, result)
    _print_summary(console, result)
    if json is not None:
        write_json(json, {**provenance(place), **result.to_dict()})
    if not result.holds:
        raise typer.Exit(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoResult:
    """Both runs. ``reference`` is the unmanaged run that steps where the managed one does; ``unmanaged``, the
    one that is timed, steps on the device. On the virtual accelerator they are one run."""

    device: torch.device
    budget: int
    managed: Outcome
    unmanaged: Outcome
    reference: Outcome

    @property
    def bit_identical(self) -> bool:
        """Every loss, parameter, gradient and optimizer state is equal."""
        return not any(row.fault for row in compare(self.managed, self.reference))

    @property
    def holds(self) -> bool:
        """What the demo claims."""
        fits = self.managed.peak_device_bytes <= self.budget < self.managed.model_data_bytes
        # A run gone wrong both ways, all NaN, would prove nothing.
        trained = all(bool(loss.isfinite()) for loss in self.managed.losses)
        return fits and trained and self.bit_identical

    def to_dict(self) -> dict[str, object]:
        """Bytes and seconds, ready for JSON."""
        stats = self.managed.stats
        assert stats is not None
        return {
            "device": str(self.device),
            "steps": len(self.managed.losses),
            "device_budget": self.budget,
            "model_data_bytes": self.managed.model_data_bytes,
            "peak_device_bytes": self.managed.peak_device_bytes,
            "unmanaged_peak_device_bytes": self.unmanaged.peak_device_bytes,
            "bytes_moved": stats.bytes_moved,
            "lower_bound_bytes": stats.lower_bound_bytes,
            "unplanned_fetches": stats.unplanned_fetches,
            "stall_seconds": stats.stall_seconds,
            "bit_identical": self.bit_identical,
            "managed_seconds": sum(self.managed.seconds),
            "unmanaged_seconds": sum(self.unmanaged.seconds),
            "managed_step_seconds": statistics.median(self.managed.seconds),
            "unmanaged_step_seconds": statistics.median(self.unmanaged.seconds),
            "losses": [loss.item() for loss in self.managed.losses],
        }


def _model(seed: int) -> ByteGPT:
    torch.manual_seed(seed)
    return ByteGPT(width=_WIDTH, layers=_LAYERS, heads=_HEADS, length=_LENGTH)


def _job(text: Tensor, steps: int, seed: int) -> Job:
    model = _model(seed)
    return Job(
        model=model,
        # One tensor after the other: the default, foreach, rounds differently on some devices.
        optimizer=torch.optim.AdamW(model.parameters(), lr=3e-4, foreach=False),
        batches=batches_of(text, count=steps, batch=_BATCH, length=_LENGTH, seed=seed),
        loss_fn=_loss,
        seed=seed,
    )


def _loss(model: nn.Module, batch: Any) -> Tensor:
    text, following = batch
    return functional.cross_entropy(model(text).flatten(0, 1), following.flatten())


def _run(
    console: Console,
    device: torch.device,
    text: Tensor,
    *,
    steps: int,
    seed: int,
    budget: int,
    plot: Path | None,
) -> DemoResult:
    limit_memory(device, budget)
    with progress(console, "managed", steps) as on_step:
        managed = train_managed(
            _job(text, steps, seed), device, device_budget=budget, on_step=on_step, plot=plot
        )
    unlimit_memory(device)
    with progress(console, "unmanaged", steps) as on_step:
        unmanaged = train_unmanaged(_job(text, steps, seed), device, step_on_host=False, on_step=on_step)
    reference = unmanaged
    if steps_differ(device):
        with progress(console, "reference", steps) as on_step:
            reference = train_unmanaged(_job(text, steps, seed), device, step_on_host=True, on_step=on_step)
    return DemoResult(device=device, budget=budget, managed=managed, unmanaged=unmanaged, reference=reference)


def _print_losses(console: Console, result: DemoResult) -> None:
    table = Table(
        title="Loss" if result.reference is result.unmanaged else "Loss (optimizer on the host both ways)"
    )
    for column in ("step", "managed", "unmanaged", ""):
        table.add_column(column, justify="right")
    count = len(result.managed.losses)
    shown = sorted({round(i * (count - 1) / (_SHOWN_LOSSES - 1)) for i in range(_SHOWN_LOSSES)})
    for step in shown:
        ours, theirs = result.managed.losses[step], result.reference.losses[step]
        equal = torch.equal(ours, theirs)
        table.add_row(str(step), f"{ours:.7f}", f"{theirs:.7f}", "=" if equal else "DIFFERENT")
    console.print(table)


def _print_summary(console: Console, result: DemoResult) -> None:
    numbers = result.to_dict()
    stats = result.managed.stats
    assert stats is not None
    table = Table(show_header=False, box=None)
    bound = stats.lower_bound_bytes
    for name, value in (
        ("model data", format_bytes(result.managed.model_data_bytes)),
        (
            "device budget",
            f"{format_bytes(result.budget)} ({result.budget / result.managed.model_data_bytes:.0%})",
        ),
        ("peak, by the allocator", format_bytes(result.managed.peak_device_bytes)),
        ("peak unmanaged", format_bytes(result.unmanaged.peak_device_bytes)),
        (
            "moved per iteration",
            f"{format_bytes(stats.bytes_moved)}, at least {format_bytes(bound)} whatever the plan "
            f"({stats.bytes_moved / bound:.2f} x)"
            if bound
            else format_bytes(stats.bytes_moved),
        ),
        ("time managed", _times(result.managed)),
        ("time unmanaged", _times(result.unmanaged)),
        (
            "losses, parameters, states",
            "bit-identical" if numbers["bit_identical"] else "DIFFERENT",
        ),
    ):
        table.add_row(name, value)
    console.print(table)


def _times(outcome: Outcome) -> str:
    step = format_seconds(statistics.median(outcome.seconds))
    return f"{format_seconds(sum(outcome.seconds))}, {step} a step (median)"
