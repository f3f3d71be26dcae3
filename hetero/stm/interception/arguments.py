"""What a call was given: the tensors among its arguments."""

import dataclasses
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

__all__ = ["OBJECTS", "any_on", "attributes", "tensors_in"]

OBJECTS = 3  # so many of a call's arguments within one another are looked into

_CLOSED = (nn.Module, torch.optim.Optimizer, type, types.ModuleType, types.FunctionType, types.MethodType)
_MOST_HELD = 1000  # a batch is made of fewer tensors; what is longer may be a data set


def tensors_in(values: Iterable[Any], *, objects: int = 0) -> Iterator[torch.Tensor]:
    """In lists, tuples and dictionaries as well, and in so many ``objects`` within one another (`attributes`)."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value, objects=objects)
        elif isinstance(value, dict):
            yield from tensors_in(value.values(), objects=objects)
        elif objects:
            yield from tensors_in(attributes(value).values(), objects=objects - 1)


def attributes(value: Any) -> dict[str, Any]:
    """What an object holds that a batch may come as: the fields of a dataclass, what a `collections.UserDict` is made
    of, but none of a module or a function, and no long lists. Runs none of its code."""
    if isinstance(value, _CLOSED):
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
    """One of the tensors that a call was given is on ``device``."""
    return any(tensor.device == device for tensor in tensors_in((*args, *kwargs.values()), objects=OBJECTS))
