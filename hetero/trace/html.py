"""A trace as one interactive page: load curve by kind of storage, phases, and who holds the bytes at any
operator.

Owns what the page is given; `page.html` owns how it looks. Invariant: the page is self-contained (it fetches
nothing) and no name in a trace can become markup or script.
"""

import json
import os
from importlib.resources import files

from hetero.files import write_text
from hetero.trace.steptrace import KINDS, PHASES, StepTrace
from hetero.units import format_bytes

__all__ = ["to_html", "write_html"]


def to_html(trace: StepTrace, *, device: str | None = None) -> str:
    """The page of ``trace`` for the storages on ``device`` (default: the trace's device)."""
    on = device or trace.device
    numbers: dict[str, int] = {}
    load = trace.load_curve(device=on)
    data = {
        "device": on,
        "span": trace.span,
        "peak": int(load.max()),
        "peak_at": int(load.argmax()),
        "phase_peaks": trace.phase_peaks(device=on),
        "summary": _summary(trace, on),
        "kinds": KINDS,
        "phases": PHASES,
        "operators": [
            [_number(numbers, o.name), PHASES.index(o.phase), _number(numbers, o.module)]
            for o in trace.operators
        ],
        "storages": [
            [s.begin, s.end, s.nbytes, KINDS.index(s.kind), _number(numbers, s.name)]
            for s in trace.storages
            if s.device == on
        ],
        "strings": list(numbers),
    }
    text = json.dumps(data, separators=(",", ":"))
    # What is not ASCII json has escaped itself.
    return _template().replace("/*DATA*/", text.replace("<", "\\u003c"))


def write_html(trace: StepTrace, path: str | os.PathLike[str], *, device: str | None = None) -> None:
    """Write the page of ``trace``, whole or not at all."""
    write_text(path, to_html(trace, device=device))


def _summary(trace: StepTrace, device: str) -> str:
    storages = sum(1 for storage in trace.storages if storage.device == device)
    text = f"{trace.source} trace: {len(trace.operators)} operators, {storages} storages"
    if trace.measured_peak_nbytes is None or device != trace.device:
        return text
    return f"{text}; the allocator measured a peak of {format_bytes(trace.measured_peak_nbytes)}"


def _number(numbers: dict[str, int], text: str) -> int:
    return numbers.setdefault(text, len(numbers))


def _template() -> str:
    return files("hetero.trace").joinpath("page.html").read_text(encoding="utf-8")
