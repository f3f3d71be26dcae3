"""Out-of-memory errors, answered by making room.

Owns the retry. While an iteration is unplanned, its operators may need more than is left beside the copies that
are resident; the device's allocator is then capped at the budget (`Accelerator.cap`), so that an operator that
would pass it fails, and the guard evicts what no operator uses and runs that operator again. Operators
allocate before they write, so running one again after a failed allocation repeats nothing.

It costs a few microseconds an operator: planned iterations run without it.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)

from hetero.stm.fetch import plain

__all__ = ["Guard", "unguarded"]


class Guard(TorchDispatchMode):
    """Context in which every operator, forward and backward, is tried again after ``relieve()`` freed memory."""

    def __init__(self, relieve: Callable[[], int]) -> None:
        super().__init__()
        self._relieve = relieve

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Below autograd a managed parameter is only memory at home: it must not be intercepted again.
        with plain():
            try:
                return func(*args, **(kwargs or {}))
            except torch.OutOfMemoryError:
                if self._relieve() == 0:
                    raise
            return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def unguarded() -> Iterator[None]:
    """Within it, no `Guard` is active on this thread. Dispatch modes of others stay."""
    if any(isinstance(mode, Guard) for mode in _get_current_dispatch_mode_stack()):
        with _disable_current_modes():
            yield
    else:
        yield
