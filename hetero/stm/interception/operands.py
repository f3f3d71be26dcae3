"""The managed parameters among what an operator is given, and what stands in their place."""

from typing import Any

import torch

from hetero.stm.interception.parameter import ManagedParameter
from hetero.stm.tensors.managed import ManagedTensor

__all__ = ["collect", "replace", "replace_one", "restore"]


def collect(values: Any, operands: list[ManagedTensor]) -> None:
    """Append to ``operands`` the records of those in ``values``, each once; in lists, tuples, dictionaries as well."""
    for value in values:
        kind = type(value)
        if kind is ManagedParameter:
            if value._hetero not in operands:
                operands.append(value._hetero)
        elif kind is list or kind is tuple:
            collect(value, operands)
        elif kind is dict:
            collect(value.values(), operands)


def replace(values: Any, copies: dict[int, torch.Tensor]) -> Any:
    """``values``, as a tuple, with ``copies`` in the place of parameters, by their ids; KeyError if one has none."""
    return tuple(
        [
            copies[id(value)] if type(value) is ManagedParameter else replace_one(value, copies)
            for value in values
        ]
    )


def replace_one(value: Any, copies: dict[int, torch.Tensor]) -> Any:
    """As `replace`, for one argument."""
    kind = type(value)
    if kind is ManagedParameter:
        return copies[id(value)]
    if kind is tuple:
        return replace(value, copies)
    if kind is list:
        return [replace_one(item, copies) for item in value]
    if kind is dict:
        return {key: replace_one(item, copies) for key, item in value.items()}
    return value


def restore(result: Any, operands: list[ManagedTensor], copies: dict[int, torch.Tensor]) -> Any:
    """An operator that returns an operand as it is (``p.contiguous()``, ``p.add_()``) returns the parameter."""
    if isinstance(result, torch.Tensor):
        for tensor in operands:
            if result is copies[id(tensor.parameter)]:
                return tensor.parameter
    elif type(result) is tuple or type(result) is list:
        return type(result)([restore(item, operands, copies) for item in result])
    return result
