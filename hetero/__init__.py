"""hetero: train PyTorch models bigger than the device, with the same numbers as if everything fitted.

manager = hetero.manage(model, optimizer, device_budget="20GiB")
"""

from typing import TYPE_CHECKING, Any

from hetero.devices.virtual import virtual_device
from hetero.errors import (
    BudgetError,
    ConfigError,
    DeviceError,
    HeteroError,
    ManageError,
    PlanError,
    StateError,
    StreamRaceError,
)
from hetero.manager import Manager, manage
from hetero.stm.copies.shortage import NoRoomError

if TYPE_CHECKING:
    from hetero.trace import StepTrace, trace_step

__all__ = [
    "BudgetError",
    "ConfigError",
    "DeviceError",
    "HeteroError",
    "ManageError",
    "Manager",
    "NoRoomError",
    "PlanError",
    "StateError",
    "StepTrace",
    "StreamRaceError",
    "manage",
    "trace_step",
    "virtual_device",
]


def __getattr__(name: str) -> Any:
    # Training does not need the tracer, and loading it takes a third of the time.
    if name in ("StepTrace", "trace_step"):
        from hetero import trace

        return getattr(trace, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
