"""Modules around a managed one that read its gradients below interception.

Owns their refusal. `torch.nn.parallel.DistributedDataParallel` copies ``p.grad`` as soon as autograd has handed it
over, which is before it has come home, and trains with whatever was in that memory.
"""

from collections.abc import Iterable

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from hetero.errors import ManageError
from hetero.stm.settled.who import record_of

__all__ = ["check_caller", "check_wrapped"]


def check_wrapped(parent: nn.Module, submodule: nn.Module | None) -> None:
    """Raises `ManageError` if ``parent`` is such a wrapper, and ``submodule``, which becomes a part of it, managed."""
    if isinstance(parent, DistributedDataParallel | DataParallel) and submodule is not None:
        _check(parent, submodule.parameters())


def check_caller(*, trains: bool) -> None:
    """Raises `ManageError` if a managed model is called by a wrapper from before it was managed."""
    wrapper = DistributedDataParallel._active_ddp_module
    if trains and wrapper is not None:
        _check(wrapper, wrapper.parameters())


def _check(wrapper: nn.Module, parameters: Iterable[nn.Parameter]) -> None:
    if any(record_of(parameter) is not None for parameter in parameters):
        raise ManageError(
            f"{type(wrapper).__name__} around a managed model would read gradients before they have come home, and "
            "train with other numbers; hetero is for one device and one process: call the model itself, or close() its "
            "manager first"
        )
