"""Copies of model data that a user asks for: to the host, where it is already, and to the device.

Owns ``Tensor.cpu``, ``Tensor.to`` and ``Tensor.cuda`` while a model is managed. On a device, ``p.detach().cpu()`` is a
copy: a snapshot, an average, an array. At home it would be ``p``'s own memory, and follow later steps. Invariant:
whoever asks for model data (parameters, gradients that were looked at, optimizer states) on the host gets memory of
their own, as they would from a device; and who asks for it on the device, as loops and frameworks do with states after
resuming, finds room there, as far as copies can leave. Every other call goes on to the original as it is.
"""

import functools
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch

from hetero.stm.neighbours import make_room
from hetero.stm.tensors.glances import note_copied

__all__ = ["REPLACEMENTS", "is_at_home", "note_at_home"]

_Tensor: Any = torch.Tensor
_cpu = _Tensor.cpu
_to = _Tensor.to

# Storage identity -> a tensor of ours that lies in it. An entry ends with its tensor, so with management.
_at_home: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
_least_to_prune = 1 << 10
_prune_at = _least_to_prune


def note_at_home(tensor: torch.Tensor) -> None:
    """``tensor`` is model data of a managed model. Call without ``__torch_function__`` dispatch."""
    if tensor.is_cpu and tensor.layout is torch.strided:
        _at_home[tensor.untyped_storage()._cdata] = tensor
        if len(_at_home) > _prune_at:
            _prune()


def _prune() -> None:
    """States that come and go between home and device lie in other memory each time."""
    global _prune_at
    for key, tensor in list(_at_home.items()):
        if tensor.untyped_storage()._cdata != key:
            del _at_home[key]
    _prune_at = max(_least_to_prune, 2 * len(_at_home))


@functools.wraps(_cpu)
def _copied_cpu(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    result: torch.Tensor = _cpu(self, *args, **kwargs)
    return _own(self, sys._getframe(1)) if result is self and is_at_home(self) else result


@functools.wraps(_to)
def _copied_to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    place = _place(args, kwargs)
    if place is not None and place.type != "cpu":
        _make_room(self, place)
    result: torch.Tensor = _to(self, *args, **kwargs)
    if place is None or not is_at_home(self):  # a conversion of type alone is no copy on a device either
        return result
    if result is self:
        return _own(self, sys._getframe(1))
    if result.is_cpu and type(self) is torch.Tensor:  # a parameter's may have come from the device
        note_copied(self, result, sys._getframe(1))
    return result


def _moved_by(name: str) -> Callable[..., torch.Tensor]:
    """``Tensor.cuda`` and its like."""
    move = getattr(_Tensor, name)

    @functools.wraps(move)
    def moved(self: torch.Tensor, device: Any = None, *args: Any, **kwargs: Any) -> torch.Tensor:
        place = _place((name if device is None else device,), {})
        if place is not None:
            _make_room(self, place)
        result: torch.Tensor = move(self, device, *args, **kwargs)
        return result

    return moved


def _make_room(tensor: torch.Tensor, place: torch.device) -> None:
    # A parameter is an operand there, and makes room as one.
    if type(tensor) is torch.Tensor and is_at_home(tensor):
        make_room(place, tensor.nbytes)


def _place(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device | None:
    """Where a call of ``to`` with these arguments says that it goes; None: nowhere else."""
    place = args[0] if args else kwargs.get("device", kwargs.get("other"))
    if isinstance(place, torch.Tensor):
        return place.device
    return torch.device(place) if isinstance(place, str | torch.device | int) else None


def is_at_home(tensor: torch.Tensor) -> bool:
    """``tensor`` is model data that `note_at_home` was told of, or lies in its memory."""
    # Where interception is off, it is not the user who asks.
    if not torch._C._is_torch_function_enabled():
        return False
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):  # it has no memory of its own
        return False
    with torch._C.DisableTorchFunctionSubclass():
        if not tensor.is_cpu or tensor.layout is not torch.strided:
            return False
        key = tensor.untyped_storage()._cdata
        found = _at_home.get(key)
        # Identities are used again, and a tensor may have been given other memory.
        return found is not None and found.untyped_storage()._cdata == key


def _own(tensor: torch.Tensor, asker: types.FrameType) -> torch.Tensor:
    copy = tensor.clone(memory_format=torch.preserve_format)
    note_copied(tensor, copy, asker)
    return copy


REPLACEMENTS: list[tuple[Any, str, Any]] = [
    (_Tensor, "cpu", _copied_cpu),
    (_Tensor, "to", _copied_to),
    *[(_Tensor, name, _moved_by(name)) for name in ("cuda", "xpu")],
]
