"""Which gradients can be changed together without reading them.

Owns the answer for lists of parameters that users hand to clipping and to `GradScaler`. Invariant: what is done to
those later, or on the device, has the bits of what torch does to such a list at once.
"""

from collections.abc import Iterable

import torch

from hetero.stm.interception.parameter import is_managed, managed_of
from hetero.stm.tensors.fetch import plain
from hetero.stm.tensors.managed import ManagedTensor

__all__ = ["foldable", "foldable_parts"]


def foldable(parameters: Iterable[torch.Tensor]) -> list[ManagedTensor]:
    """Those with a gradient, if all of them are managed by one manager and of one type; else none. None, too, where
    interception is off, as in hooks of accumulated gradients: nobody would ask us when they are read next."""
    tensors: list[ManagedTensor] = []
    if not torch._C._is_torch_function_enabled():
        return tensors
    with plain():
        for parameter in parameters:
            if parameter.grad is None:
                continue
            if not is_managed(parameter) or parameter.grad.layout is not torch.strided:
                return []
            tensors.append(managed_of(parameter))
            if parameter.dtype not in (torch.float32, torch.float64) or parameter.grad.requires_grad:
                return []
            if tensors[-1].owner is not tensors[0].owner or parameter.dtype != tensors[0].parameter.dtype:
                return []
    return tensors if len(set(map(id, tensors))) == len(tensors) else []


def foldable_parts(parameters: Iterable[torch.Tensor]) -> list[list[ManagedTensor]]:
    """As `foldable`, of each manager's parameters among these: they may be several, beside others that are nobody's."""
    owned: dict[int, list[torch.Tensor]] = {}
    for parameter in parameters:
        if is_managed(parameter):
            owned.setdefault(id(managed_of(parameter).owner), []).append(parameter)
    return [tensors for part in owned.values() if (tensors := foldable(part))]
