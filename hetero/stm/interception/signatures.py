"""What decides which operators a forward runs, as far as it can be seen from outside.

Owns the signature of a call: iterations with equal ones share measurements and plans; and whether a call may have a
backward.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from hetero.stm.tensors.fetch import plain
from hetero.stm.tensors.managed import ManagedTensor

__all__ = ["may_record", "signature_of"]


def signature_of(
    model: nn.Module, device_type: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[object, ...]:
    """Of a call of ``model`` on such a device; hashable. The second is what autocast casts to there, or False."""
    return (
        model.training,
        torch.is_autocast_enabled(device_type) and torch.get_autocast_dtype(device_type),
        _shapes(args),
        (tuple(kwargs), _shapes(kwargs.values())) if kwargs else (),
    )


def _shapes(values: Iterable[Any]) -> tuple[object, ...]:
    # No generators: it is called at each forward, settled ones included, once for each container.
    seen: list[object] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            seen.append((tuple(value.shape), value.dtype))
        elif isinstance(value, list | tuple):
            seen.append(_shapes(value))
        elif isinstance(value, dict):
            seen.append((tuple(value), _shapes(value.values())))
        elif isinstance(value, bool | int | float | str | type(None)):
            seen.append(value)
        else:
            seen.append(type(value))
    return tuple(seen)


def may_record(tensors: Sequence[ManagedTensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Autograd may record a call with these parameters and arguments: one of them wants a gradient, or something among
    the arguments cannot be looked into. A teacher, all frozen and called in grad mode, has no backward."""
    with plain():
        trained = any(tensor.parameter.requires_grad for tensor in tensors)
    return trained or _may_want_gradients(args) or _may_want_gradients(kwargs.values())


def _may_want_gradients(values: Iterable[Any]) -> bool:
    for value in values:
        if isinstance(value, torch.Tensor):
            found = value.requires_grad
        elif isinstance(value, list | tuple):
            found = _may_want_gradients(value)
        elif isinstance(value, dict):
            found = _may_want_gradients(value.values())
        else:
            found = not isinstance(value, bool | int | float | str | type(None))
        if found:
            return True
    return False
