"""What a call was given: the tensors among its arguments."""

import dataclasses
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

__all__ = ["any_on", "attributes", "tensors_in"]

_CLOSED = (nn.Module, torch.optim.Optimizer, type, types.ModuleType, types.FunctionType, types.MethodType)
_MOST_DEEP = 3  # objects within one another
_MOST_HELD = 1000  # a batch is made of fewer tensors; what is longer may be a data set


def tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """In lists, tuples and dictionaries as well."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)
        elif isinstance(value, dict):
            yield from tensors_in(value.values())


def attributes(value: Any, depth: int) -> dict[str, Any]:
    """What an object holds that a batch may come as, ``depth`` others around it: the fields of a dataclass, what a
    `collections.UserDict` is made of, but none of a module or a function, and no long lists. Runs none of its code."""
    if depth >= _MOST_DEEP or isinstance(value, _CLOSED):
        return {}
    try:
        found = vars(value)
    except TypeError:
        if not dataclasses.is_dataclass(value):
            return {}
        found = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    return {name: held for name, held in found.items() if not _is_long(held)}


def _is_long(held: Any) -> bool:
    return isinstance(held, list | tuple | dict) and len(held) > _MOST_HELD


def any_on(device: torch.device, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """One of them is on ``device``, also in an object that one of them is."""
    return _any_on(device, (*args, *kwargs.values()), 0)


def _any_on(device: torch.device, values: Iterable[Any], depth: int) -> bool:
    for value in values:
        if isinstance(value, torch.Tensor):
            found = value.device == device
        elif isinstance(value, list | tuple):
            found = _any_on(device, value, depth)
        elif isinstance(value, dict):
            found = _any_on(device, value.values(), depth)
        else:
            found = _any_on(device, attributes(value, depth).values(), depth + 1)
        if found:
            return True
    return False
