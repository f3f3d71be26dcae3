"""Who holds which block, and the two sums that follow from it: what every simulated allocator keeps.

Owns the ids and the sums of bytes requested and provided. Which block serves a request, and what becomes of one that is
given back, is the allocator's.
"""

from typing import Generic, Protocol, TypeVar

from hetero.errors import PlanError
from hetero.pool.problem import BufferId

__all__ = ["Holdings"]


class _Sized(Protocol):
    address: int
    size: int


_Block = TypeVar("_Block", bound=_Sized)


class Holdings(Generic[_Block]):
    """Blocks by the id that holds them; a request of no bytes holds none."""

    def __init__(self) -> None:
        self._held: dict[BufferId, tuple[_Block | None, int]] = {}
        self._requested = self._provided = 0

    @property
    def requested(self) -> int:
        """Sum of the sizes asked for, bytes (``requested_bytes`` of ``torch.cuda.memory_stats``)."""
        return self._requested

    @property
    def provided(self) -> int:
        """Sum of the blocks handed out, bytes (``torch.cuda.memory_allocated``)."""
        return self._provided

    def address_of(self, id: BufferId) -> int:
        """Address of the block that ``id`` holds, in the simulation's own address space."""
        block, _ = self._held.get(id, (None, 0))
        if block is None:
            raise PlanError(f"{id!r} holds no block; allocate at least one byte for it first")
        return block.address

    def _check_absent(self, id: BufferId) -> None:
        if id in self._held:
            raise PlanError(f"allocation of {id!r}: it is allocated already; free it first")

    def _hold(self, id: BufferId, block: _Block | None, nbytes: int) -> None:
        """``block``, as large as it stays, serves the ``nbytes`` that were asked for; None, if these are 0."""
        self._held[id] = block, nbytes
        if block is not None:
            self._requested += nbytes
            self._provided += block.size

    def _take_back(self, id: BufferId) -> _Block | None:
        """The block that ``id`` held, and holds no more."""
        if id not in self._held:
            raise PlanError(f"free of {id!r}: it is not allocated; the trace may be truncated")
        block, nbytes = self._held.pop(id)
        if block is not None:
            self._requested -= nbytes
            self._provided -= block.size
        return block
