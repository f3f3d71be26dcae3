"""The bytes of an arena, and what is known of each allocation that may go there.

Owns `Memory`, which range of a plan's bytes is in use, and the records `Birth` and `Call`. Invariant: ranges in
use never overlap. What goes where is decided in `hetero.pool.arena`. Knows torch, for storages.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch._ops import OpOverload

__all__ = ["Birth", "Call", "Memory", "Offer"]


@dataclass(slots=True, eq=False)
class Birth:
    """An allocation as it happened; ``died`` and ``born`` are numbers of allocations made before."""

    func: OpOverload
    nbytes: int
    born: int
    call: "Call | None"
    memory: "Memory | None" = None
    offset: int = 0
    index: int | None = None  # of the allocation in the plan that this one was taken for
    counted: bool = False
    died: int | None = None
    batch: int = 1  # how many allocations its call made, if it is the first of them
    passed_over: int = 0  # allocations of this size that the operator makes before the one it returns
    left_alone: bool = False
    on_other_stream: bool = False

    def same_as(self, other: "Birth") -> bool:
        """Made by the same operator, of the same size."""
        return self.func is other.func and self.nbytes == other.nbytes


@dataclass(slots=True)
class Call:
    """The arguments of a call that could write into its slot, and what it made of them."""

    arguments: tuple[Any, ...]
    size: torch.Size | None = None
    stride: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32


@dataclass(slots=True)
class Memory:
    """The bytes of one plan, and which ranges of them are in use: sorted begins, and their ends."""

    base: torch.Tensor
    begins: list[int] = field(default_factory=list)
    ends: dict[int, int] = field(default_factory=dict)

    def reserve(self, begin: int, nbytes: int) -> bool:
        """Mark ``[begin, begin + nbytes)`` as used; False if part of it is."""
        position = bisect_left(self.begins, begin)
        if position < len(self.begins) and self.begins[position] < begin + nbytes:
            return False
        if position and self.ends[self.begins[position - 1]] > begin:
            return False
        insort(self.begins, begin)
        self.ends[begin] = begin + nbytes
        return True

    def release(self, begin: int) -> None:
        """Give back what was reserved from ``begin`` on."""
        del self.begins[bisect_left(self.begins, begin)]
        del self.ends[begin]

    def storage(self, offset: int, nbytes: int) -> torch.UntypedStorage:
        """One of these bytes, which does not keep them alive by itself."""
        pointer = self.base.data_ptr() + offset
        made: Any = torch._C._construct_storage_from_data_pointer(pointer, self.base.device, nbytes)
        return cast(torch.UntypedStorage, made)


@dataclass(slots=True, kw_only=True)
class Offer:
    """Ranges of ``memory`` reserved for what an operator is about to allocate: offset by address.

    ``missed``: the expected allocations that did not go where they were offered a place.
    """

    memory: Memory
    offsets: dict[int, int]
    indices: dict[int, int]
    missed: set[int] = field(default_factory=set)
