"""Traces as files: JSON, which holds all of a trace, and MiniMalloc's CSV, which holds its storages' lives.

Owns the JSON format and its version. Invariant: what is read is a valid `StepTrace` equal to the one written,
or a `PlanError` naming the file and the fault; writing replaces the file only when everything is on disk. The
CSV format is `hetero.pool`'s; reading CUDA memory snapshots is `hetero.trace.snapshot`'s.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hetero.errors import PlanError
from hetero.files import write_text
from hetero.pool.minimalloc_csv import read_problem, write_problem
from hetero.trace.snapshot import read_snapshot
from hetero.trace.steptrace import Operator, StepTrace, Storage

__all__ = ["from_json", "read_csv", "read_json", "read_trace", "to_json", "write_csv", "write_json"]

_FORMAT = "hetero step trace"
_VERSION = 1
_MOST_TIMES = 2**27  # in a trace without operators: a load curve of 1 GiB


def to_json(trace: StepTrace) -> str:
    """``trace`` as JSON text: a header, then one operator and one storage a line."""
    header = {
        "format": _FORMAT,
        "version": _VERSION,
        "device": trace.device,
        "source": trace.source,
        "span": trace.span,
        "measured_peak_nbytes": trace.measured_peak_nbytes,
        "operator_columns": ["name", "phase", "module", "reads", "writes", "flops"],
        "storage_columns": ["id", "begin", "end", "nbytes", "kind", "name", "device"],
    }
    operators = [[o.name, o.phase, o.module, list(o.reads), list(o.writes), o.flops] for o in trace.operators]
    storages = [[s.id, s.begin, s.end, s.nbytes, s.kind, s.name, s.device] for s in trace.storages]
    head = json.dumps(header)[:-1]
    return f'{head},\n"operators": {_lines(operators)},\n"storages": {_lines(storages)}}}\n'


def from_json(text: str, *, name: str = "text") -> StepTrace:
    """The trace in JSON ``text``; ``name`` is what errors call it. Raises `PlanError` for anything
    malformed."""
    try:
        data = json.loads(text)
    except ValueError as error:
        raise PlanError(f"{name} is not a whole JSON trace, it may have been cut short: {error}") from error
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        raise PlanError(f"{name} is not a step trace: its 'format' is not {_FORMAT!r}")
    if data.get("version") != _VERSION:
        raise PlanError(f"{name} is of version {data.get('version')!r}; this hetero reads version {_VERSION}")
    try:
        return StepTrace(
            operators=tuple(_operator(row) for row in data["operators"]),
            storages=tuple(_storage(row) for row in data["storages"]),
            span=_whole(data["span"]),
            device=str(data["device"]),
            source=str(data["source"]),
            measured_peak_nbytes=_whole_or_none(data["measured_peak_nbytes"]),
        )
    except PlanError as error:
        raise PlanError(f"{name}: {error}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise PlanError(f"{name} is malformed: {type(error).__name__}: {error}") from error


def write_json(trace: StepTrace, path: str | os.PathLike[str]) -> None:
    """Write ``trace`` as JSON, whole or not at all."""
    write_text(path, to_json(trace))


def read_json(path: str | os.PathLike[str]) -> StepTrace:
    """The trace in a JSON file. Raises `PlanError` if it is cut short or malformed, `OSError` if
    unreadable."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise PlanError(f"{path} is not a step trace: it is not UTF-8 text ({error.reason})") from error
    return from_json(text, name=str(path))


def write_csv(trace: StepTrace, path: str | os.PathLike[str], *, device: str | None = None) -> None:
    """Write the lives of the storages on ``device`` in MiniMalloc's format: ``id,lower,upper,size``."""
    write_problem(path, trace.to_problem(device=device))


def read_csv(path: str | os.PathLike[str]) -> StepTrace:
    """A MiniMalloc CSV file as a trace without operators; ids become 0..n-1, names keep the file's ids.

    Times are shifted to begin at 0. Raises `PlanError` for anything malformed, or times too far apart to be looked
    at one by one, `OSError` if it cannot be read.
    """
    problem = read_problem(path)
    if not problem.buffers:
        raise PlanError(f"{path} has no buffers: nothing to trace")
    first = min(buffer.begin for buffer in problem.buffers)
    span = max(buffer.end for buffer in problem.buffers) - first
    if span > _MOST_TIMES:
        raise PlanError(
            f"{path}: its times are {span} apart, and at most {_MOST_TIMES} are looked at one by one: number events "
            "instead, or place the buffers without a trace (hetero.pool.read_problem)"
        )
    storages = tuple(
        Storage(
            id=number,
            begin=buffer.begin - first,
            end=buffer.end - first,
            nbytes=buffer.nbytes,
            kind="temporary",
            name=str(buffer.id),
            device="memory",
        )
        for number, buffer in enumerate(problem.buffers)
    )
    return StepTrace(operators=(), storages=storages, span=span, device="memory", source="csv")


def read_trace(path: str | os.PathLike[str]) -> StepTrace:
    """A trace from a file, by its ending: ``.json``, ``.csv`` (MiniMalloc) or ``.pickle`` (CUDA snapshot). Raises
    `PlanError` for another ending, or a file that is not what its ending says."""
    readers: dict[str, Callable[[str | os.PathLike[str]], StepTrace]] = {
        ".json": read_json,
        ".csv": read_csv,
        ".pickle": read_snapshot,
        ".pkl": read_snapshot,
    }
    reader = readers.get(Path(path).suffix.lower())
    if reader is None:
        raise PlanError(f"{path}: cannot tell what it is; name it {', '.join(readers)}")
    return reader(path)


def _lines(rows: list[list[Any]]) -> str:
    return "[\n" + ",\n".join(json.dumps(row) for row in rows) + "]" if rows else "[]"


def _operator(row: Any) -> Operator:
    name, phase, module, reads, writes, *flops = row  # traces of before operations were counted have none
    return Operator(
        name=_text(name),
        phase=phase,
        module=_text(module),
        reads=tuple(_whole(i) for i in reads),
        writes=tuple(_whole(i) for i in writes),
        flops=_whole(*flops) if flops else 0,
    )


def _storage(row: Any) -> Storage:
    number, begin, end, nbytes, kind, name, device = row
    return Storage(
        id=_whole(number),
        begin=_whole(begin),
        end=_whole(end),
        nbytes=_whole(nbytes),
        kind=kind,
        name=_text(name),
        device=_text(device),
    )


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"expected a whole number, got {value!r}")
    return value


def _whole_or_none(value: Any) -> int | None:
    return None if value is None else _whole(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected text, got {value!r}")
    return value
