"""Where in its plan an iteration is.

Owns the position, which only goes forward, and whether the iteration has strayed: operators that do not come are passed
over, and at one that was not planned it stays where it is. Neither moves anything; `hetero.stm.running.executor` does.
"""

from collections.abc import Sequence

from hetero.eviction import Actions
from hetero.stm.activations.offload import Activations
from hetero.stm.plans.cycles import Cycles, Place
from hetero.stm.plans.plan import CyclePlan
from hetero.stm.tensors.managed import ManagedTensor

__all__ = ["NOTHING", "Course", "in_the_end"]

NOTHING = Actions()


class Course:
    """Of one manager's segment. ``plan`` is None where nothing is planned; ``position``: the next moment, of those
    before ``stop``; ``number``, ``is_unsure``: as in `hetero.stm.plans.cycles.Place`. ``saves_otherwise``: more
    tensors, or fewer, were saved before the moment that was reached last than the plan has there."""

    def __init__(self, cycles: Cycles, activations: Activations) -> None:
        self._cycles = cycles
        self._activations = activations
        self.plan: CyclePlan | None = None
        self.position = 0
        self.stop = 0
        self.number = 0
        self.is_unsure = False
        self.has_strayed = False
        self.saves_otherwise = False
        # Some of what runs can never be tried again: regions that are compiled.
        self.runs_unguarded = False

    def begin(self, place: Place) -> None:
        """A segment begins there."""
        self.plan, self.position, self.stop = place.plan, place.begin, place.end
        self.number, self.is_unsure = place.number, place.unsure
        self.has_strayed = self.saves_otherwise = False
        self._follow_saved(self.position)

    def end(self) -> None:
        """It is over."""
        self.plan = None

    @property
    def current(self) -> int:
        """The moment that was reached last."""
        return max(0, self.position - 1)

    @property
    def is_through(self) -> bool:
        """All that was planned of the segment has come."""
        return self.plan is not None and self.position >= self.stop

    @property
    def has_left_plan(self) -> bool:
        """What could run out of memory and cannot be tried again may come: beside more than a warm-up's share, it might
        find no room."""
        return self.has_strayed and self.runs_unguarded

    @property
    def is_by_values(self) -> bool:
        """What runs may take more memory or less than it did, by values."""
        return self.plan is not None and self.plan.by_values

    @property
    def plan_of_caller(self) -> CyclePlan | None:
        """The plan, if it tells how much room what the caller does in between needs."""
        return None if self.has_left_plan or self.is_unsure else self.plan

    @property
    def callers(self) -> int:
        """The moment whose period has the caller's own part after a forward: the one that was reached last. Where the
        forward has strayed, its last operators may not have come: of that one and those to come, the one that leaves
        least."""
        plan, current = self.plan, self.current
        if plan is None or not self.has_strayed:
            return current
        return min(range(current, self.stop), key=plan.limits.__getitem__, default=current)

    def expects(self, operands: list[ManagedTensor]) -> bool:
        """The next moment has these, the schedule asks for nothing there, and all before came as planned."""
        plan, position = self.plan, self.position
        return (
            plan is not None
            and position < self.stop
            and plan.undisturbed[position] == operands
            and not self.has_strayed
            and (not operands or self._activations.coming == plan.first_saved[position])
        )

    def advance(self, operands: tuple[int, ...]) -> Actions:
        """To the moment with these: what the schedule wants there, and wanted at those that did not come."""
        plan, position = self.plan, self.position
        if plan is None:
            return NOTHING
        if position < self.stop and plan.operands[position] == operands:
            # Moments without operands are not sure to be the same: those of tensors that are large this time.
            self.saves_otherwise = bool(operands) and self._activations.coming != plan.first_saved[position]
            if self.has_strayed or self.saves_otherwise:
                self._follow_saved(position)
            self.position = position + 1
            return plan.schedule.actions[position]
        self.has_strayed = True
        # Moments without operands are all alike: those of what is left out or added must not be taken for others.
        found = plan.find(operands, position, self.stop) if operands else None
        self._follow_saved(found)
        if found is None:
            self._cycles.note_strayed()
            return NOTHING
        self._cycles.note_omitted(range(position, found))
        self.position = found + 1
        return in_the_end(plan.schedule.actions[position : found + 1])

    def next_use(self, tensor: ManagedTensor) -> float:
        """In moments from now; inf where nothing is planned."""
        return float("inf") if self.plan is None else self.plan.next_use(tensor.index, self.position)

    def _follow_saved(self, position: int | None) -> None:
        """What is saved from now on is what the plan has from ``position`` on; it has none of it, if that is None."""
        plan = self.plan
        if plan is None or position is None:
            self._activations.follow(0, 0)
        else:
            self._activations.follow(plan.first_saved[position], plan.first_saved[self.stop])


def in_the_end(passed: Sequence[Actions]) -> Actions:
    """What all of these come to: of what is fetched and then evicted, or the other way round, the last alone."""
    fetched: dict[int, bool] = {}
    for actions in passed:
        for indices, is_fetched in ((actions.evict, False), (actions.fetch, True)):
            for index in indices:
                fetched.pop(index, None)  # so that it comes where it was wanted last
                fetched[index] = is_fetched
    return Actions(
        evict=tuple(index for index, is_fetched in fetched.items() if not is_fetched),
        fetch=tuple(index for index, is_fetched in fetched.items() if is_fetched),
    )
