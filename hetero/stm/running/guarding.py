"""Whether what runs now is guarded, and the cap on the device's allocator with it.

Owns both, for one manager: in its segments (`hetero.stm.running.guard`) and while the caller goes on
(`hetero.stm.running.staying`). When they are guarded is decided in `hetero.stm.running.executor` and
`hetero.stm.running.between`.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from hetero.devices import Accelerator
from hetero.errors import BudgetError
from hetero.stm.copies.room import Room
from hetero.stm.running.guard import arm, guarded, lifted
from hetero.stm.running.modes import active
from hetero.stm.running.relief import Relief
from hetero.stm.running.retry import Retry
from hetero.stm.running.staying import guard_caller

__all__ = ["Guarding"]


class Guarding:
    """Of what runs.

    Attributes:
        is_on: what runs now, or ran last, is guarded.
        is_open: operators of the caller's own run in it, which nobody tries again, so that they must not be refused.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        relief: Relief,
        room: Room,
        budget: int,
        *,
        note_values: Callable[[], None],
    ) -> None:
        self._accelerator = accelerator
        self._relief = relief
        self._room = room
        self._budget = budget
        self._note_values = note_values
        self.is_on = False
        self.is_open = False
        self._is_capped = False
        self._end_of_caller: Callable[[], None] = _nothing

    def around(self, *, at_once: bool) -> contextlib.AbstractContextManager[None]:
        """What may run out of memory: guarded ``at_once``, or from `from_here` on."""
        if at_once:
            self.is_open = False
            self._cap(True)
        retry = self._retry(
            uncapped=lambda error: lifted(self._cap, self.is_on and self._room.allows(error)),
            note_values=self._note_values,
        )
        if at_once or self._accelerator.may_fail_within(self._budget):
            return guarded(retry, at_once=True)
        return self._explaining(guarded(retry, at_once=False))

    def around_within(self) -> contextlib.AbstractContextManager[None]:
        """What is a part of what runs: guarded if that is, where nobody on this thread guards it already."""
        return self.around(at_once=True) if self.is_on and not active(Retry) else contextlib.nullcontext()

    def set(self, on: bool) -> None:
        """What begins now is guarded, or is not."""
        if on or self.is_on:  # again, because a cap cannot be below what is in use when it is set
            self._cap(on)
        self.is_on = on

    def from_here(self, *, by_values: bool) -> None:
        """What runs already, on this thread or in a backward, is guarded after all; where the caller goes on, its own
        is (``by_values``: as in `leave_to_caller`)."""
        self.set(True)
        if not arm(self._relief.relieve):
            self.leave_to_caller(by_values=by_values)

    def leave_to_caller(self, *, by_values: bool) -> None:
        """The caller goes on. What is still capped is tried again as the model's operators are; it is not refused for
        gaps, nor because it may depend on values as the model does."""
        if self._accelerator.leaves_gaps or by_values:
            self._cap(False)
        elif self._is_capped:
            self._end_of_caller()
            self._end_of_caller = guard_caller(self._retry())

    def take_from_caller(self) -> None:
        """What comes now is not the caller's."""
        end, self._end_of_caller = self._end_of_caller, _nothing
        end()

    def release(self) -> None:
        """Nothing runs: others may have the memory."""
        self.take_from_caller()
        self._cap(False)

    @contextlib.contextmanager
    def _explaining(self, inner: contextlib.AbstractContextManager[None]) -> Iterator[None]:
        """``inner``, in which an operator that nobody tries again may find no gap that is large enough. In what comes
        after it somebody does. Nor does anybody try one again that was under way when the rest began to be guarded."""
        try:
            with inner:
                yield
        except torch.OutOfMemoryError as error:
            refusal: BudgetError | None = self._room.for_gaps(error)
            if refusal is None and self._is_capped and not isinstance(error, BudgetError):
                refusal = self._relief.refused("an operator that had begun before room ran short", error)
            if refusal is None:
                raise
            raise refusal from error

    def _cap(self, on: bool) -> None:
        self._is_capped = on and not self.is_open
        self._accelerator.cap(self._budget if self._is_capped else None)

    def _retry(self, **given: Any) -> Retry:
        return Retry(
            self._relief.relieve,
            note_answered=self._relief.note_answered,
            explain=self._relief.refused,
            failures=self._accelerator.failures,
            numbers=self._accelerator.random_numbers,
            await_others=self._relief.await_others,
            **given,
        )


def _nothing() -> None:
    pass
