"""What commands print to, the JSON files they write, and the progress bar they show."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from hetero.files import write_text
from hetero.report.text import WIDTH

__all__ = ["open_console", "progress", "write_json"]


def open_console() -> Console:
    """Standard output; wide if it is no terminal, so that no name is cut up in a file or a pipe."""
    return Console() if sys.stdout.isatty() else Console(width=WIDTH)


def write_json(path: Path, values: dict[str, object]) -> None:
    """Write ``values`` to ``path``, replacing it only once everything is on disk."""
    write_text(path, json.dumps(values, indent=2) + "\n")


@contextmanager
def progress(console: Console, title: str, steps: int) -> Iterator[Callable[[int, float], None]]:
    """A progress bar; call what is yielded with the step's number and loss."""
    columns = (
        TextColumn("{task.description:<10}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(title, total=steps, loss="")

        def advance(number: int, loss: float) -> None:
            bar.update(task, completed=number + 1, loss=f"{loss:.4f}")

        yield advance
