"""``hetero info``: what there is to compute on, how much memory, how fast the links are."""

import platform
from typing import Annotated

import torch
import typer
from rich.table import Table

from hetero.cli.output import open_console
from hetero.cli.placing import is_compiled
from hetero.cli.provenance import describe_device
from hetero.devices import Accelerator, device_memory_free, host_memory_free, host_memory_total, probe_links
from hetero.devices.virtual import virtual_device
from hetero.errors import HeteroError
from hetero.units import format_bytes

__all__ = ["info"]


def info(
    virtual: Annotated[
        bool, typer.Option("--virtual", help="Build the virtual accelerator if needed, and measure its link.")
    ] = False,
) -> None:
    """Show devices, the budgets that would be used by default, link speeds, host memory and versions."""
    table = Table(show_header=False, box=None)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("torch", f"{torch.__version__}, Python {platform.python_version()}, {platform.machine()}")
    table.add_row("CPU threads", str(torch.get_num_threads()))
    free, total = host_memory_free(), host_memory_total()
    table.add_row("host memory", f"{format_bytes(total)} under this cgroup, {format_bytes(free)} free")
    table.add_row("host_budget", f"{format_bytes(free)} by default")
    devices = _devices(virtual)
    if not devices:
        table.add_row("accelerator", "none; --virtual shows the one that stands in for it")
    for device in devices:
        _add_device(table, Accelerator(device))
    table.add_row(
        "virtual accelerator", "built" if is_compiled() else "not built yet (on first use, about a minute)"
    )
    open_console().print(table)


def _devices(virtual: bool) -> list[torch.device]:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if virtual:
        return [virtual_device()]
    if accelerator is None:
        return []
    return [torch.device(accelerator.type, index) for index in range(torch.accelerator.device_count())]


def _add_device(table: Table, accelerator: Accelerator) -> None:
    device = accelerator.device
    free = device_memory_free(accelerator)
    table.add_row(str(device), f"{describe_device(device)}, {format_bytes(free)} free")
    budget = accelerator.usable_of(free)
    table.add_row(f"{device} device_budget", f"{format_bytes(budget)} by default")
    try:
        links = str(probe_links(accelerator))
    except (HeteroError, torch.OutOfMemoryError) as error:  # a full device is still worth listing
        links = f"not measured: {str(error).splitlines()[0]}"
    table.add_row(f"{device} links", links)
