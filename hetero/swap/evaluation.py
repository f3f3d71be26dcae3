"""A choice of gaps, judged: scheduled, simulated, and put into a plan.

Owns the objective that all planners share: the simulated step, then the bytes moved.
"""

from collections.abc import Sequence

from hetero.simulate import Machine, simulate_program
from hetero.swap.model import Gap, Step, SwapPlan
from hetero.swap.schedule import Lowering, schedule

__all__ = ["Evaluation"]


class Evaluation:
    """Judges choices for one step, machine and limit; ``count`` tells how many were simulated."""

    def __init__(self, step: Step, machine: Machine, limit: int) -> None:
        self.step, self.machine, self.limit = step, machine, limit
        self.count = 0
        self._lowering = Lowering(step, machine)

    def plan(self, gaps: Sequence[Gap], *, method: str, eager: bool = False) -> SwapPlan:
        """The plan that swaps ``gaps``, whose planned load must be within the limit."""
        self.count += 1
        swaps = schedule(self.step, gaps, self.machine, self.limit, eager=eager)
        timeline = simulate_program(self._lowering.program(swaps), limit=self.limit)
        return SwapPlan(
            method=method,
            limit=self.limit,
            swaps=swaps,
            timeline=timeline,
            overhead=self.step.overhead(timeline.step_seconds),
        )

    @staticmethod
    def better(one: SwapPlan, other: SwapPlan) -> bool:
        """Whether ``one`` takes less time, or moves fewer bytes in the same time."""
        if one.overhead != other.overhead:
            return one.overhead < other.overhead
        return one.moved_bytes < other.moved_bytes
