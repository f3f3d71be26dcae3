"""Tensors that autograd saves for backward.

Owns the saved-tensor hooks. Invariant: what backward reads has the bytes that forward saved. A device copy of a
parameter is saved as a handle, so that it may leave between forward and backward; everything else is saved as
it is. Hooks switch autograd's own version check off, so it is made here, with the same answer.

[Note: outer hooks]
Only the innermost pair of hooks sees a saved tensor. If the caller has hooks of their own around the model
(``save_on_cpu``, a checkpoint), what is no parameter goes on to them.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from hetero.stm.fetch import plain
from hetero.stm.residency import RESIDENT
from hetero.stm.tensors import ManagedTensor

__all__ = ["saved_tensors_as_handles"]


@dataclass(slots=True)
class _Handle:
    """A view of a parameter's device copy."""

    tensor: ManagedTensor
    version: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(slots=True)
class _Kept:
    """Anything else, with the version autograd would have checked."""

    tensor: torch.Tensor
    version: int


@dataclass(slots=True)
class _Outer:
    """What the caller's own hook made of it."""

    packed: Any
    unpack: Callable[[Any], Any]


@contextlib.contextmanager
def saved_tensors_as_handles() -> Iterator[None]:
    """Within it, parameters are saved as handles ([Note: outer hooks])."""
    outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
    pack = _pack if outer is None else _packer(*outer)
    with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
        yield


def _packer(
    outer_pack: Callable[[torch.Tensor], Any], outer_unpack: Callable[[Any], Any]
) -> Callable[..., Any]:
    def pack(saved: torch.Tensor) -> Any:
        handle = _handle(saved)
        return handle if handle is not None else _Outer(outer_pack(saved), outer_unpack)

    return pack


def _pack(saved: torch.Tensor) -> Any:
    handle = _handle(saved)
    return handle if handle is not None else _Kept(saved, saved._version)


def _handle(saved: torch.Tensor) -> _Handle | None:
    if saved.layout is not torch.strided:
        return None
    try:
        tensor = RESIDENT.get(saved.untyped_storage()._cdata)
    except NotImplementedError:  # a tensor without storage (functorch)
        return None
    if tensor is None or tensor.data is None or saved.dtype != tensor.data.dtype:
        return None
    if saved.is_conj() or saved.is_neg():
        return None
    return _Handle(tensor, tensor.version, saved.size(), saved.stride(), int(saved.storage_offset()))


def _unpack(packed: Any) -> Any:
    if type(packed) is _Handle:
        with plain():
            return packed.tensor.owner.load_saved(packed.tensor, packed.version).as_strided(
                packed.size, packed.stride, packed.offset
            )
    if type(packed) is _Outer:
        return packed.unpack(packed.packed)
    if packed.tensor._version != packed.version:
        raise modified_in_place(packed.tensor, packed.tensor._version, packed.version)
    return packed.tensor


def modified_in_place(tensor: torch.Tensor, version: int, expected: int) -> RuntimeError:
    """The error autograd raises without hooks."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{tensor.type()} {list(tensor.shape)}] is at version {version}; expected version {expected} instead."
    )
