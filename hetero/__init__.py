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

__all__ = [
    "BudgetError",
    "ConfigError",
    "DeviceError",
    "HeteroError",
    "ManageError",
    "Manager",
    "PlanError",
    "StateError",
    "StreamRaceError",
    "manage",
    "virtual_device",
]
