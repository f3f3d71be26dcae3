"""The errors hetero raises, as one tree.

Every message states the fact, the numbers, and the cure. Errors that replace one of Python's or torch's own
also derive from it, so that ``except ValueError`` and ``except RuntimeError`` keep their meaning.

    HeteroError
    ├── ConfigError (ValueError)       a keyword or argument that cannot be used
    ├── ManageError (RuntimeError)     a model, optimizer or call that cannot be managed as it is
    ├── BudgetError (RuntimeError)     something that cannot fit under device_budget or host_budget
    │   └── NoRoomError                an operator that is refused; also a torch.OutOfMemoryError
    │                                  (`hetero.stm.copies.shortage`)
    ├── StateError (RuntimeError)      an illegal transition of a tensor's state
    ├── PlanError (ValueError)         a trace, problem, schedule or solution that is not valid
    ├── DeviceError (RuntimeError)     a device that cannot be used: no compiler, no accelerator
    └── StreamRaceError (RuntimeError) an access that no wait orders, found by the virtual accelerator
"""

__all__ = [
    "BudgetError",
    "ConfigError",
    "DeviceError",
    "HeteroError",
    "ManageError",
    "PlanError",
    "StateError",
    "StreamRaceError",
]


class HeteroError(Exception):
    """Base of every error that hetero raises on purpose."""


class ConfigError(HeteroError, ValueError):
    """A keyword or argument that cannot be used; names the value and what would do."""


class ManageError(HeteroError, RuntimeError):
    """A model, optimizer or call that hetero cannot manage as it is; says what to do. Where `hetero.manage` raises it,
    nothing has been changed."""


class BudgetError(HeteroError, RuntimeError):
    """Something that cannot fit under a budget; names the operator, the bytes and the least that would do."""


class StateError(HeteroError, RuntimeError):
    """An illegal transition of a managed tensor's state."""


class PlanError(HeteroError, ValueError):
    """A trace, problem, schedule or solution that is not valid; names the first offender."""


class DeviceError(HeteroError, RuntimeError):
    """A device that cannot be used as asked; says what to install or choose instead."""


class StreamRaceError(HeteroError, RuntimeError):
    """An access on one stream, or by the host, that no wait orders after another's; names the tensor and both."""
