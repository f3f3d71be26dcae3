"""What an iteration cannot be faster than, as far as that is known.

Owns `TimeBounds`: the time of each of those that work side by side. Each is what that one has to do under the
present budget, with the same parameters on the device, if nothing else were ever in its way.
"""

from dataclasses import dataclass

from hetero.eviction import lower_bound_seconds
from hetero.msc import Phase
from hetero.stm import StatefulTensorMgr
from hetero.stm.plans.plan import CyclePlan
from hetero.stm.tensors.fetch import plain

__all__ = ["TimeBounds", "bound_times"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeBounds:
    """Seconds per iteration.

    Attributes:
        operators: as measured, without waiting.
        copies: operators, and the copies that any schedule would need, in the order of their uses
            (`hetero.eviction.lower_bound_seconds`).
        gradients: the way down of those of parameters that live at home.
        host_step: updates of parameters that live at home, each at the fastest that a byte of any was ever updated;
            0 before that is known.
    """

    operators: float
    copies: float
    gradients: float
    host_step: float

    @property
    def seconds(self) -> float:
        """The slowest of them: no overlap makes an iteration faster."""
        return max(self.operators, self.copies, self.gradients, self.host_step)


def bound_times(stm: StatefulTensorMgr, plan: CyclePlan) -> TimeBounds:
    """Of the iteration that ``plan`` is for."""
    links = stm.plans.timings.links(plan.keys)
    homes = set(plan.device_homes)
    trains = any(key.phase is Phase.BACKWARD for key in plan.keys)
    at_home = [t for t in stm.tensors if trains and t.index not in homes and t.parameter.requires_grad]
    return TimeBounds(
        operators=sum(moment.seconds for moment in plan.trace.moments),
        copies=lower_bound_seconds(plan.whole_trace, links),
        gradients=sum(links.d2h_seconds(t.device_nbytes) for t in at_home if t.index in plan.first_uses),
        host_step=_updated_bytes(stm, plan) * stm.plans.timings.host_fastest(),
    )


def _updated_bytes(stm: StatefulTensorMgr, plan: CyclePlan) -> int:
    """Of the parameters that the host steps in such an iteration; 0 before that is known."""
    updates = plan.trace.updates
    with plain():  # not home: that is forgotten when management ends
        return 0 if updates is None else sum(stm.tensors[i].parameter.nbytes for i in updates.tensors)
