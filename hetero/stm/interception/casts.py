"""Casts of weights under autocast: one node for all uses within a region, as autocast itself keeps for leaves.

Owns the emulation of autocast's weight cache for parameters that it takes for activations, because what operators
receive is no leaf. With a cast per use, the gradients of a weight that a region uses twice (two forwards of
one model, shared layers) would be added in float32 where autocast adds them in low precision.

Autocast keeps the bytes of all casts until the region ends. Here only the autograd identity stays: the bytes are
dropped after each operator and made again by the next (`hetero.stm.tensors.managed`: [Note: identity]), unless somebody
holds them (a graph whose tensors are not saved by our hooks, as of a checkpoint's recompute): then they are used again
for as long as somebody does.

Autocast makes a cast's node where the region first uses the weight, without gradients as well, and autograd goes
through it when its turn comes: in the backward of a later forward last of all. Then all gradients of casts would wait
on the device for the end. Here they go on at once, but where something else contributes to the gradient in between:
three contributions are added up in the order in which they come. It may be an operator that takes the weight as it is
after that; or a reentrant checkpoint, which uses it without gradients now and adds to its gradient in backward, by a
backward of its own, and which comes between the cast and its first use with gradients.
"""

import sys
from typing import Any

import torch
from torch.utils.weak import TensorWeakRef

from hetero.autograd import recording
from hetero.stm.interception.transforms import is_transforming
from hetero.stm.tensors.exposure import ATTRIBUTE_AND_NAME
from hetero.stm.tensors.fetch import run_early, run_in_turn
from hetero.stm.tensors.managed import Cast, ManagedTensor

__all__ = ["begin_region", "drop_bytes", "kept_casts", "note_plain_use"]


_region = 0


def begin_region() -> None:
    """Autocast has forgotten its casts: the outermost region was left (`hetero.stm.patches`)."""
    global _region
    _region += 1


def kept_casts(
    func: Any, operands: list[ManagedTensor], copies: dict[int, torch.Tensor]
) -> list[ManagedTensor]:
    """Put casts in the place of those ``copies`` (by id of parameter) that autocast would cast and keep for ``func``.
    The caller calls `drop_bytes` with the result, holding none of them any more."""
    device = operands[0].owner.device
    if (
        func not in _LOW_PRECISION
        or not torch.is_autocast_enabled(device.type)
        or not torch.is_autocast_cache_enabled()
        or torch.is_inference_mode_enabled()
        or is_transforming()  # there no parameter is a leaf, whose cast autocast would keep
    ):
        return []
    dtype = torch.get_autocast_dtype(device.type)
    kept = []
    for tensor in operands:
        identity = tensor.identity
        if (
            identity is not None
            and identity.dtype is torch.float32
            and copies[id(tensor.parameter)] is identity
        ):
            copies[id(tensor.parameter)] = _cast(tensor, identity, dtype)
            kept.append(tensor)
    return kept


def note_plain_use(tensor: ManagedTensor, copies: dict[int, torch.Tensor]) -> None:
    """An operator takes ``copies``, perhaps the identity of ``tensor``, which has a cast."""
    if tensor.cast is not None and copies.get(id(tensor.parameter)) is tensor.identity:
        _take_turn(tensor.cast)


def _take_turn(cast: Cast) -> None:
    if cast.is_early:
        cast.is_early = False
        value = cast.value() if isinstance(cast.value, TensorWeakRef) else cast.value
        if value is not None:
            run_in_turn(value, cast.turn)


def drop_bytes(kept: list[ManagedTensor]) -> None:
    """The operator is done with its casts."""
    for tensor in kept:
        cast = tensor.cast
        if cast is None:
            continue
        value = cast.value
        if isinstance(value, TensorWeakRef):
            continue
        uses: int = value._use_count()  # type: ignore[attr-defined]
        if uses == 1 and sys.getrefcount(value) <= ATTRIBUTE_AND_NAME:
            value.data = torch.empty(0, dtype=value.dtype, device=value.device)
        else:
            cast.value = TensorWeakRef(value)


def _cast(tensor: ManagedTensor, identity: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    cast = tensor.cast
    kept = None if cast is None or cast.region != _region else cast.value
    value = kept() if isinstance(kept, TensorWeakRef) else kept
    if value is None or value.dtype is not dtype or not _is_of(value, identity):
        with recording():
            value = identity.to(dtype)
        tensor.cast = Cast(_region, value, run_early(value))
    elif not value.numel():
        value.data = identity.detach().to(dtype)
    assert tensor.cast is not None
    if not torch.is_grad_enabled():
        tensor.cast.unrecorded_uses += 1
    elif tensor.cast.unrecorded_uses > 1:
        _take_turn(tensor.cast)
    return value


def _is_of(value: Any, identity: torch.Tensor) -> bool:
    # By the graph: a reference to the identity would hold its bytes.
    return value.grad_fn.next_functions[0][0] is identity.grad_fn


# The names under which ATen's lower-precision list for autocast is called from Python.
_NAMES = (
    *("conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
    *(
        "convolution",
        "_convolution",
        "prelu",
        "addmm",
        "addmv",
        "addr",
        "matmul",
        "mm",
        "mv",
        "linear",
        "addbmm",
    ),
    *("baddbmm", "bmm", "einsum", "chain_matmul", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"),
    *("scaled_dot_product_attention", "__matmul__", "__rmatmul__", "vecdot", "multi_dot"),
)
_LOW_PRECISION = frozenset(
    getattr(place, name)
    for name in _NAMES
    for place in (torch, torch.Tensor, torch._C._nn, torch.nn.functional, torch.functional, torch.linalg)
    if hasattr(place, name)
)
