"""Clipping without reading gradients again.

Owns what ``torch.nn.utils.clip_grad_norm_``, ``get_total_norm``, ``clip_grads_with_norm_`` and ``clip_grad_value_`` run
while any model is managed. Invariant: the total norm and the clipped gradients have the bits of the unmanaged run: each
gradient's norm is taken on the device, as it leaves, by the kernel torch would use there; the total is the norm of
those norms; scaling is one multiplication, done when somebody looks at the gradient or its update is run. Gradients
that were looked at, accumulated at home or replaced since they left are read there, or from a copy on the device
(`hetero.stm.gradients.access`, [Note: norms where they round alike]).

Whatever does not fit (`hetero.stm.interception.foldable`, a ``foreach`` of the caller's) is read at home; its norms are
put among the others as torch would do it (`hetero.stm.interception.totals`).

[Note: cells]
Users import these functions by name before anything is managed. The function objects are wrappers around the real
ones; what they wrap is exchanged, so that every reference to them sees it.
"""

from collections.abc import Callable, Iterable
from types import CellType, GeneratorType
from typing import Any

import torch
from torch.nn.utils import clip_grad

from hetero.stm.interception.foldable import foldable, foldable_parts
from hetero.stm.interception.totals import gradient_norms, norms_of

__all__ = ["install", "remove"]

_module: Any = clip_grad


def _cell(function: Any) -> CellType | None:
    """Where a no-grad wrapper of torch's keeps what it wraps; None: it is made otherwise in this version."""
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    return function.__closure__[0] if names == ("func",) else None


def install() -> None:
    """Take their places."""
    for cell, _, ours in _TAKEN_OVER:
        if cell is not None:
            cell.cell_contents = ours


def remove() -> None:
    """Give them back."""
    for cell, original, _ in _TAKEN_OVER:
        if cell is not None:
            cell.cell_contents = original


def _inner(function: Any) -> tuple[CellType | None, Callable[..., Any]]:
    """[Note: cells]: where it is, and what is there now."""
    cell = _cell(function)
    return (None, function) if cell is None else (cell, cell.cell_contents)


_norm_cell, _norm_original = _inner(_module.clip_grad_norm_)
_total_cell, _total_original = _inner(_module._get_total_norm)
_scale_cell, _scale_original = _inner(_module._clip_grads_with_norm_)
_value_cell, _value_original = _inner(_module.clip_grad_value_)


def _clip_grad_norm(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    if isinstance(parameters, GeneratorType):
        parameters = list(parameters) or parameters  # torch warns of an empty generator
    if not isinstance(parameters, GeneratorType):
        parameters = _listed(parameters)
        norms = gradient_norms(parameters, float(norm_type), foreach)
        if norms is not None:
            total: torch.Tensor = torch.linalg.vector_norm(norms, float(norm_type))
            if error_if_nonfinite:
                _refuse_nonfinite(total, float(norm_type))
            _clip_grads_with_norm(parameters, max_norm, total, foreach)
            return total
    clipped: torch.Tensor = _norm_original(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
    return clipped


def _get_total_norm(
    tensors: torch.Tensor | Iterable[torch.Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    tensors = _listed(tensors)
    norms = norms_of(tensors, float(norm_type), foreach)
    if norms is None:
        own: torch.Tensor = _total_original(tensors, norm_type, error_if_nonfinite, foreach)
        return own
    total: torch.Tensor = torch.linalg.vector_norm(norms, float(norm_type))
    if error_if_nonfinite:
        _refuse_nonfinite(total, float(norm_type))
    return total.to(tensors[0].device)  # as torch does it: whoever scales by hand may count on that


def _clip_grads_with_norm(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    total_norm: torch.Tensor,
    foreach: bool | None = None,
) -> None:
    parameters = _listed(parameters)
    scaled: set[int] = set()
    if foreach is None and isinstance(total_norm, torch.Tensor):
        for tensors in foldable_parts(parameters):
            owner = tensors[0].owner
            factor = _coefficient(float(max_norm), total_norm)
            # From the host it need not go anywhere; from another manager's device it does.
            owner.gradient_access.scale(tensors, factor if factor.is_cpu else factor.to(owner.device))
            scaled.update(id(tensor.parameter) for tensor in tensors)
    rest = [parameter for parameter in parameters if id(parameter) not in scaled]
    _scale_original(rest, max_norm, total_norm, foreach)


def _clip_grad_value(
    parameters: torch.Tensor | Iterable[torch.Tensor], clip_value: float, foreach: bool | None = None
) -> None:
    parameters = _listed(parameters)
    tensors = foldable(parameters) if foreach is None else []
    if tensors:
        tensors[0].owner.gradient_access.clamp(tensors, float(clip_value))
    else:
        _value_original(parameters, clip_value, foreach)


def _listed(parameters: torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)


def _refuse_nonfinite(total: torch.Tensor, norm_type: float) -> None:
    """In torch's words, if it is."""
    if torch.logical_or(total.isnan(), total.isinf()):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, "
            "so it cannot be clipped. To disable this error and scale the gradients by the non-finite "
            "norm anyway, set `error_if_nonfinite=False`"
        )


def _coefficient(max_norm: float, total_norm: torch.Tensor) -> torch.Tensor:
    return torch.clamp(max_norm / (total_norm + 1e-6), max=1.0)


_TAKEN_OVER = (
    (_norm_cell, _norm_original, _clip_grad_norm),
    (_total_cell, _total_original, _get_total_norm),
    (_scale_cell, _scale_original, _clip_grads_with_norm),
    (_value_cell, _value_original, _clip_grad_value),
)
