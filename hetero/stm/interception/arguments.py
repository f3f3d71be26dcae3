"""What a call was given: the tensors among its arguments."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch

__all__ = ["any_on", "tensors_in"]


def tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """In lists, tuples and dictionaries as well."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)
        elif isinstance(value, dict):
            yield from tensors_in(value.values())


def any_on(device: torch.device, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """One of them is on ``device``."""
    return any(tensor.device == device for tensor in tensors_in((*args, *kwargs.values())))
