"""Recording a training step: operators, accesses, lifetimes; on real or on fake tensors.

`reorder_backend` and `reorder_graph`, for FX graphs, are imported when asked for, and torch's compiler with
them.
"""

from typing import TYPE_CHECKING, Any

from hetero.trace.formats import from_json, read_csv, read_json, read_trace, to_json, write_csv, write_json
from hetero.trace.html import to_html, write_html
from hetero.trace.record import trace_loop, trace_recipe, trace_step
from hetero.trace.replay import allocation_events
from hetero.trace.snapshot import from_snapshot, read_snapshot
from hetero.trace.steptrace import KINDS, PHASES, Kind, Operator, Phase, StepTrace, Storage
from hetero.trace.swapping import operator_seconds, swap_step

if TYPE_CHECKING:
    from hetero.trace.reorder import reorder_backend, reorder_graph

__all__ = [
    "KINDS",
    "PHASES",
    "Kind",
    "Operator",
    "Phase",
    "StepTrace",
    "Storage",
    "allocation_events",
    "from_json",
    "from_snapshot",
    "operator_seconds",
    "read_csv",
    "read_json",
    "read_snapshot",
    "read_trace",
    "reorder_backend",
    "reorder_graph",
    "swap_step",
    "to_html",
    "to_json",
    "trace_loop",
    "trace_recipe",
    "trace_step",
    "write_csv",
    "write_html",
    "write_json",
]


def __getattr__(name: str) -> Any:
    if name in ("reorder_backend", "reorder_graph"):
        from hetero.trace import reorder

        return getattr(reorder, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
