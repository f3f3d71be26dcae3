"""Recording a training step: operators, accesses, lifetimes; on real or on fake tensors."""

from hetero.trace.record import trace_loop, trace_recipe, trace_step
from hetero.trace.steptrace import KINDS, PHASES, Kind, Operator, Phase, StepTrace, Storage

__all__ = [
    "KINDS",
    "PHASES",
    "Kind",
    "Operator",
    "Phase",
    "StepTrace",
    "Storage",
    "trace_loop",
    "trace_recipe",
    "trace_step",
]
