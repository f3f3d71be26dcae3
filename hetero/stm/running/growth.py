"""How much more there is on the device than when the plan was measured.

Owns two numbers of the segment that runs: what was asked for and is no model data (tensors that the caller keeps, a
larger batch), and what the allocator has added by itself. Both take room from copies; only the first is growth, which
plans are told of (`hetero.stm.plans.outgrown`) where what was planned does not fit beside it, and other managers cannot
make room. And how much less of the first there is than then. Which of our copies leave for it is
`hetero.stm.running.executor`'s; what the caller adds between forward and backward, `hetero.stm.running.callers`'.
"""

import sys
from collections.abc import Iterable, Sequence

from hetero.msc import MemStatsCollector
from hetero.stm.activations.offload import Activations
from hetero.stm.copies.residency import Residency
from hetero.stm.gradients.kept import KeptGradients
from hetero.stm.plans.plan import CyclePlan
from hetero.stm.plans.planbook import PlanBook
from hetero.stm.running.backlog import Backlog
from hetero.stm.running.course import Course
from hetero.stm.tensors.managed import ManagedTensor

__all__ = ["Growth"]


class Growth:
    """Of one manager. ``drift``, ``excess``: bytes, as last measured or, of the first, as the executor expects them; 0
    where nothing is planned. Plain attributes, because every operator looks at them. ``unused``: bytes that the plan
    keeps free for what is no model data and that was not there, whenever this was measured in the segment."""

    def __init__(
        self,
        tensors: Sequence[ManagedTensor],
        residency: Residency,
        kept: KeptGradients,
        activations: Activations,
        collector: MemStatsCollector,
        plans: PlanBook,
        course: Course,
        backlog: Backlog,
    ) -> None:
        self._tensors = tensors
        self._residency = residency
        self._kept = kept
        self._activations = activations
        self._collector = collector
        self._plans = plans
        self._course = course
        self._backlog = backlog
        self.drift = self.excess = self.unused = 0
        self._looked: tuple[CyclePlan | None, int, bool] = (None, 0, False)

    def begin(self) -> None:
        """A segment begins."""
        self.unused = sys.maxsize if self._course.plan is not None else 0
        self.drift = self.measured(self._course.position)

    def end(self) -> None:
        """It is over: all are its plan's."""
        self.drift = self.excess = self.unused = 0
        self._looked = (None, 0, False)

    def has_grown(self) -> bool:
        """Measure. There is more than there was before in this segment: it may be so again, within any period."""
        drift = self.measured(self._course.current)
        if drift <= self.drift:
            return False
        self.drift = drift
        return True

    def look_again(self) -> None:
        """Something of others may have left."""
        self.drift = self.measured(self._course.current)

    def measured(self, position: int) -> int:
        """The drift at this moment; notes the excess. Not looked at at every moment, because reading the counter
        is slow on some devices."""
        plan = self._course.plan
        if plan is None:
            return 0
        self._activations.close_gone()  # else what is gone would count as model data that is there
        non_model, excess = self._collector.asked_non_model_bytes()
        self.excess = max(0, excess - plan.excess)
        drift = non_model - plan.non_model[position] - plan.margin
        # What others had there comes and goes by itself.
        others = plan.others[position] + plan.others_copies[position]
        self.unused = min(self.unused, -drift - self._plans.margin - others)
        return max(0, drift)

    def measured_excess(self) -> int:
        """How much more than the plan keeps for it is in use now and was not asked for; notes it."""
        plan = self._course.plan
        self.excess = 0 if plan is None else max(0, self._collector.asked_non_model_bytes()[1] - plan.excess)
        return self.excess

    @property
    def own(self) -> int:
        """Of the drift, what is no more of other managers' living on the device than the plan knows of: of that, the
        next plan does."""
        plan = self._course.plan
        if not self.drift or plan is None:
            return 0
        return max(0, self.drift - self._plans.others.more_than(plan.others_home_bytes))

    def answer(self, planned: Iterable[int], limit: int) -> None:
        """If what is ``planned`` does not fit into ``limit``: what other managers have fetched since it was measured
        may leave, at no more cost than ours; only if that is not enough, it is growth."""
        plan = self._course.plan
        assert plan is not None
        room = self._residency.room
        sizes = plan.trace.sizes
        short = room.excess(limit - sum(sizes[index] for index in self._backlog.missing(planned)))
        if short > 0:
            given = room.ask(short, False)
            if given:
                self.look_again()
            if given < short:
                self._plans.outgrown.note(self.own)
                if self.excess:
                    self._plans.samples.note_excess(plan.excess + self.excess)

    def still_to_come(self, position: int) -> int:
        """What gradients that stay on the device will take in the period of this moment. The schedule leaves room for
        them beside what it knows; not beside what is there besides, that has grown or is left over from iterations of
        another kind."""
        plan = self._course.plan
        if plan is None or not plan.device_homes:
            return 0
        if not self._all_stay(plan):  # they come at the next step
            return 0
        return max(0, plan.home_bytes[position] - self._residency.home_bytes() - self._kept.nbytes)

    def _all_stay(self, plan: CyclePlan) -> bool:
        """What should live on the device, by the plan, does. Looked at again only after something has moved."""
        changes = self._residency.home_changes
        if self._looked[0] is not plan or self._looked[1] != changes:
            self._looked = plan, changes, all(self._tensors[index].stays for index in plan.device_homes)
        return self._looked[2]

    def enough(self) -> int | None:
        """A budget for all that was measured, beside what there is now and was not then; None without a plan."""
        plan, needs = self._course.plan, self._plans.needs()
        if plan is None or needs is None:
            return None
        more = self._collector.asked_non_model_bytes()[0] - plan.non_model[self._course.current]
        seen = self.drift + plan.margin if self.drift else 0
        return needs[0] + max(0, more, seen)
