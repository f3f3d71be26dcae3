"""``Module.to`` and the like on a managed model.

Owns ``Module._apply`` while models are managed. A conversion that would leave parameters on the device as they are
(``model.to(device)``, ``model.cuda()``, ``model.float()`` of float32) has been carried out already, because operators
run there: it moves what has been added to the model since, and nothing of ours. Every other one is refused: parameters
would be replaced, or moved behind our back.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hetero.errors import ManageError
from hetero.stm.fetch import plain
from hetero.stm.settled import record_of
from hetero.stm.tensors import ManagedTensor

__all__ = ["REPLACEMENTS"]

_Convert = Callable[[torch.Tensor], torch.Tensor]
_Module: Any = nn.Module
_apply = _Module._apply


def _apply_to_others(self: nn.Module, fn: _Convert, recurse: bool = True) -> nn.Module:
    records = [(name, record_of(p)) for name, p in self.named_parameters(recurse=recurse)]
    managed = [(name, record) for name, record in records if record is not None]
    if not managed:
        converted: nn.Module = _apply(self, fn, recurse)
        return converted
    _check_leaves_alone(self, fn, managed)
    for module in self.modules() if recurse else [self]:
        records_here = [record_of(p) for p in module.parameters(recurse=False)]
        if None not in records_here:
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = fn(buffer)
        elif not any(records_here):
            _apply(module, fn, False)
        else:
            raise ManageError(
                f"{type(module).__name__}.to(...) or the like while managed: beside managed parameters the module has "
                "others of its own: call manager.close() first, convert, and manage again"
            )
    return self


def _check_leaves_alone(module: nn.Module, fn: _Convert, managed: list[tuple[str, ManagedTensor]]) -> None:
    """Raises `ManageError` unless ``fn`` would do nothing to copies on the device."""
    for name, tensor in managed:
        if not _leaves_alone(fn, tensor):
            raise ManageError(
                f"{type(module).__name__}.to(...) or the like while managed: {name} ({tensor.name}) is moved by "
                f"hetero, computes on {tensor.owner.device} and stays {tensor.home.dtype} in the memory format that it "
                "has: to convert the model, call manager.close() first, convert, and manage again"
            )


def _leaves_alone(fn: _Convert, tensor: ManagedTensor) -> bool:
    """It returns a tensor of that kind on the device itself, and does not write to it."""
    with plain(), torch.no_grad():
        home = tensor.home
        probe = torch.empty_strided(
            (2,) * home.dim(), _order(home), dtype=home.dtype, device=tensor.owner.device
        )
        version, strides = probe._version, probe.stride()
        try:
            same = fn(probe) is probe
        except RuntimeError:  # no such conversion from there
            return False
        return same and (probe._version, probe.stride(), probe.requires_grad) == (version, strides, False)


def _order(home: torch.Tensor) -> tuple[int, ...]:
    """Strides of two numbers a dimension, in the order in which ``home`` has its own."""
    strides = [0] * home.dim()
    ranked = sorted(range(home.dim()), key=lambda dim: (home.stride(dim), -dim))
    for place, dim in enumerate(ranked):
        strides[dim] = 1 << place
    return tuple(strides)


REPLACEMENTS: list[tuple[Any, str, Any]] = [(_Module, "_apply", _apply_to_others)]
