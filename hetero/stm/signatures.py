"""What decides which operators a forward runs, as far as it can be seen from outside.

Owns the signature of a call: iterations with equal ones share measurements and plans.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

__all__ = ["signature_of"]


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
