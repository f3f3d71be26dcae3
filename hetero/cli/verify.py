"""``hetero verify FILE.py:FUNCTION``: one's own training, managed and unmanaged, compared bit for bit."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Column, Table
from torch import Tensor, nn

from hetero.cli.comparison import Difference, compare
from hetero.cli.jobs import no_batches, read_job
from hetero.cli.loading import call, load_function
from hetero.cli.output import open_console, progress
from hetero.cli.placing import (
    choose_device,
    keep_workspaces_small,
    limit_memory,
    steps_differ,
    unlimit_memory,
)
from hetero.cli.training import Job, Outcome, seed_everything, train_managed, train_unmanaged
from hetero.errors import ConfigError
from hetero.units import format_bytes, parse_budget

__all__ = ["verify"]


def verify(
    target: Annotated[
        str, typer.Argument(metavar="FILE.py:FUNCTION", help="Returns (model, optimizer, batches, loss_fn).")
    ],
    steps: Annotated[int, typer.Option(min=1, help="Training steps, each way.")] = 4,
    device_budget: Annotated[
        str | None,
        typer.Option(
            help="Device memory: '1GiB', or a share of the unmanaged run's peak: '60%'. Default: little "
            "enough that parameters have to leave, unless one of them is most of the model."
        ),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Print the tensors that are equal as well.")] = False,
    device: Annotated[
        str | None, typer.Option(help="Default: the machine's accelerator, else 'virtual'.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Set before the function and before each run.")] = 0,
) -> None:
    """Check that training your model under a device budget gives the same bits as without.

    FUNCTION takes no arguments and is called once for each run. Its batches are tensors, or tuples, lists or
    dicts of them, on the host; if they are fewer than the steps they start again. loss_fn(model, batch)
    returns the scalar loss. A loss of torch itself, such as nn.MSELoss(), is given model(*inputs) and the last
    of each batch instead.

    Where an optimizer of torch's was given neither fused nor foreach, hetero steps it with torch's fused CPU kernels,
    and so does the unmanaged run: they round otherwise than the for-loops.

    Exit code 0 if every loss, parameter, gradient, buffer and optimizer state is equal, 1 where one differs,
    2 if the comparison could not be made.
    """
    console = open_console()
    if device_budget is not None:
        parse_budget(device_budget, 1 << 60, name="--device-budget")  # before anything is trained
    keep_workspaces_small()
    place = choose_device(
        device
    )  # before any code of the user's: autograd counts devices at its first backward
    make = load_function(target)
    first = _job(make, target, steps, seed)
    start = _start_of(first)
    count = len(first.batches)
    unmanaged = _unmanaged(console, first, place, "unmanaged")
    second = _like(first, _job(make, target, steps, seed), start, target)
    budget = _budget(device_budget, unmanaged, place)
    del first
    limit_memory(place, budget)
    with progress(console, "managed", count) as on_step:
        managed = call(
            lambda: train_managed(second, place, device_budget=budget, on_step=on_step),
            what=f"training {target} managed",
        )
    unlimit_memory(place)
    differences = compare(managed, unmanaged)
    _print_table(console, differences, every=every)
    _print_summary(console, managed, unmanaged, budget)
    different = [row for row in differences if row.fault]
    if not different:
        console.print(f"bit-identical: {len(differences)} tensors over {count} steps")
        return
    console.print(f"{len(different)} of {len(differences)} tensors differ")
    again = _like(second, _job(make, target, steps, seed), start, target)
    if any(row.fault for row in compare(_unmanaged(console, again, place, "again"), unmanaged)):
        console.print(
            "So do two unmanaged runs: this training is not deterministic on this device; see "
            "torch.use_deterministic_algorithms"
        )
    raise typer.Exit(1)


def _job(make: Callable[[], Any], target: str, steps: int, seed: int) -> Job:
    seed_everything(seed)
    model, optimizer, batches, loss_fn = read_job(call(make, what=f"{target}()"), target)
    taken = call(lambda: list(itertools.islice(batches, steps)), what=f"the batches of {target}")
    if not taken:
        raise no_batches(target)
    repeated = list(itertools.islice(itertools.cycle(taken), steps))
    return Job(model=model, optimizer=optimizer, batches=repeated, loss_fn=loss_fn, seed=seed)


def _start_of(job: Job) -> dict[str, Tensor]:
    return {name: value.detach().to("cpu", copy=True) for name, value in _held(job.model).items()}


def _held(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _like(first: Job, second: Job, start: dict[str, Tensor], target: str) -> Job:
    """``second`` with the first one's start and batches, whatever the function drew from elsewhere."""
    if second.model is first.model or second.optimizer is first.optimizer:
        raise ConfigError(
            f"{target} returned the same model or optimizer twice: it must build them anew on each call"
        )
    held = _held(second.model)
    if {n: v.shape for n, v in held.items()} != {n: v.shape for n, v in start.items()}:
        raise ConfigError(f"{target} built a model of other names or shapes on its second call")
    with torch.no_grad():
        for name, value in held.items():
            value.copy_(start[name])
    return replace(second, batches=first.batches)


def _unmanaged(console: Console, job: Job, place: torch.device, title: str) -> Outcome:
    with progress(console, title, len(job.batches)) as on_step:
        outcome: Outcome = call(
            lambda: train_unmanaged(job, place, step_on_host=steps_differ(place), on_step=on_step),
            what="the unmanaged run, in which loss_fn(model, batch) is called,",
        )
    job.model.to("cpu")
    return outcome


def _budget(asked: str | None, unmanaged: Outcome, place: torch.device) -> int:
    peak = unmanaged.peak_device_bytes
    if asked is not None:
        return parse_budget(asked, peak, name="--device-budget")
    parameters = [value.nbytes for (kind, _), value in unmanaged.tensors.items() if kind == "parameter"]
    # Half of the parameters, but room for the largest, its gradient, the next one, and, as it may be tied, a second
    # gradient and the sum of both.
    room = max(sum(parameters) // 2, 5 * max(parameters, default=0))
    there = unmanaged.model_data_bytes
    if steps_differ(place):  # it has stepped on the host, where the states have stayed
        kinds = ("parameter", "gradient", "buffer")
        there = sum(value.nbytes for (kind, _), value in unmanaged.tensors.items() if kind in kinds)
    budget: int = peak - there + room
    return budget


def _print_table(console: Console, differences: list[Difference], *, every: bool) -> None:
    """Each loss, and the tensors that differ; with ``every``, those that do not as well."""
    kinds = list(dict.fromkeys(row.kind for row in differences))
    cells = {(row.kind, row.name): row for row in differences}
    losses = Table("step", "loss")
    for row in differences:
        if row.kind == "loss":
            losses.add_row(row.name.removeprefix("step "), row.fault or "equal")
    console.print(losses)
    columns = [kind for kind in kinds if kind != "loss"]
    table = Table(Column("tensor", overflow="fold"), *columns)
    shown = [row.name for row in differences if row.kind != "loss" and (every or row.fault)]
    if not shown:
        return
    for name in dict.fromkeys(shown):
        found = [cells.get((kind, name)) for kind in columns]
        table.add_row(name, *("" if row is None else row.fault or "equal" for row in found))
    console.print(table)


def _print_summary(console: Console, managed: Outcome, unmanaged: Outcome, budget: int) -> None:
    console.print(
        f"model data {format_bytes(unmanaged.model_data_bytes)}, device budget {format_bytes(budget)}, peak "
        f"{format_bytes(managed.peak_device_bytes)} (unmanaged {format_bytes(unmanaged.peak_device_bytes)})"
    )
    if budget >= unmanaged.peak_device_bytes:
        console.print(
            "That budget is no less than the unmanaged peak: with less (--device-budget '80%'), more moves"
        )
