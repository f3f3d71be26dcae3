"""``Module.to`` and the like on a managed model.

Owns ``Module._apply`` while models are managed. A conversion that would leave parameters on the device as they are
(``model.to(device)``, ``model.cuda()``, ``model.float()`` of float32) has been carried out already, because operators
run there: it moves what has been added to the model since, and nothing of ours. So has one that would leave them at
home as they are (``model.cpu()``), because that is where they live: nothing of a managed model moves, its buffers and
what was added to it included; what is around it does. Every other one is refused: parameters would be replaced, or
moved behind our back.
"""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hetero.errors import ManageError
from hetero.stm.interception.parts import managed_modules
from hetero.stm.settled.who import bring_home, record_of
from hetero.stm.tensors.fetch import plain
from hetero.stm.tensors.homes import HOST
from hetero.stm.tensors.managed import ManagedTensor

__all__ = ["REPLACEMENTS"]

_Convert = Callable[[torch.Tensor], torch.Tensor]
_Module: Any = nn.Module
_apply = _Module._apply


class _UnderWay(threading.local):
    # What has been checked for all of a module; and ids of the modules that it does not touch.
    fn: _Convert | None = None
    untouched: frozenset[int] = frozenset()


_under_way = _UnderWay()


def _apply_to_others(self: nn.Module, fn: _Convert, recurse: bool = True) -> nn.Module:
    records = [(name, record_of(p)) for name, p in self.named_parameters(recurse=recurse)]
    managed = [(name, record) for name, record in records if record is not None]
    if not managed:
        converted: nn.Module = _apply(self, fn, recurse)
        return converted
    if _under_way.fn is fn:
        _convert_others(self, fn, recurse)
        return self
    is_there = all(_leaves_alone(fn, tensor, tensor.owner.device) for _, tensor in managed)
    if not is_there:
        _check_at_home(self, fn, managed)
    before = _under_way.fn, _under_way.untouched
    _under_way.fn = fn
    _under_way.untouched = frozenset() if is_there else managed_modules()
    try:
        _convert_others(self, fn, recurse)
    finally:
        _under_way.fn, _under_way.untouched = before
    return self


def _convert_others(module: nn.Module, fn: _Convert, recurse: bool) -> None:
    """Each submodule in its own way, as torch does: some have more than parameters and buffers to convert."""
    if id(module) in _under_way.untouched:
        return
    for child in module.children() if recurse else ():
        if id(child) not in _under_way.untouched:
            child._apply(fn)
    records = [record_of(p) for p in module.parameters(recurse=False)]
    if None not in records:
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = fn(buffer)
    elif not any(records):
        _apply(module, fn, False)
    else:
        raise ManageError(
            f"{type(module).__name__}.to(...) or the like while managed: beside managed parameters the module has "
            "others of its own: call manager.close() first, convert, and manage again"
        )


def _check_at_home(module: nn.Module, fn: _Convert, managed: list[tuple[str, ManagedTensor]]) -> None:
    """Raises `ManageError` unless ``fn`` would do nothing to parameters at home, and that is where they are."""
    for name, tensor in managed:
        if not _leaves_alone(fn, tensor, HOST):
            called = name if name == tensor.name else f"{name} ({tensor.name})"
            raise ManageError(
                f"{type(module).__name__} cannot be converted while managed: {called} is moved by hetero, computes on "
                f"{tensor.owner.device} and stays {tensor.home.dtype} in the memory format that it has. To convert it, "
                "call manager.close() first, convert, and manage again; to compute in half precision, pass "
                "precision=torch.bfloat16 to hetero.manage"
            )
    if not bring_home([tensor for _, tensor in managed]):
        raise ManageError(
            f"{type(module).__name__}.cpu(), .to() or the like within the model's own forward, where its parameters "
            "are in use: convert outside of it"
        )


def _leaves_alone(fn: _Convert, tensor: ManagedTensor, device: torch.device) -> bool:
    """It returns a tensor of that kind on ``device`` itself, and does not write to it."""
    with plain(), torch.no_grad():
        home = tensor.home
        probe = torch.empty_strided((2,) * home.dim(), _order(home), dtype=home.dtype, device=device)
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
