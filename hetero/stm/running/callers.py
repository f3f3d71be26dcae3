"""The caller's own part of an iteration: between a forward and the first managed operator of its backward.

Owns what is seen of it where it was planned for, and nothing of ours runs that could make room: what it holds when a
backward is called, and, where that is more than was measured, the peak of what follows. Says so to
`hetero.stm.plans.samples`, of that moment alone, or, where it was known there, to `hetero.stm.plans.outgrown`; who
leaves is `hetero.stm.running.between`'s.
"""

import bisect
import sys
from collections.abc import Callable

from hetero.msc import SegmentKey
from hetero.msc.peaks import PeakKeeper
from hetero.stm.copies.room import Room
from hetero.stm.plans.othershomes import OthersHomes
from hetero.stm.plans.outgrown import Outgrown
from hetero.stm.plans.plan import CyclePlan

__all__ = ["MOST_OF_ITS_OWN", "CallersPart"]

# Times what a loss has kept, its backward may take for a while; and times what the model has kept, a loss may.
MOST_OF_ITS_OWN = 8


class CallersPart:
    """Of one manager's iterations. ``budget``: of the device. ``note_excess``: told what plans should keep for what the
    allocator adds by itself. ``note_peak``: told what was there beside model data after a forward with that key; true
    if that is news."""

    def __init__(
        self,
        room: Room,
        peaks: PeakKeeper,
        outgrown: Outgrown,
        budget: int,
        note_excess: Callable[[int], None],
        note_peak: Callable[[SegmentKey, int], bool],
        others: OthersHomes,
    ) -> None:
        self._room = room
        self._peaks = peaks
        self._outgrown = outgrown
        self._budget = budget
        self._note_excess = note_excess
        self._note_peak = note_peak
        self._others = others
        self._unused = 0  # of what the plan left to model data after the last forward, or backward
        self._unused_by_caller = sys.maxsize
        self._passed = 0  # what `look_back` has told of the forward itself
        self._model_bytes: int | None = None  # there when the part that is watched began
        self._position = 0  # of its forward's last moment
        self._planned = 0  # and what may have been there beside, by the plan
        self._has_drifted = False  # the forward before it kept more than was measured

    def begin_backward(
        self, plan: CyclePlan, left: int, *, number: int, position: int, drift: int, is_sampled: bool
    ) -> int:
        """A backward is called after the plan's ``number``-th forward, whose last moment ``position`` is, with so much
        ``left`` on the device that is no model data. ``drift``: what the model itself has been seen to keep. Returns
        bytes that had better leave before."""
        limit = plan.limits[position] - drift
        self._unused = -self._room.excess(limit)
        known = plan.left[number]
        more = 0 if known is None else left - known - plan.margin - drift
        may_pass = more > 0 and self._room.exceeds(limit - MOST_OF_ITS_OWN * more)
        if is_sampled:  # its peaks are read all the same
            return more if may_pass else 0
        # Before a watch begins: what has passed by now is no part of it.
        looked = max(self._passed, self.look_back(plan, after=position))
        self._note_used(plan)
        self._passed = 0
        if not may_pass:
            return looked
        self._watch(plan, position)
        return max(more, looked)

    def end_forward(self, plan: CyclePlan, *, position: int) -> None:
        """A forward ends, with its last moment ``position``: what has passed the budget by now was not its caller."""
        self._unused = -self._room.excess(plan.limits[position])
        self._passed = self.look_back(plan)

    def begin_after_drift(self, plan: CyclePlan, *, position: int) -> None:
        """A forward ends, with its last moment ``position``, that kept more than was measured: its caller may take more
        as well. Room has been made and is made now, but the next one is planned for."""
        self._has_drifted = True
        self._watch(plan, position)

    def _watch(self, plan: CyclePlan, position: int) -> None:
        if self._model_bytes is None:
            self._model_bytes, self._position = self._room.excess(0), position
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
        more = non_model - self._planned - self._others.more_than(plan.others_home_bytes)
        passes = before + non_model + plan.excess + plan.margin > self._budget
        if passes and self._is_news(plan, self._position, non_model):
            return
        if passes or (has_drifted and more > 0):
            self._outgrown.note(more, passes_budget=True, is_next=not passes)

    def end_inference(self, plan: CyclePlan, limit: int, *, position: int) -> None:
        """A forward without a backward has ended, whose plan has left so much to model data, and what the caller has
        done with its result: the last one of several may have taken more than the one that was measured. ``position``:
        of its last moment."""
        self._unused = -self._room.excess(limit)
        self.look_back(plan, after=position)
        self._note_used(plan)

    def begin_iteration(self) -> None:
        """What was there before, between iterations, is nobody's growth."""
        self._peaks.passed(self._budget)

    def end_backward(self, plan: CyclePlan, *, position: int) -> None:
        """A backward ends, with its last moment ``position``: what its operators took is not its caller's."""
        if self._outgrown.has_passed(plan.keys):
            self.look_back(plan)
            self._unused = -self._room.excess(plan.limits[position])

    def begin_step(self, plan: CyclePlan) -> None:
        """The caller's part after a backward is over."""
        self.look_back(plan)
        self._note_used(plan)

    def take_unused(self) -> int:
        """Bytes that the plan has kept free in vain where only the caller has run, in iterations of a kind that has
        passed the budget. What it takes between two segments is at no moment to be seen, as
        `hetero.stm.running.growth` looks."""
        unused, self._unused_by_caller = self._unused_by_caller, sys.maxsize
        return unused

    def _note_used(self, plan: CyclePlan) -> None:
        """It was asked just now what had passed the budget since only the caller has run."""
        if self._outgrown.has_passed(plan.keys):
            unused = self._budget - self._peaks.latest - max(0, self._unused)
            self._unused_by_caller = min(self._unused_by_caller, unused)

    def look_back(self, plan: CyclePlan, *, after: int | None = None) -> int:
        """If the budget was passed since this was asked before: how much more than planned there was then; else 0.
        ``after``: only the caller has run since then, after a forward with this last moment."""
        excess = self._peaks.excess()
        passed = self._peaks.passed(self._budget)
        if passed == 0:
            return 0
        if excess >= passed:  # no more than the budget was asked for
            self._note_excess(plan.excess + passed)
            return 0
        more = passed + max(0, self._unused)
        non_model = self._budget + passed - excess - self._room.excess(0)
        if after is None or not self._is_news(plan, after, non_model):
            self._outgrown.note(more, passes_budget=True)
        return more

    def _is_news(self, plan: CyclePlan, position: int, non_model: int) -> bool:
        """There was so much beside model data after the forward that ends there, and plans are to know. Then nothing
        has to be kept free in the rest of the iteration, which is measured once more all the same: it may be so from
        now on."""
        place = bisect.bisect_right(plan.bounds, position)
        own = non_model - self._others.now().total  # as it is measured
        if position + 1 != plan.bounds[place] or not self._note_peak(plan.keys[place - 1], own):
            return False
        self._outgrown.note(0, passes_budget=True)
        return True
