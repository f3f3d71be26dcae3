"""``hetero plan FILE.py:FUNCTION``: whether a model trains on a machine that one does not have, and how fast."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from hetero.cli.jobs import recipe_of
from hetero.cli.loading import call, load_function
from hetero.cli.output import open_console, write_json
from hetero.errors import BudgetError, ConfigError
from hetero.files import check_writable
from hetero.forecast import MACHINES, Forecast, Host, KnownMachine, forecast
from hetero.trace import StepTrace, trace_recipe
from hetero.units import format_bytes, format_seconds, parse_budget, parse_bytes, parse_rate

__all__ = ["plan"]

_SHARES = (100, 80, 60, 40, 30, 20)  # percent of the unmanaged peak
_DEFAULT_SHARE = "80%"  # of the device, as `hetero.manage` takes
_ENDLESS = 1 << 60


def plan(
    target: Annotated[
        str, typer.Argument(metavar="FILE.py:FUNCTION", help="Returns (model, optimizer, batches, loss_fn).")
    ],
    machine: Annotated[
        str, typer.Option(help=f"The device and its link: {', '.join(MACHINES)}.")
    ] = "rtx4090",
    device_budget: Annotated[
        list[str] | None,
        typer.Option(help="Bytes, or a share of the device; may be repeated. Default: 80%."),
    ] = None,
    sweep: Annotated[
        bool, typer.Option("--sweep", help="Also budgets of 100 to 20 % of the unmanaged peak.")
    ] = False,
    host_memory: Annotated[
        str | None, typer.Option(help="What the host has. Default: as much as it takes.")
    ] = None,
    host_bandwidth: Annotated[
        str, typer.Option(help="Bytes a second that the host's step reads and writes.")
    ] = "40GB/s",
    efficiency: Annotated[
        float, typer.Option(min=0.01, max=1.0, help="Of the device's peak that operators reach.")
    ] = 0.5,
    json: Annotated[Path | None, typer.Option(help="Write the forecasts.")] = None,
) -> None:
    """Plan one training step for a machine, without owning it: memory, traffic, time.

    The step is traced under fake tensors and planned as hetero.manage would plan it. Bytes are those of that plan;
    times are modelled, from published peak figures and the efficiency that you expect: nobody has measured them.
    """
    check_writable(json)
    known = _known(machine)
    host = Host(
        memory_bytes=_ENDLESS if host_memory is None else parse_bytes(host_memory, name="--host-memory"),
        bandwidth=parse_rate(host_bandwidth, name="--host-bandwidth"),
    )
    recipe = recipe_of(load_function(target), target)
    traced: StepTrace = call(lambda: trace_recipe(recipe), what=f"tracing {target}")
    budgets = {
        parse_budget(text, known.memory_bytes, name="--device-budget"): text
        for text in device_budget or [_DEFAULT_SHARE]
    }
    if sweep:
        peak = traced.peak_nbytes()
        budgets |= {peak * share // 100: f"{share} % of the peak" for share in _SHARES}
    slowed = known.machine.slowed(1.0 / efficiency)
    console = open_console()
    rows: list[tuple[str, int, Forecast | BudgetError]] = []
    for budget, label in sorted(budgets.items(), reverse=True):
        with console.status(f"planning for {format_bytes(budget)}"):
            try:
                rows.append((label, budget, forecast(traced, slowed, device_budget=budget, host=host)))
            except BudgetError as error:
                rows.append((label, budget, error))
    found = [row for _, _, row in rows if isinstance(row, Forecast)]
    if not found:
        raise next(row for _, _, row in rows if isinstance(row, BudgetError))
    console.print(_summary(found[0], known))
    console.print(_table(rows))
    if json is not None:
        write_json(json, {"efficiency": efficiency, "forecasts": [each.to_dict() for each in found]})


def _known(name: str) -> KnownMachine:
    if name not in MACHINES:
        raise ConfigError(f"--machine {name}: unknown; use one of {', '.join(MACHINES)}")
    return MACHINES[name]


def _summary(first: Forecast, known: KnownMachine) -> Table:
    table = Table(show_header=False, box=None)
    parameters = "1 parameter" if first.parameters == 1 else f"{first.parameters} parameters"
    for name, value in (
        ("machine", f"{first.machine}, {format_bytes(known.memory_bytes)}"),
        ("model data", f"{format_bytes(first.model_bytes)} in {parameters}"),
        ("unmanaged peak", format_bytes(first.unmanaged_bytes)),
        ("unmanaged step", f"{format_seconds(first.unmanaged_seconds)} (modelled)"),
        ("least budget", f"{format_bytes(first.least_budget)}, and what kernels need for themselves"),
    ):
        table.add_row(name, value)
    return table


def _table(rows: list[tuple[str, int, Forecast | BudgetError]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    heads = ("budget", "", "step", "over unmanaged", "slowest", "moved", "host memory", "on the device")
    for head in heads:
        table.add_column(head, justify="left" if head in ("", "slowest") else "right", overflow="fold")
    for label, budget, row in rows:
        table.add_row(format_bytes(budget), label, *_cells(row))
    return table


def _cells(row: Forecast | BudgetError) -> tuple[Any, ...]:
    if isinstance(row, BudgetError):
        return ("too small", "", "", "", "", "")
    busy = {
        "operators": row.unmanaged_seconds,
        "copies up": row.up_seconds,
        "copies down": row.down_seconds,
        "the host's step": row.update_seconds,
    }
    return (
        format_seconds(row.step_seconds),
        f"{row.step_seconds / row.unmanaged_seconds:.2f}",
        "everything fits" if row.everything_fits else max(busy, key=busy.__getitem__),
        format_bytes(row.moved_bytes),
        format_bytes(row.host_bytes),
        f"{row.on_device} of {row.parameters}",
    )
