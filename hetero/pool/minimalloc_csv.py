"""Problems and solutions as MiniMalloc CSV files: ``id,lower,upper,size`` and, in a solution, ``offset``.

Owns reading and writing that format. Invariants: a malformed row is a `PlanError` with its line number, and
a file is written whole or not at all. Columns may come in any order; MiniMalloc's own optional columns are
accepted where they say nothing (alignment 1, no gaps) and refused otherwise, rather than ignored. It
validates no placement.
"""

import csv
import io
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from hetero.errors import PlanError
from hetero.files import write_text
from hetero.pool.problem import Buffer, BufferId, Problem, Solution

__all__ = ["read_problem", "read_solution", "write_problem", "write_solution"]

_REQUIRED = ("id", "lower", "upper", "size")
_INTEGER = re.compile(r"[+-]?[0-9]{1,30}")
_INERT = {"alignment": ("", "1"), "gaps": ("",), "hint": ("", "-1")}


def read_problem(path: str | os.PathLike[str]) -> Problem:
    """The problem in a MiniMalloc CSV file; an ``offset`` column, if any, is not looked at.

    Raises `PlanError` naming file and line for anything malformed, `OSError` if it cannot be read.
    """
    source = Path(path)
    rows = _rows(source)
    return _problem(source, rows)


def read_solution(path: str | os.PathLike[str]) -> tuple[Problem, Solution]:
    """A problem and the solution in its ``offset`` column, not yet validated; ``planner`` is the file's
    name.
    """
    source = Path(path)
    rows = _rows(source)
    problem = _problem(source, rows)
    offsets = [_integer(source, line, row, "offset") for line, row in rows]
    footprint = max((o + b.nbytes for o, b in zip(offsets, problem.buffers, strict=True)), default=0)
    return problem, Solution(
        offsets=tuple(offsets),
        footprint=max(footprint, 0),
        planner=source.name,
        seconds=0.0,
        proven_optimal=False,
    )


def write_problem(path: str | os.PathLike[str], problem: Problem) -> None:
    """Write ``problem``, replacing ``path`` only once everything is on disk."""
    rows = ((b.id, b.begin, b.end, b.nbytes) for b in problem.buffers)
    _write(path, _REQUIRED, rows)


def write_solution(path: str | os.PathLike[str], problem: Problem, solution: Solution) -> None:
    """Write the problem's rows with an ``offset`` column, replacing ``path`` only once all is on disk. Raises
    `PlanError` for a solution to another problem."""
    if len(solution.offsets) != len(problem):
        raise PlanError(f"solution has {len(solution.offsets)} offsets for {len(problem)} buffers")
    rows = (
        (b.id, b.begin, b.end, b.nbytes, offset)
        for b, offset in zip(problem.buffers, solution.offsets, strict=True)
    )
    _write(path, (*_REQUIRED, "offset"), rows)


def _rows(source: Path) -> list[tuple[int, dict[str, str]]]:
    """Line number and named fields of each row."""
    try:
        with source.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file, strict=True)
            header = [name.strip().lower() for name in next(reader, [])]
            _check_header(source, header)
            rows = []
            for fields in reader:
                if not fields:
                    continue
                if len(fields) != len(header):
                    raise PlanError(
                        f"{source}, line {reader.line_num}: {len(fields)} fields where the header has "
                        f"{len(header)}; the file may be truncated"
                    )
                rows.append((reader.line_num, dict(zip(header, (f.strip() for f in fields), strict=True))))
    except (csv.Error, UnicodeDecodeError) as error:
        raise PlanError(f"{source}: not a CSV file: {error}") from error
    return rows


def _check_header(source: Path, header: list[str]) -> None:
    missing = [name for name in _REQUIRED if name not in header]
    if missing:
        raise PlanError(
            f"{source}, line 1: no column {', '.join(missing)}; a MiniMalloc file has {','.join(_REQUIRED)}"
        )
    if len(set(header)) != len(header):
        raise PlanError(f"{source}, line 1: a column name appears twice in {','.join(header)}")


def _problem(source: Path, rows: Sequence[tuple[int, dict[str, str]]]) -> Problem:
    buffers, first_line = [], dict[BufferId, int]()
    for line, row in rows:
        _refuse_meaningful_extras(source, line, row)
        name = _identity(row["id"])
        if name in first_line:
            raise PlanError(f"{source}, line {line}: id {name!r} appears already on line {first_line[name]}")
        first_line[name] = line
        begin, end, nbytes = (_integer(source, line, row, column) for column in ("lower", "upper", "size"))
        try:
            buffers.append(Buffer(id=name, begin=begin, end=end, nbytes=nbytes))
        except PlanError as error:
            raise PlanError(f"{source}, line {line}: {error}") from error
    try:
        return Problem(buffers=tuple(buffers), name=source.stem)
    except PlanError as error:
        raise PlanError(f"{source}: {error}") from error


def _refuse_meaningful_extras(source: Path, line: int, row: dict[str, str]) -> None:
    for column, inert in _INERT.items():
        if row.get(column, "") not in inert:
            raise PlanError(
                f"{source}, line {line}: {column} {row[column]!r} is not supported; round sizes up to a "
                "multiple of an alignment, split a buffer at its gaps, and drop the column"
            )


def _integer(source: Path, line: int, row: dict[str, str], column: str) -> int:
    if column not in row:
        raise PlanError(f"{source}, line 1: no column {column}; this is a problem, not a solution")
    # int() alone would accept underscores and other scripts' digits.
    if not _INTEGER.fullmatch(row[column]):
        raise PlanError(f"{source}, line {line}: {column} {row[column]!r} is not an integer")
    return int(row[column])


def _identity(text: str) -> BufferId:
    """Ids that are plain integers come back as ``int``, so that a round trip keeps their type."""
    return int(text) if text.isascii() and text.lstrip("-").isdigit() and str(int(text)) == text else text


def _write(path: str | os.PathLike[str], header: Sequence[str], rows: Iterable[Sequence[BufferId]]) -> None:
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    write_text(path, text.getvalue())
