"""Tables as text, of a width of their own: what `print(manager.stats)` and `print(manager.plan)` show."""

import io

from rich.console import Console
from rich.table import Table

__all__ = ["ROWS", "WIDTH", "as_text"]

WIDTH = 160
ROWS = 40  # of a printed table; the rest is in what it was made of


def as_text(*tables: Table) -> str:
    """One under the other."""
    text = io.StringIO()
    console = Console(file=text, width=WIDTH)
    for table in tables:
        console.print(table)
    return text.getvalue()
