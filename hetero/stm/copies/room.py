"""Making room on the device for what is needed next.

Owns the order in which others are asked to leave: what is on its way down, copies by the policy's answer, saved
tensors, whole parameters that live on the device; then the same of other managers. Invariant: model data on the device,
as the ledger counts it, never passes the limit that was given, unless one operator's operands alone do; those may go up
to ``device_budget`` as a whole, and into what was left to others (`Manager.trim`) if nothing else helps. It decides
nothing about the future: whom to evict is the policy's answer.
"""

from collections.abc import Callable, Mapping, Sequence

import torch

from hetero.devices import Accelerator
from hetero.errors import BudgetError
from hetero.eviction import Candidate, Policy
from hetero.stm.copies.shortage import NoRoomError, least_bytes, no_gap, no_room, too_small
from hetero.stm.tensors.managed import ManagedTensor
from hetero.stm.tensors.state import Ledger

__all__ = ["Room"]

_MANY = 64  # copies
_PORTIONS = 16


class Room:
    """On one manager's device. ``resident``: copies there, by index; ``evict``: drop one, unless it is in use."""

    def __init__(
        self,
        accelerator: Accelerator,
        ledger: Ledger,
        policy: Policy,
        device_budget: int,
        *,
        resident: Mapping[int, ManagedTensor],
        evict: Callable[[ManagedTensor], bool],
    ) -> None:
        self._accelerator = accelerator
        self._ledger = ledger
        self._policy = policy
        self._budget = device_budget
        self._resident = resident
        self._evict = evict
        # Gradients on their way down still occupy the device; `hetero.stm.running.relief` sets this.
        self.reclaim: Callable[[int], None] = lambda nbytes: None
        # Saved tensors may leave where copies are not enough; `hetero.stm.running.relief` sets this.
        self.shed: Callable[[int], int] = lambda nbytes: 0
        # Sends home what lives on the device, at least so many bytes if there are; returns how many.
        # `hetero.stm.step.devicehomes` sets this.
        self.send_home: Callable[[int], int] = lambda nbytes: 0
        # Other managers of the device let so many bytes leave, or as many as can; returns how many. ``urgent``: nothing
        # of ours is left that can. `hetero.stm.running.relief` sets this.
        self.ask: Callable[[int, bool], int] = lambda nbytes, urgent: 0
        # Bytes of saved tensors that cannot leave for want of host memory; `hetero.stm.running.relief` sets this.
        self.without_host_room: Callable[[], int] = lambda: 0
        # Of the budget, bytes that are left to others; `hetero.stm.manager` sets this.
        self.left_to_others: Callable[[], int] = lambda: 0
        # A budget that all operators fit in, where they have been measured; `hetero.stm.running.executor` sets this.
        self.enough: Callable[[], int | None] = lambda: None
        # What is needed next is known; `hetero.stm.running.executor` sets this.
        self.is_planned: Callable[[], bool] = lambda: False
        # When each tensor is needed next, in moments from now; `hetero.stm.running.executor` sets this.
        self.next_use: Callable[[ManagedTensor], float] = lambda tensor: float("inf")

    def excess(self, limit: int) -> int:
        """How much model data there is on the device beyond ``limit`` bytes."""
        return self._ledger.device_bytes - limit

    def exceeds(self, limit: int) -> bool:
        """More model data is on the device than ``limit`` bytes."""
        return self.excess(limit) > 0

    def trim(self, limit: int, *, keep: Sequence[int]) -> None:
        """Bring model data down to ``limit`` as far as copies outside ``keep`` can be evicted."""
        if self.exceeds(limit):
            self.reclaim(self.excess(limit))
            if self.exceeds(limit):
                self._evict_for(self.excess(limit) + self._portion(), set(keep))

    def claim(self, nbytes: int, *, limit: int) -> bool:
        """``nbytes`` fit without evicting anything, but what is on its way down; False if they do not."""
        if self.exceeds(limit - nbytes):
            self.reclaim(self.excess(limit - nbytes))
        return not self.exceeds(limit - nbytes)

    def left(self) -> int:
        """What the budget has room for as it is, less what was left to others; negative where it is passed."""
        return -self._shortage(0)

    def has(self, nbytes: int) -> bool:
        """``nbytes`` more are within that."""
        return nbytes <= self.left()

    def make(self, nbytes: int, *, keep: Sequence[int] = ()) -> bool:
        """Evict until ``nbytes`` more would be within that; False if they would not."""
        short = self._shortage(nbytes)
        if short <= 0:
            return True
        self.reclaim(short)
        self._evict_for(self._shortage(nbytes), set(keep))
        return self.has(nbytes)

    def require(
        self, nbytes: int, *, limit: int, keep: Sequence[int] = (), operator: Callable[[], str]
    ) -> None:
        """Let ``nbytes`` more fit, without the copies ``keep`` leaving. Raises `BudgetError` if they cannot."""
        self.trim(limit - nbytes, keep=keep)
        # The limit is for all model data; what one operator needs may pass it, the budget may not.
        if self.make(nbytes, keep=keep):
            return
        if self.shed(self._shortage(nbytes)) and self._shortage(nbytes) <= 0:
            return
        self.send_home(self._shortage(nbytes))
        self._evict_for(self._shortage(nbytes), set(keep))
        # Not at the cost of those to whom it was left.
        if self._shortage(nbytes) > self.left_to_others():
            self.ask(self._shortage(nbytes) - self.left_to_others(), True)
        short = self._shortage(nbytes) - self.left_to_others()
        if short > 0:
            held = sum(t.device_nbytes for t in self._resident.values() if t.index not in keep)
            raise too_small(
                self._accelerator,
                self._budget,
                operator(),
                wanted=nbytes,
                short=short,
                held=held,
                saved=self.without_host_room(),
                others=self._others(),
                enough=self.enough(),
            )

    def give(self, nbytes: int, *, urgent: bool) -> int:
        """For another manager: as `require`, as far as what no operator uses can leave; returns the bytes freed.

        ``urgent``: also copies that came for a use to come, saved tensors, and what lives on the device.
        """
        used = self._accelerator.used_bytes
        before = used()
        keep = set() if urgent else {t.index for t in self._resident.values() if t.last_use < t.fetched_at}
        self.reclaim(nbytes)
        self._evict_for(nbytes - (before - used()), keep)
        if urgent:
            for leave in (self.shed, self.send_home):
                if (short := nbytes - (before - used())) > 0:
                    leave(short)
            self._evict_for(nbytes - (before - used()), set())
        return before - used()

    def refused(self, operator: str, error: RuntimeError) -> BudgetError:
        """What to say of an operator that has failed with ``error`` after everything has left that can."""
        held = sum(tensor.device_nbytes for tensor in self._resident.values())
        return no_room(
            self._accelerator,
            self._budget,
            operator,
            error,
            held=held,
            saved=self.without_host_room(),
            others=self._others(),
            enough=self.enough(),
        )

    def _others(self) -> int:
        """Bytes of the device that are no model data."""
        return max(0, self._accelerator.used_bytes() - self._ledger.device_bytes)

    def allows(self, error: RuntimeError) -> bool:
        """What the allocator has refused is within the budget: it found no gap that is large enough."""
        if not self._accelerator.leaves_gaps:  # then it is not, whatever the digits that the error has say
            return False
        least = least_bytes(self._accelerator, error)
        return least is not None and least <= self._budget

    def for_gaps(self, error: torch.OutOfMemoryError) -> NoRoomError | None:
        """What to say of ``error`` if it came within the budget, from an operator that nobody tries again; from now on
        somebody does. None: it has another reason, or says it already."""
        if isinstance(error, BudgetError) or not self.allows(error):
            return None
        self._accelerator.note_gaps_failed()
        return no_gap(self._accelerator, self._budget, error)

    def _shortage(self, nbytes: int) -> int:
        return self._accelerator.used_bytes() + nbytes - (self._budget - self.left_to_others())

    def _portion(self) -> int:
        """How much more leaves at once while nothing is planned. To choose takes time by the number of copies: where
        there are many, it is not done for each that comes."""
        if self.is_planned() or len(self._resident) < _MANY:
            return 0
        return sum(tensor.device_nbytes for tensor in self._resident.values()) // _PORTIONS

    def _evict_for(self, nbytes: int, keep: set[int]) -> None:
        if nbytes <= 0:
            return
        candidates = [
            Candidate(
                tensor=tensor.index,
                nbytes=tensor.device_nbytes,
                next_use=self.next_use(tensor),
                last_use=tensor.last_use,
                fetched_at=tensor.fetched_at,
                dirty=tensor.is_dirty,
            )
            for tensor in self._resident.values()
            if tensor.index not in keep and not tensor.users and not tensor.stays and not tensor.is_held()
        ]
        for index in self._policy.victims(candidates, nbytes):
            self._evict(self._resident[index])
