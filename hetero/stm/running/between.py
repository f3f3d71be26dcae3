"""Between the model's segments, where the caller runs.

Owns what is done before the caller goes on and when something of the model's comes again: room is left, as far as it is
known how much that takes, and the cap is lifted or not. What is seen of the caller's part is
`hetero.stm.running.callers`'; what its operators find no room for is tried again by `hetero.stm.running.guarding`.
"""

from collections.abc import Callable

from hetero.msc import MemStatsCollector, Phase, Segment
from hetero.stm.activations.offload import Activations
from hetero.stm.copies.residency import Residency
from hetero.stm.plans.planbook import PlanBook
from hetero.stm.running.callers import MOST_OF_ITS_OWN, CallersPart
from hetero.stm.running.course import Course
from hetero.stm.running.growth import Growth
from hetero.stm.running.guarding import Guarding

__all__ = ["Between"]


class Between:
    """Of one manager's segments. ``segment``: the one that ran last, until the next one begins."""

    def __init__(
        self,
        residency: Residency,
        activations: Activations,
        collector: MemStatsCollector,
        plans: PlanBook,
        course: Course,
        growth: Growth,
        guarding: Guarding,
        caller: CallersPart,
        *,
        segment: Callable[[], Segment | None],
    ) -> None:
        self._residency = residency
        self._room = residency.room
        self._activations = activations
        self._collector = collector
        self._plans = plans
        self._course = course
        self._growth = growth
        self._guarding = guarding
        self._caller = caller
        self._segment = segment

    def leave_room(self) -> None:
        """Before what the caller does between forward and backward, unguarded: what was measured of it fits, with more
        beside where forward kept more, and where nothing was measured, all that can leave does."""
        course, drift = self._course, self._growth.drift
        plan = course.plan_of_caller
        if plan is None:
            self.leave_unplanned_room()
            return
        if not self._collector.is_sampling:
            self._caller.end_forward(plan, position=course.callers)
        if grown := self._growth.own:
            if not self._collector.is_sampling and not plan.guarded[course.number]:
                self._caller.begin_after_drift(plan, position=course.callers)
            # What leaves for it has to come back: if that costs fetches, it is planned for.
            self._plans.outgrown.note(grown)
        self._keep_to(plan.limits[course.callers] - drift - MOST_OF_ITS_OWN * drift)

    def leave_unplanned_room(self) -> None:
        """As `leave_room`, if there is no plan to tell; after a backward as well, if the caller goes on with what it
        has returned."""
        if not self._guarding.is_on or self._course.plan_of_caller is not None:
            return
        measured = None if self._course.is_unsure else self._plans.measured_limit(self._segment())
        with self._collector.evicting(for_operator=False):
            self._residency.evict_idle()
            excess = self._activations.device_bytes if measured is None else self._room.excess(measured)
            self._activations.shed(max(0, excess))

    def before_backward(self) -> None:
        """The caller is about to begin one, with what it has made of a forward's results, where nobody could make room:
        if that is so much more than was measured that the budget may be passed, much leaves now, and more is kept free
        from the next iteration on."""
        segment, course = self._segment(), self._course
        plan = course.plan_of_caller
        if segment is None or segment.key.phase is not Phase.FORWARD or segment.left_bytes is not None:
            return
        self._activations.close_gone()
        left, _ = self._collector.asked_non_model_bytes()
        segment.left_bytes = left - self._plans.others.now().total  # as it is measured
        if plan is None:
            return
        if plan.left[course.number] is None:  # nobody knows what its loss takes
            self._guarding.set(True)
        more = self._caller.begin_backward(
            plan,
            left,
            number=course.number,
            position=course.callers,
            drift=self._growth.drift,
            is_sampled=segment.sampled,
        )
        if more > 0:
            self._growth.drift += more
            self._guarding.set(True)
            self._keep_to(plan.limits[course.callers] - self._growth.drift)

    def after_backward(self) -> None:
        """The caller goes on after one."""
        segment, plan = self._segment(), self._course.plan_of_caller
        if (
            plan is not None
            and segment is not None
            and segment.key.phase is Phase.BACKWARD
            and not segment.sampled
        ):
            self._caller.end_backward(plan, position=self._course.callers)
        self.leave_to_caller()

    def before_another_backward(self) -> None:
        """The caller is about to go once more through what a backward has kept: where that was not planned, first of
        all through what is the caller's own, which nobody sees."""
        segment = self._segment()
        if segment is None or segment.key.phase is not Phase.BACKWARD or segment.sampled:
            return
        if self._course.is_through:
            self._guarding.set(True)

    def release_cap(self) -> None:
        """Nothing runs until the next segment: others may have the memory. A model may also be dropped here."""
        self._guarding.release()
        self._collector.peaks.end_turn()

    def leave_to_caller(self) -> None:
        """The caller goes on."""
        self._guarding.leave_to_caller(by_values=self._course.is_by_values)
        self._collector.peaks.end_turn()

    def take_from_caller(self) -> None:
        """What comes now is not the caller's."""
        self._guarding.take_from_caller()

    def _keep_to(self, limit: int) -> None:
        """Bring all model data down to ``limit``, as far as they can leave."""
        if self._room.exceeds(limit):
            with self._collector.evicting(for_operator=False):
                self._room.trim(limit, keep=())
                self._activations.shed(max(0, self._room.excess(limit)))
            self._caller.note_room_made()
