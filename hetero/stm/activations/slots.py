"""Host memory for what leaves the device for a while.

Owns pinned blocks that are used again and again. Invariant: a block is used by one record at a time, and all blocks
together, with what homes, gradients and optimizer states will come to, with what is lent, and with what slabs lose at
their ends, stay within the host's budget. Starts no copy.

[Note: what is free]
A budget that nobody named is what was free. Of that, other managers have what they were promised by then and had not
taken; and whatever they take later is not free any more. So there is one account for all of them.

[Note: other sizes]
Batches of many lengths save tensors of many sizes. A free block of exactly that size comes first: iterations that
repeat themselves use the same ones. Else one that is not much larger, so that their number does not grow with that of
the sizes. Where the budget has no room for another, any that is larger, or else free ones are given up for it.

[Note: no longer used]
Before anything was measured, much more leaves than plans will let leave, or all of it where everything fits. Blocks
that no training iteration has used for long are given up. Not after a few: to page-lock a GiB takes most of a second,
and batches of some length may be rare.
"""

import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

import torch

from hetero.autograd import outside_inference
from hetero.devices import HostArena
from hetero.stm.living import Living
from hetero.stm.tensors.state import Kind, Ledger, Tier

__all__ = ["HostSlots", "promised_bytes"]

_MOST_LARGER = 1.5  # a free block than what it is taken for: [Note: other sizes]
_KEPT = 256  # iterations


def promised_bytes() -> int:
    """Of the host's free memory, what managed models are going to take for homes, gradients and optimizer states."""
    return sum(max(0, slots.home_bytes - slots.taken_home_bytes) for slots in _managers)


class _Free(NamedTuple):
    block: torch.Tensor
    since: int  # iteration


class HostSlots:
    """Blocks out of ``arena``, within ``host_budget`` bytes. ``home_bytes`` of these are promised to model data at
    home, which is there only in part before the first step. ``shares``: with other managers, [Note: what is free].

    Attributes:
        home_bytes: promised by now.
        ask_back: called where a block needs so many bytes of what is lent; whoever can gives some back.
    """

    def __init__(
        self, arena: HostArena, ledger: Ledger, host_budget: int, home_bytes: int, *, shares: bool = False
    ) -> None:
        self._arena = arena
        self._ledger = ledger
        self._budget = host_budget
        self.home_bytes = home_bytes
        self._free: dict[int, list[_Free]] = defaultdict(list)  # by size; of each, those used last at the end
        self._iteration = 0
        self._lent_bytes = 0
        self.ask_back: Callable[[int], None] = _nobody
        self.nbytes = 0
        self._shares = shares
        self._before = weakref.WeakKeyDictionary((other, other._all_bytes) for other in _managers)
        _managers.add(self)

    @property
    def taken_home_bytes(self) -> int:
        """Of model data at home, by now."""
        return self._ledger.host_bytes - self._ledger.nbytes(Tier.HOST, Kind.ACTIVATION) - self._lent_bytes

    @property
    def most_bytes(self) -> int:
        """What blocks may come to when nothing is lent, slabs' losses not counted."""
        homes = max(self.taken_home_bytes, self.home_bytes)
        return max(0, self._budget - homes - (self._taken_by_others() if self._shares else 0))

    def close(self) -> None:
        """What is there is nobody's budget any more."""
        _managers.discard(self)

    def take(self, nbytes: int) -> torch.Tensor | None:
        """A block of exactly ``nbytes``, uninitialised; None if the budget has no room for it."""
        size = self._arena.slab_bytes(nbytes)
        best = min((known for known in self._free if size <= known), default=None)
        if best is not None and (best <= _MOST_LARGER * size or self._short(size) > 0):  # [Note: other sizes]
            return _narrowed(self._pop(best), nbytes)
        if not self._make_room(size):
            return None
        self.nbytes += size
        return _narrowed(self._arena.empty_strided((size,), (1,), torch.uint8), nbytes)

    def has_room(self, nbytes: int) -> bool:
        """`take` would find a block, or room for one."""
        size = self._arena.slab_bytes(nbytes)
        return any(size <= known for known in self._free) or self._short(size) <= self._spare_bytes()

    def reserve(self, nbytes: int) -> torch.Tensor | None:
        """A block for model data beyond those that were promised, for good; None likewise."""
        size = self._arena.slab_bytes(nbytes)
        if not self._make_room(size):
            return None
        self.home_bytes += size
        return self._arena.empty_strided((size,), (1,), torch.uint8)

    def lend(self, nbytes: int, *, share: float) -> bool:
        """To what can be done without, in memory of its own, which the ledger counts as model data: False if all that
        is lent would pass that share of what nobody else needs. A negative number comes back."""
        room = self._lent_bytes - self._short(0)
        if nbytes > 0 and self._lent_bytes + nbytes > share * room:
            return False
        self._lent_bytes += nbytes
        return True

    def give_back(self, block: torch.Tensor) -> None:
        """Nobody uses ``block`` any more: every copy from or to it has been waited for by compute."""
        whole = _narrowed(block, block.untyped_storage().nbytes())
        self._free[whole.numel()].append(_Free(whole, self._iteration))

    def end_iteration(self) -> None:
        """One of training is over ([Note: no longer used])."""
        self._iteration += 1
        for size, free in list(self._free.items()):
            idle = next((n for n, one in enumerate(free) if one.since > self._iteration - _KEPT), len(free))
            self._give_up(size, idle)

    def give_up_free(self) -> None:
        """All that nobody uses."""
        for size, free in list(self._free.items()):
            self._give_up(size, len(free))

    @property
    def _all_bytes(self) -> int:
        return max(self.taken_home_bytes, self.home_bytes) + self.nbytes + self._lent_bytes

    def _taken_by_others(self) -> int:
        """Since the budget was set."""
        return sum(
            max(0, other._all_bytes - self._before.get(other, 0)) for other in _managers if other is not self
        )

    def _make_room(self, size: int) -> bool:
        short = self._short(size)
        if short > self._spare_bytes():
            return False
        if short > 0:
            self.ask_back(short)
        while self._free and self._short(size) > 0:
            self._give_up(max(self._free), 1)
        return self._short(size) <= 0

    def _spare_bytes(self) -> int:
        """What could be had back."""
        return self._lent_bytes + sum(known * len(blocks) for known, blocks in self._free.items())

    def _short(self, size: int) -> int:
        """How many bytes too few there are for such a block."""
        return self.nbytes + size + self._arena.lost_bytes(size) + self._lent_bytes - self.most_bytes

    def _give_up(self, size: int, count: int) -> None:
        """So many of this size, those first that have not been used for longest."""
        del self._free[size][:count]
        if not self._free[size]:
            del self._free[size]
        self.nbytes -= count * size
        self._arena.note_tensors_gone(count * size)

    def _pop(self, size: int) -> torch.Tensor:
        block = self._free[size].pop().block
        if not self._free[size]:
            del self._free[size]
        return block


_managers = Living[HostSlots]()


def _nobody(nbytes: int) -> None:
    pass


def _narrowed(block: torch.Tensor, nbytes: int) -> torch.Tensor:
    """The first ``nbytes`` of its storage; no view, so that nothing else holds the block."""
    if block.numel() == nbytes:
        return block
    with outside_inference():  # it comes back, and is used again, in whatever mode
        return torch.empty(0, dtype=torch.uint8, device="cpu").set_(
            block.untyped_storage(), 0, (nbytes,), (1,)
        )
