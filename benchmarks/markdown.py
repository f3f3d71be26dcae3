"""A benchmark's record, and a table in markdown."""

from collections.abc import Sequence
from typing import Any

__all__ = ["Record", "markdown"]

Record = dict[str, Any]


def markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
