"""Clipping by the global norm without reading gradients again.

Owns what ``torch.nn.utils.clip_grad_norm_`` and ``clip_grads_with_norm_`` run while any model is managed. Invariant:
the total norm and the scaled gradients have the bits of the unmanaged run: each gradient's norm is taken on the
device, as it leaves, by the kernel torch would use there; the total is the norm of those norms; scaling is one
multiplication, done when somebody looks at the gradient or its update is run.

Whatever does not fit (parameters that are not managed, mixed types, gradients that were looked at, accumulated or
replaced since they left, a ``foreach`` of the caller's) goes to torch's own function, which reads gradients at home.

[Note: cells]
Users import these functions by name before anything is managed. The function objects are wrappers around the real
ones; what they wrap is exchanged, so that every reference to them sees it.
"""

from collections.abc import Callable, Iterable
from types import CellType, GeneratorType
from typing import Any

import torch
from torch.nn.utils import clip_grad

from hetero.stm.fetch import plain
from hetero.stm.intercept import is_managed, managed_of
from hetero.stm.tensors import ManagedTensor

__all__ = ["install", "remove"]

_module: Any = clip_grad


def _cell(function: Any) -> CellType | None:
    """Where a no-grad wrapper of torch's keeps what it wraps; None: it is made otherwise in this version."""
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    return function.__closure__[0] if names == ("func",) else None


def install() -> None:
    """Take their places."""
    for cell, ours in ((_clip_cell, _clip_grad_norm), (_scale_cell, _clip_grads_with_norm)):
        if cell is not None:
            cell.cell_contents = ours


def remove() -> None:
    """Give them back."""
    for cell, original in ((_clip_cell, _clip_original), (_scale_cell, _scale_original)):
        if cell is not None:
            cell.cell_contents = original


_clip_cell = _cell(_module.clip_grad_norm_)
_scale_cell = _cell(_module._clip_grads_with_norm_)
_clip_original: Callable[..., Any] = _clip_cell.cell_contents if _clip_cell else _module.clip_grad_norm_
_scale_original: Callable[..., Any] = (
    _scale_cell.cell_contents if _scale_cell else _module._clip_grads_with_norm_
)


def _clip_grad_norm(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    if isinstance(parameters, GeneratorType):
        parameters = list(parameters) or parameters  # torch warns of an empty generator
    if foreach is None and not isinstance(parameters, GeneratorType):
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        tensors = _foldable(parameters)
        if tensors:
            owner = tensors[0].owner
            norms = owner.grads.take_norms(tensors, float(norm_type))
            if norms is not None:
                total: torch.Tensor = torch.linalg.vector_norm(norms, float(norm_type))
                if error_if_nonfinite and torch.logical_or(total.isnan(), total.isinf()):
                    raise RuntimeError(
                        f"The total norm of order {float(norm_type)} for gradients from `parameters` is non-finite, "
                        "so it cannot be clipped. To disable this error and scale the gradients by the non-finite "
                        "norm anyway, set `error_if_nonfinite=False`"
                    )
                owner.grads.scale(tensors, _coefficient(float(max_norm), total))
                return total
    clipped: torch.Tensor = _clip_original(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
    return clipped


def _clip_grads_with_norm(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    total_norm: torch.Tensor,
    foreach: bool | None = None,
) -> None:
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    tensors = _foldable(parameters) if foreach is None else []
    if tensors and isinstance(total_norm, torch.Tensor):
        tensors[0].owner.grads.scale(tensors, _coefficient(float(max_norm), total_norm))
    else:
        _scale_original(parameters, max_norm, total_norm, foreach)


def _coefficient(max_norm: float, total_norm: torch.Tensor) -> torch.Tensor:
    return torch.clamp(max_norm / (total_norm + 1e-6), max=1.0)


def _foldable(parameters: list[torch.Tensor]) -> list[ManagedTensor]:
    """Those with a gradient, if all of them are managed by one manager and of one type; else none."""
    tensors: list[ManagedTensor] = []
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
