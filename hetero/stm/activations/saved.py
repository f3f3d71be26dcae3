"""Tensors that autograd saves for backward.

Owns the saved-tensor hooks. Invariant: what backward reads has the bytes that forward saved. A device copy of a
parameter is saved as a handle, so that it may leave between forward and backward; other tensors on the device are saved
as records that may leave as well (`hetero.stm.activations.offload`), or, where that is not safe, as they are. Hooks
switch autograd's own version check off, so it is made here, with the same answer.

[Note: casts]
Under autocast an operator saves the low-precision cast of a weight, a tensor of its own. Kept as it is, the casts
of all weights would stay on the device until backward. A cast is recognised by its graph (a fetch node, one
cast, then views) and saved as a handle that casts again: the same bits, as long as neither side was written.

[Note: outer hooks]
Only the innermost pair of hooks sees a saved tensor. If the caller has hooks of their own around the model
(``save_on_cpu``, a checkpoint), what is no parameter goes on to them.

[Note: hooks off]
``torch.func.grad``, ``vjp`` and ``jacrev`` switch such hooks off, and refuse to begin where there are any. Ours step
aside for one, in a managed forward as well: what is saved within it is saved as it is, and stays.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from hetero.autograd import saving_hooks
from hetero.devices import storage_of
from hetero.stm.activations.offload import Activations
from hetero.stm.activations.records import Saved
from hetero.stm.copies.residency import RESIDENT
from hetero.stm.tensors.fetch import Fetch, plain
from hetero.stm.tensors.managed import Layout, ManagedTensor, modified_in_place

__all__ = ["REPLACEMENTS", "may_save_again", "part_saved_as_handles", "saved_tensors_as_handles"]


@dataclass(slots=True)
class _Handle:
    """A view of a parameter's device copy, or of its cast to ``dtype``; ``layout`` None: all of it as it is."""

    tensor: ManagedTensor
    version: int
    layout: Layout | None
    dtype: torch.dtype


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
def saved_tensors_as_handles(activations: Activations | None = None) -> Iterator[None]:
    """Within it, parameters are saved as handles, and other tensors, if ``activations`` are to move, as records
    ([Note: outer hooks])."""
    outer = saving_hooks(True)
    pack = _packer(activations) if outer is None else _outer_packer(*outer)
    with torch.autograd.graph.saved_tensors_hooks(pack, _never_compiled(_unpack)):
        yield


def part_saved_as_handles(
    activations: Activations | None = None,
) -> contextlib.AbstractContextManager[None]:
    """The same around what is called beside the model, if nobody else sees what is saved: a checkpoint calls it again
    within backward, where such calls are not ours, and would count other tensors than in forward."""
    ours_alone = _are_hooks_allowed() and may_save_again()
    return saved_tensors_as_handles(activations) if ours_alone else contextlib.nullcontext()


_autograd: Any = torch._C._autograd
_are_hooks_allowed: Callable[[], bool] = _autograd._saved_tensors_hooks_is_enabled


def may_save_again() -> bool:
    """An operator that failed, after autograd had saved its operands, may be run again: nobody but us has seen them. A
    checkpoint counts what is saved, and would give what comes later the tensors of what came before."""
    hooks = saving_hooks(True)
    return hooks is None or hasattr(hooks[0], _SEES_ALL)


_SEES_ALL = "_hetero_sees_all"  # of a hook that hands nothing on to the caller's own


def _outer_packer(
    outer_pack: Callable[[torch.Tensor], Any], outer_unpack: Callable[[Any], Any]
) -> Callable[..., Any]:
    def pack(saved: torch.Tensor) -> Any:
        storage = _storage(saved)
        handle = None if storage is None else _handle(saved, storage._cdata)
        return handle if handle is not None else _Outer(outer_pack(saved), outer_unpack)

    return _never_compiled(pack)


def _packer(activations: Activations | None) -> Callable[..., Any]:
    least = 0 if activations is None else activations.least

    def pack(saved: torch.Tensor) -> Any:
        storage = _storage(saved)
        if storage is not None:
            storage_key = storage._cdata
            if storage_key in RESIDENT or saved.dtype in _CAST_TO:
                handle = _handle(saved, storage_key)
                if handle is not None:
                    return handle
            if activations is not None:
                nbytes = storage.nbytes()
                if nbytes < least:
                    activations.kept += 1
                else:
                    record = activations.save(saved, storage_key, nbytes)
                    if record is not None:
                        return record
        # Without its node: an operator's own output would otherwise hold the node that holds what we return, and a
        # graph that is dropped without a backward would stay for good. Autograd attaches the node again; the version
        # is shared.
        return _Kept(saved if saved.is_leaf else saved.detach(), saved._version)

    pack.__dict__[_SEES_ALL] = True
    return _never_compiled(pack)


class _Aside(threading.local):
    """Hooks of ours that have stepped aside on this thread, the innermost first."""

    def __init__(self) -> None:
        self.hooks: list[tuple[Any, Any]] = []


_aside = _Aside()
_disable, _enable = _autograd._saved_tensors_hooks_disable, _autograd._saved_tensors_hooks_enable


@functools.wraps(_disable)
def _disable_without_ours(*args: Any, **kwargs: Any) -> None:
    # Several, where a managed model is called within another's forward. Behind somebody else's, none can be taken away.
    while (hooks := saving_hooks(True)) is not None and hooks[1] is _unpack:
        _autograd._pop_saved_tensors_default_hooks()
        _aside.hooks.append(hooks)
    _disable(*args, **kwargs)


@functools.wraps(_enable)
def _enable_with_ours() -> None:
    _enable()
    while _aside.hooks:
        _autograd._push_saved_tensors_default_hooks(*_aside.hooks.pop())


REPLACEMENTS: list[tuple[Any, str, Any]] = [
    (_autograd, "_saved_tensors_hooks_disable", _disable_without_ours),
    (_autograd, "_saved_tensors_hooks_enable", _enable_with_ours),
]
"""[Note: hooks off]"""


def _never_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """A compiled module that falls back to eager would have Dynamo compile our hooks, which read versions."""
    frames: Any = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    return function


def _storage(saved: torch.Tensor) -> torch.UntypedStorage | None:
    """Which memory it lies in; None if there is no such thing."""
    return storage_of(saved) if saved.layout is _STRIDED else None


def _handle(saved: torch.Tensor, storage_key: int) -> _Handle | None:
    tensor = RESIDENT.get(storage_key)
    if tensor is None:
        if saved.dtype not in _CAST_TO:
            return None
        tensor = _cast_of(saved)
    # The parameter itself, an argument of a checkpoint: its layout would be home's.
    elif saved is tensor.identity or saved is tensor.data or saved is tensor.parameter:
        return _Handle(tensor, tensor.version, None, saved.dtype)
    elif tensor.data is None or saved.dtype is not tensor.data.dtype:
        return None
    if tensor is None or saved.is_conj() or saved.is_neg():
        return None
    layout = (saved.size(), saved.stride(), int(saved.storage_offset()))
    return _Handle(tensor, tensor.version, layout, saved.dtype)


_STRIDED = torch.strided
_CAST_TO = frozenset({torch.bfloat16, torch.float16})

# What may lie between a cast and the operator that saves it: the same memory seen otherwise.
_VIEWS = frozenset(
    {"TBackward0", "TransposeBackward0", "PermuteBackward0", "ViewBackward0", "UnsafeViewBackward0"}
)


def _cast_of(saved: torch.Tensor) -> ManagedTensor | None:
    """The parameter whose unwritten cast ``saved`` is a view of ([Note: casts])."""
    node: Any = saved.grad_fn
    if node is None or saved._version:
        return None
    while node is not None and node.name() in _VIEWS:
        node = node.next_functions[0][0]
    if node is None or node.name() != "ToCopyBackward0":
        return None
    source = node.next_functions[0][0]
    if not isinstance(source, Fetch._backward_cls):
        return None
    tensor: ManagedTensor = source.tensor  # type: ignore[attr-defined]
    data = tensor.data
    if data is None or data._version != source.version:  # type: ignore[attr-defined]  # written since
        return None
    if (
        tensor.identity is None or tensor.identity.grad_fn is not source
    ):  # of before a step, and kept by the model
        return None
    # What lives on the device may be ahead of home all the time.
    if (
        tensor.is_written and not tensor.stays
    ) or saved.untyped_storage().nbytes() != data.numel() * saved.itemsize:
        return None
    base = saved if saved._base is None else saved._base
    if base.stride() != data.stride() or saved.device != data.device:
        return None
    return tensor


def _unpack(packed: Any) -> Any:
    if type(packed) is _Handle:
        with plain():
            managed = packed.tensor
            copy = managed.owner.uses.load_saved(managed, packed.version)
            if copy.dtype is not packed.dtype:
                assert packed.layout is not None
                return copy.to(packed.dtype).as_strided(*packed.layout)
            return managed.view_of(copy, packed.layout)
    if type(packed) is Saved:
        with plain():
            tensor, version = packed.record.owner.load(packed)
        if version != packed.version:
            raise modified_in_place(tensor, version, packed.version)
        return tensor
    if type(packed) is _Outer:
        return packed.unpack(packed.packed)
    if packed.tensor._version != packed.version:
        raise modified_in_place(packed.tensor, packed.tensor._version, packed.version)
    return packed.tensor
