"""Tables as text, of a width of their own: what `print(manager.stats)` and `print(manager.plan)` show."""

import io

from rich.console import Console
from rich.table import Table

__all__ = ["as_text"]

_WIDTH = 160


def as_text(*tables: Table) -> str:
    """One under the other."""
    text = io.StringIO()
    console = Console(file=text, width=_WIDTH)
    for table in tables:
        console.print(table)
    return text.getvalue()
