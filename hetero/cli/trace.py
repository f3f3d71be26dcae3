"""``hetero trace FILE.py:FUNCTION``: what one step's memory is made of, without computing it or needing that memory."""

from pathlib import Path
from typing import Annotated

import torch
import typer

from hetero.cli.jobs import recipe_of
from hetero.cli.loading import call, load_function
from hetero.cli.placing import choose_device
from hetero.files import check_writable
from hetero.trace import StepTrace, trace_recipe, write_csv, write_html, write_json
from hetero.units import format_bytes

__all__ = ["trace"]


def trace(
    target: Annotated[
        str,
        typer.Argument(
            metavar="FILE.py:FUNCTION", help="Returns (step, *args), or (model, optimizer, batches, loss_fn)."
        ),
    ],
    real: Annotated[
        bool, typer.Option("--real", help="Compute the step; default: fake tensors, without memory.")
    ] = False,
    device: Annotated[
        str | None, typer.Option(help="Where the step runs, or, fake, seems to. Default: accelerator or CPU.")
    ] = None,
    warmup: Annotated[int, typer.Option(min=0, help="Steps before the recorded one.")] = 1,
    html: Annotated[Path | None, typer.Option(help="Write a self-contained interactive page.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write the trace.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write the lives of storages for MiniMalloc.")] = None,
) -> None:
    """Record one training step: what lives when, and what the peak is made of.

    By default nothing is computed and no memory is used, so that a model of any size can be looked at.
    """
    check_writable(html, json, csv)
    place: torch.device | str | None = device
    if real and (device is not None or torch.accelerator.is_available()):
        place = choose_device(device)  # before any code of the user's: autograd counts devices only once
    recipe = recipe_of(load_function(target), target)
    traced: StepTrace = call(
        lambda: trace_recipe(recipe, fake=not real, device=place, warmup=warmup), what=f"tracing {target}"
    )
    typer.echo(traced.table())
    for phase, nbytes in traced.phase_peaks().items():
        typer.echo(f"peak in {phase}: {format_bytes(nbytes)}")
    for path, write in ((html, write_html), (json, write_json), (csv, write_csv)):
        if path is not None:
            write(traced, path)
