"""What decides which operators a forward runs, as far as it can be seen from outside.

Owns the signature of a call: iterations with equal ones share measurements and plans.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

__all__ = ["signature_of"]


def signature_of(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Of a call of ``model``; hashable."""
    return (
        model.training,
        torch.is_autocast_enabled(),
        tuple(_shapes(args)),
        tuple((key, *_shapes((value,))) for key, value in kwargs.items()),
    )


def _shapes(values: Iterable[Any]) -> Iterable[object]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield (tuple(value.shape), value.dtype)
        elif isinstance(value, list | tuple):
            yield tuple(_shapes(value))
        elif isinstance(value, dict):
            yield tuple((key, *_shapes((item,))) for key, item in value.items())
        elif isinstance(value, bool | int | float | str | type(None)):
            yield value
        else:
            yield type(value)
