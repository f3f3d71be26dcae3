"""Letting device memory go that is wanted for something else.

Owns the order in which what one manager has there leaves for an operator that found no memory, or for others on the
device; how one class of it leaves is the matter of `hetero.stm.copies`, `gradients` and `activations`. Unlike
`hetero.stm.copies.room`, which keeps model data within what is planned, it is asked when that was not enough.
"""

import contextlib
import time
from collections.abc import Callable

from hetero.devices import Accelerator
from hetero.errors import BudgetError
from hetero.msc import MemStatsCollector
from hetero.stm.activations.offload import Activations
from hetero.stm.copies.residency import Residency
from hetero.stm.gradients.offload import Gradients
from hetero.stm.tensors.fetch import plain
from hetero.stm.tensors.state import Ledger

__all__ = ["Relief"]

_PORTIONS = 8  # in which saved tensors, homes, and what others have leave when memory is short
_PATIENCE = 0.03  # seconds that are waited for copies to be let go


class Relief:
    """Of one manager. ``ask``: others on the device let so many bytes go, or as many as they can, and more than idle
    copies if it is urgent; returns how many. ``has_others``: there are any. ``tell``: them that room was made in the
    middle of an operator."""

    def __init__(
        self,
        accelerator: Accelerator,
        ledger: Ledger,
        residency: Residency,
        gradients: Gradients,
        activations: Activations,
        collector: MemStatsCollector,
        *,
        lock: contextlib.AbstractContextManager[bool],
        device_budget: int,
        ask: Callable[..., int],
        has_others: Callable[[], bool],
        tell: Callable[[], None],
    ) -> None:
        self._accelerator = accelerator
        self._ledger = ledger
        self._residency = residency
        self._room = residency.room
        self._gradients = gradients
        self._activations = activations
        self._collector = collector
        self._lock = lock
        self._budget = device_budget
        self._ask = ask
        self._has_others = has_others
        self._tell = tell
        self._room.reclaim = self._reclaim
        self._room.shed = activations.shed
        self._room.without_host_room = activations.without_host_room
        self._room.ask = ask

    def relieve(self, unless_free: int | None = None, *, spares_settled: bool = False) -> int:
        """Free what can be freed after an out-of-memory error; or before one, ``unless_free`` bytes are free. Returns
        the bytes freed, 0 if nothing is left that can be. ``spares_settled``: as in `hetero.stm.neighbours.ask`."""
        with self._lock:
            if unless_free is not None and self._room.has(unless_free):
                return 0
            with self._collector.evicting(for_operator=True):
                freed = self._residency.evict_idle()
                if freed == 0:  # and never more than it takes: these have to come back
                    freed = self._activations.shed(max(1, self._activations.device_bytes // _PORTIONS))
                if freed == 0:
                    freed = self._room.send_home(max(1, self._budget // _PORTIONS))
                    self._residency.evict_idle()
                if freed == 0:  # what others have to fetch again is no less
                    freed = self._ask(max(1, self._budget // _PORTIONS), True, spares_settled=spares_settled)
                if freed:
                    self._tell()
            self._accelerator.release_cached()
            return freed

    def frees(self, nbytes: int) -> bool:
        """Where there are other managers: whether as much leaves the device as if it had been wanted in vain."""
        if not self._has_others():
            return False
        wanted = self._room.left() + nbytes
        while self.relieve(unless_free=wanted, spares_settled=True):
            pass
        return self._room.has(wanted)

    def relieve_after(self, error: BaseException) -> int:
        """As `relieve`, once what an operator had done before it failed with ``error`` is forgotten.

        One that is made of several has saved tensors for backward by then, which the frames of ``error`` keep. They
        would be made to leave again after each attempt, as if that helped the next.
        """
        _forget_frames(error)
        return self.relieve()

    def require(self, nbytes: int, name: str) -> None:
        """As `relieve` until ``nbytes`` are free, for a copy of ``name`` that is the caller's. Raises `BudgetError` if
        they cannot be."""
        while self.relieve(unless_free=nbytes):
            pass
        with self._lock:
            self._room.require(
                nbytes, limit=self._budget, operator=lambda: f"{name}, used outside of the model's forward,"
            )

    def random_numbers(self) -> Callable[[], object]:
        """As `Accelerator.random_numbers`, of the device."""
        return self._accelerator.random_numbers(None)

    def note_answered(self) -> None:
        """What failed for want of memory is tried again after `relieve`."""
        self._accelerator.note_answered()

    def refused(self, operator: str, error: RuntimeError) -> BudgetError:
        """What to say of an operator that has failed with the allocator's ``error``, and is not tried again."""
        return self._room.refused(operator, error)

    def give(self, nbytes: int, *, urgent: bool) -> int:
        """For another manager, as `hetero.stm.copies.room.Room.give`; the lock is held."""
        if urgent:
            self.await_release()
        with plain(), self._residency.on_its_stream(), self._collector.evicting(for_operator=False):
            return self._room.give(nbytes, urgent=urgent)

    @property
    def living_bytes(self) -> int:
        """Of parameters that live on the device."""
        return self._residency.living_bytes

    def send_home(self, nbytes: int) -> None:
        """So many bytes of that, or as many as can leave, for another manager; the lock is held."""
        self.await_release()
        with plain(), self._residency.on_its_stream(), self._collector.evicting(for_operator=False):
            self._room.send_home(nbytes)

    def make_room(self, nbytes: int) -> bool:
        """The caller is about to take so many bytes of the device; the lock is held. False if they pass the budget all
        the same."""
        if self._make_room(nbytes):
            return True
        self.await_release()
        return self._make_room(nbytes)

    def _make_room(self, nbytes: int) -> bool:
        with plain(), self._residency.on_its_stream(), self._collector.evicting(for_operator=False):
            return self._room.make(self._accelerator.allocated_size(nbytes))

    def await_release(self) -> None:
        """Wait for autograd's thread, which may hold what a backward has used for a moment longer than that runs: such
        copies cannot leave, would be measured as some that never can, and every plan would have to keep them."""
        until = time.monotonic() + _PATIENCE
        copies = self._residency.resident
        while any(t.is_held() and not t.users for t in tuple(copies.values())) and time.monotonic() < until:
            time.sleep(1e-4)

    def await_others(self, run: Callable[[], bool], until: float) -> bool:
        """`hetero.stm.running.retry.AwaitOthers`. The lock must not be held."""
        before = self._accelerator.used_bytes()
        while time.monotonic() < until:
            if not run() or self._accelerator.used_bytes() < before:
                return True
            time.sleep(1e-3)
        return False

    def _reclaim(self, nbytes: int) -> None:
        """Memory of what is on its way down."""
        before = self._ledger.device_bytes
        self._gradients.reclaim(nbytes)
        self._activations.reclaim(nbytes - (before - self._ledger.device_bytes))


def _forget_frames(error: BaseException | None) -> None:
    """Of it, and of what it came of."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
