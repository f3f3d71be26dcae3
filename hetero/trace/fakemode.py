"""Torch's mode of fake tensors, and its rules that are in the way of building a model with them.

Owns what is changed in torch meanwhile (`give_way`, `rows_with_values`). By itself torch refuses to convert a model,
warns of deep copies and puts them into another mode, draws from a distribution until values suit it, and knows the
values of single numbers only, though models are built by rows of them (`drop_path` of each layer).
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

__all__ = ["fake_mode", "give_way", "grouped_mm", "most_known", "rows_with_values"]

_ROW = 1024  # numbers


class _Mode(FakeTensorMode):
    def __deepcopy__(self, memo: object) -> "_Mode":
        return self  # a copy of a fake tensor is of the same mode


def fake_mode() -> FakeTensorMode:
    """A mode in which ``loss.item()`` gives a symbol, and whatever depends on its value raises."""
    return _Mode(shape_env=ShapeEnv(allow_dynamic_output_shape_ops=False))


@contextmanager
def give_way(mode: FakeTensorMode) -> Iterator[None]:
    """Within it, models are built, converted and copied with fake tensors of ``mode`` as with any others."""
    with _conversions(mode), _one_draw(), warnings.catch_warnings():
        # To deep-copy a tensor is to look where its bytes are.
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        yield


@contextmanager
def _conversions(mode: FakeTensorMode) -> Iterator[None]:
    """``module.to(...)`` works on fake parameters.

    torch swaps fake parameters for converted ones, and refuses while weak references to them exist: those of
    the mode's own memo, which is only a cache.
    """
    swap: Callable[[torch.Tensor, torch.Tensor], None] = torch.utils.swap_tensors

    def forget_and_swap(one: torch.Tensor, other: torch.Tensor) -> None:
        mode.fake_tensor_converter.meta_converter.tensor_memo.clear()
        swap(one, other)

    torch.utils.swap_tensors = forget_and_swap
    try:
        yield
    finally:
        torch.utils.swap_tensors = swap


@contextmanager
def _one_draw() -> Iterator[None]:
    """A truncated normal distribution is not drawn until all values are within its bounds: fake ones never are, nor
    need be."""
    init: Any = torch.nn.init
    draw: Callable[..., torch.Tensor] = init._no_grad_trunc_normal_

    def once(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not isinstance(tensor, FakeTensor):
            return draw(tensor, *args, **kwargs)
        with torch.no_grad():
            return tensor.normal_()

    init._no_grad_trunc_normal_ = once
    try:
        yield
    finally:
        init._no_grad_trunc_normal_ = draw


@contextmanager
def rows_with_values() -> Iterator[None]:
    """While a model is built: what is computed of tensors whose values are known has values, too, if it is short. Not
    in a step, which writes to tensors in ways that torch does not look for there."""
    most = fake_tensor.CONSTANT_NUMEL_LIMIT
    fake_tensor.CONSTANT_NUMEL_LIMIT = _ROW
    try:
        yield
    finally:
        fake_tensor.CONSTANT_NUMEL_LIMIT = most


def most_known() -> int:
    """Tensors of up to so many numbers may have values now."""
    return fake_tensor.CONSTANT_NUMEL_LIMIT


def grouped_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """What comes out of ``torch._grouped_mm`` on fake tensors: torch's own rule (2.13) knows bfloat16 only, its kernels
    other types as well."""
    if a.dtype is torch.bfloat16:
        out: torch.Tensor = torch.ops.aten._grouped_mm.default(a, b, offs, bias, out_dtype)
        return out
    rows, columns = a.shape[-2], b.shape[-1]
    groups: tuple[int, ...] = ()  # rows of one product, or columns, are divided among the groups
    if a.dim() == b.dim() == 3:
        groups = (len(a),)
    elif a.dim() == b.dim() == 2 and offs is not None:
        groups = (len(offs),)
    dtype = out_dtype or a.dtype
    unit = 16 // dtype.itemsize  # kernels want rows that begin at multiples of 16 bytes
    return a.new_empty((*groups, rows, -(-columns // unit) * unit), dtype=dtype)[..., :columns]
