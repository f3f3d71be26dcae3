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
    seen = set()
    for name, tensor in managed:
        kind = tensor.owner.device, tensor.home.dtype
        if kind not in seen and not _leaves_alone(fn, *kind):
            raise ManageError(
                f"{type(module).__name__}.to(...) or the like while managed: {name} ({tensor.name}) is moved by "
                f"hetero, computes on {tensor.owner.device} and stays {tensor.home.dtype}: to convert the model, "
                "call manager.close() first, convert, and manage again"
            )
        seen.add(kind)


def _leaves_alone(fn: _Convert, device: torch.device, dtype: torch.dtype) -> bool:
    """It returns a tensor of that kind itself, with the values that it had."""
    with plain(), torch.no_grad():
        probe = torch.ones(2, dtype=dtype, device=device)
        try:
            return fn(probe) is probe and bool((probe == 1).all())
        except RuntimeError:  # no such conversion from there
            return False


REPLACEMENTS: list[tuple[Any, str, Any]] = [(_Module, "_apply", _apply_to_others)]
