"""hetero: train PyTorch models bigger than the device, with the same numbers as if everything fitted.

manager = hetero.manage(model, optimizer, device_budget="20GiB")
"""

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
from hetero.trace import StepTrace, trace_step

__all__ = [
    "BudgetError",
    "ConfigError",
    "DeviceError",
    "HeteroError",
    "ManageError",
    "Manager",
    "PlanError",
    "StateError",
    "StepTrace",
    "StreamRaceError",
    "manage",
    "trace_step",
    "virtual_device",
]
