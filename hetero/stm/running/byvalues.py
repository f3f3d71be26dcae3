"""Operators whose memory depends on values, not on shapes alone.

Owns which they are. What was measured of an iteration that has one is no bound for the next.
"""

from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch.utils._pytree import tree_leaves

__all__ = ["depends_on_values"]

# What torch's tag does not say. Of the first ones the length, the norm or the number of elements that are there decides
# how much they allocate; the others take a mask as well as numbers.
_UNTAGGED = (
    *("linalg_matrix_exp", "_ctc_loss", "_ctc_loss_backward"),
    *("_pack_padded_sequence", "_coalesce", "_to_sparse", "_sparse_sparse_matmul", "_sparse_addmm"),
)
_BY_MASK = ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put")
_MASKS = (torch.bool, torch.uint8)

_kinds: dict[Any, str] = {}  # by operator; asking torch each time is slow


def depends_on_values(operator: Any, args: tuple[Any, ...]) -> bool:
    """``operator``, an overload of torch's, of ``args``."""
    kind = _kinds.get(operator)
    if kind is None:
        kind = _kinds[operator] = _kind_of(operator)
    return bool(kind) and (kind == "always" or any(_is_mask(value) for value in tree_leaves(args)))


def _kind_of(operator: Any) -> str:
    if isinstance(operator, HigherOrderOperator):  # a branch, a number of rounds
        return "always"
    name = operator.overloadpacket.__name__
    if name in _BY_MASK:
        return "by mask"
    return "always" if name in _UNTAGGED or torch.Tag.dynamic_output_shape in operator.tags else ""


def _is_mask(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in _MASKS
