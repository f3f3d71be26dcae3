"""The caller's own part of an iteration: between a forward and the first managed operator of its backward.

Owns what is seen of it where it was planned for, and nothing of ours runs that could make room: what it holds when a
backward is called, and, where that is more than was measured, the peak of what follows. Says so to
`hetero.stm.plans.outgrown`; who leaves is `hetero.stm.running.executor`'s.
"""

from collections.abc import Callable

from hetero.msc import Segment
from hetero.msc.peaks import PeakKeeper
from hetero.stm.copies.room import Room
from hetero.stm.plans.outgrown import Outgrown
from hetero.stm.plans.plan import CyclePlan

__all__ = ["MOST_OF_ITS_OWN", "CallersPart"]

# Times what a loss has kept, its backward may take for a while; and times what the model has kept, a loss may.
MOST_OF_ITS_OWN = 8


class CallersPart:
    """Of one manager's iterations. ``budget``: of the device. ``note_excess``: told what plans should keep for what the
    allocator adds by itself."""

    def __init__(
        self,
        room: Room,
        peaks: PeakKeeper,
        outgrown: Outgrown,
        budget: int,
        note_excess: Callable[[int], None],
    ) -> None:
        self._room = room
        self._peaks = peaks
        self._outgrown = outgrown
        self._budget = budget
        self._note_excess = note_excess
        self._unused = 0  # of what the plan left to model data after the last forward
        self._model_bytes: int | None = None  # there when the part that is watched began
        self._planned = 0  # and what may have been there beside, by the plan
        self._has_drifted = False  # the forward before it kept more than was measured

    def begin_backward(
        self, segment: Segment, plan: CyclePlan, *, number: int, position: int, drift: int
    ) -> int:
        """A backward is called after the forward ``segment``, the plan's ``number``-th, whose last moment ``position``
        is. ``drift``: what the model itself has been seen to keep. Returns bytes that had better leave before."""
        assert segment.left_bytes is not None
        limit = plan.limits[position] - drift
        self._unused = -self._room.excess(limit)
        known = plan.left[number]
        more = 0 if known is None else segment.left_bytes - known - plan.margin - drift
        may_pass = more > 0 and self._room.exceeds(limit - MOST_OF_ITS_OWN * more)
        if segment.sampled:  # its peaks are read all the same
            return more if may_pass else 0
        looked = self.look_back(plan)  # before a watch begins: what has passed by now is no part of it
        if not may_pass:
            return looked
        self._watch(plan, position)
        return max(more, looked)

    def begin_after_drift(self, plan: CyclePlan, *, position: int) -> None:
        """A forward ends, with its last moment ``position``, that kept more than was measured: its caller may take more
        as well. Room has been made and is made now, but the next one is planned for."""
        self._has_drifted = True
        self._watch(plan, position)

    def _watch(self, plan: CyclePlan, position: int) -> None:
        if self._model_bytes is None:
            self._model_bytes = self._room.excess(0)
            self._planned = self._budget - plan.limits[position] - plan.excess
            self._peaks.begin()

    def note_room_made(self) -> None:
        """Copies have left: what there was before is no peak of what follows."""
        if self._model_bytes is not None:
            self._peaks.next_period()

    def end(self, plan: CyclePlan) -> None:
        """It is over. If it was watched: what it took, beside the model data that were there before room was made,
        might have passed the budget; or will, beside those of a plan that knows what the model keeps now."""
        before, self._model_bytes = self._model_bytes, None
        has_drifted, self._has_drifted = self._has_drifted, False
        if before is None:
            return
        # What blocks are larger than was asked for is no growth of the caller's.
        excess = self._peaks.excess()
        non_model = self._peaks.next_period() - excess - self._room.excess(0)
        self._peaks.end()
        more = non_model - self._planned
        passes = before + non_model + plan.excess + plan.margin > self._budget
        if passes or (has_drifted and more > 0):
            self._outgrown.note(more, passes_budget=True, is_next=not passes)

    def end_inference(self, plan: CyclePlan, limit: int) -> None:
        """A forward without a backward has ended, whose plan has left so much to model data, and what the caller has
        done with its result: the last one of several may have taken more than the one that was measured."""
        self._unused = -self._room.excess(limit)
        self.look_back(plan)

    def begin_iteration(self) -> None:
        """What was there before, between iterations, is nobody's growth."""
        self._peaks.passed(self._budget)

    def look_back(self, plan: CyclePlan) -> int:
        """If the budget was passed since this was asked before: how much more than planned there was then; else 0."""
        excess = self._peaks.excess()
        passed = self._peaks.passed(self._budget)
        if passed == 0:
            return 0
        if excess >= passed:  # no more than the budget was asked for
            self._note_excess(plan.excess + passed)
            return 0
        more = passed + max(0, self._unused)
        self._outgrown.note(more, passes_budget=True)
        return more
