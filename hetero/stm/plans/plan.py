"""The plan of an iteration: a schedule, where its segments lie in it, and what it was made for.

Owns `CyclePlan` and what follows from it. It is made in `hetero.stm.plans.making`; when it is used is decided in
`hetero.stm.plans.cycles`.
"""

import bisect
import functools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from hetero.eviction import (
    Moment,
    OnTheirWay,
    Schedule,
    Trace,
    lower_bound,
    renewable,
    spare_bytes,
    without_places,
)
from hetero.msc import Phase
from hetero.stm.plans.timings import Keys
from hetero.stm.tensors.managed import ManagedTensor

__all__ = ["CyclePlan", "by_first_use"]


@dataclass(frozen=True, kw_only=True)
class CyclePlan:
    """A schedule and where its segments lie in it.

    ``operands[i]``, ``limits[i]``, ``non_model[i]``: of moment i; a limit is for all model data, gradients on their way
    included; non-model bytes are those in use when the operator begins, and asked for. ``others_gave[i]``: as of a
    period (`hetero.msc.Period`), and they are asked again. ``others_away[i]``: how much more ``non_model[i]`` would be
    if other managers had all of their data there, but what never comes and goes; ``others_away_at_peak[i]``: and so the
    peak of its period. ``undisturbed[i]``: its operands if the schedule asks for nothing there, and nobody has to be
    asked, else None. ``margin``: kept free of everything; ``excess``: kept for what is in use and nobody has asked for
    (`hetero.stm.plans.samples.Samples`). ``device_homes``: tensors that live on the device and take ``home_bytes[i]``
    there; the trace, which is about the others, does not know them. ``whole_gradients[i]``: what gradients would take,
    did everything live there. ``first_saved``: the trace's numbers of saved tensors (`hetero.stm.plans.lives.Lives`).
    ``guarded``: segments in which something has to leave in the middle of a period, as it did when it was measured.
    ``has_others_within``: other managers' segments begin between its own. ``by_values``: what it takes depends on more
    than what tells iterations apart; what was measured is no bound. ``left``: of each forward, what
    `hetero.msc.Segment.left_bytes` was at most. ``places``: tensors whose place on the device is theirs all along, in
    no moment's capacity, and is filled again when they have been updated. ``others_home_bytes``: of other
    managers', what lives on the device (`hetero.stm.plans.othershomes`); ``others[i]``: what of it counts as non-model
    data, because it was not there when that was measured, ``others_more[i]`` of it more than lived there then;
    ``others_copies[i]``: of their parameters that are at home, what was.
    """

    keys: Keys
    bounds: tuple[int, ...]
    operands: tuple[tuple[int, ...], ...]
    others_gave: tuple[bool, ...]
    others_away: tuple[int, ...]
    others_away_at_peak: tuple[int, ...]
    undisturbed: tuple[list[ManagedTensor] | None, ...]
    limits: tuple[int, ...]
    non_model: tuple[int, ...]
    margin: int
    excess: int
    gradient_reserves: tuple[OnTheirWay, ...]
    trace: Trace
    schedule: Schedule
    device_homes: tuple[int, ...]
    home_bytes: tuple[int, ...]
    whole_gradients: tuple[int, ...]
    first_saved: tuple[int, ...]
    guarded: tuple[bool, ...]
    has_others_within: bool
    by_values: bool
    left: tuple[int | None, ...]
    places: tuple[int, ...]
    others_home_bytes: int
    others: tuple[int, ...]
    others_more: tuple[int, ...]
    others_copies: tuple[int, ...]

    @property
    def knows_callers_part(self) -> bool:
        """Each forward that has a backward after it here has been measured with one after it. It may be known from
        iterations alone that have several forwards for a backward, whose loss comes after the last of them."""
        following = zip(self.keys, self.keys[1:], self.left, strict=False)
        return not any(
            left is None and key.phase is Phase.FORWARD and after.phase is Phase.BACKWARD
            for key, after, left in following
        )

    @functools.cached_property
    def positions(self) -> dict[tuple[int, ...], list[int]]:
        """Moments with these operands, ascending."""
        positions: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for position, indices in enumerate(self.operands):
            positions[indices].append(position)
        return dict(positions)

    @functools.cached_property
    def uses(self) -> dict[int, list[int]]:
        """Of each tensor, the moments that need it, ascending."""
        uses: dict[int, list[int]] = defaultdict(list)
        for position, moment in enumerate(self.trace.moments):
            for tensor in (*moment.operands, *moment.awaits):
                uses[tensor].append(position)
        return dict(uses)

    @functools.cached_property
    def first_uses(self) -> dict[int, int]:
        """Rank of each parameter by when it is used first."""
        return by_first_use(self.operands)

    @functools.cached_property
    def spare(self) -> tuple[int, ...]:
        """From each moment to the step, bytes that no planned copy takes."""
        return spare_bytes(self.trace, self.schedule)

    @functools.cached_property
    def whole_trace(self) -> Trace:
        """The trace with ``places`` like any others."""
        return without_places(self.trace)

    @functools.cached_property
    def least_bytes(self) -> int:
        """That any schedule of `whole_trace` would have to move."""
        return lower_bound(self.whole_trace)

    @property
    def fetched_bytes(self) -> int:
        """To the device, in an iteration."""
        return self.schedule.fetched_bytes + sum(self.trace.sizes[x] for x in self.places)

    @property
    def moved_bytes(self) -> int:
        """Over both directions, in an iteration that follows it."""
        return self.schedule.moved_bytes + sum(self.trace.sizes[x] for x in self.places) + self.gradient_bytes

    @property
    def gradient_bytes(self) -> int:
        """That go home in an iteration: those of what does not live on the device."""
        return sum(send.nbytes for moment in self.trace.moments for send in moment.sends)

    @functools.cached_property
    def expected(self) -> tuple[tuple[int, ...], ...]:
        """Of each segment, parameters and saved tensors that the schedule has on the device, or on their way, when it
        begins, and uses, in the order in which it does."""
        always = self.first_uses.keys() & {*self.device_homes, *self.places}
        begins = frozenset(self.bounds)
        needed, found = self.first_uses.keys() & set(self.schedule.start), dict[int, set[int]]()
        for position in reversed(range(len(self.operands))):
            moment, actions = self.trace.moments[position], self.schedule.actions[position]
            needed.difference_update(moment.invalidates)
            needed.update(self.operands[position], self._saved(moment.operands))
            needed.difference_update(actions.fetch, actions.evict, moment.produces)
            if position in begins:
                found[position] = needed | always
        return tuple(
            tuple(sorted(found[begin], key=functools.partial(self.next_use, position=begin)))
            if key.phase is not Phase.STEP  # of which places come back only after it
            else ()
            for key, begin in zip(self.keys, self.bounds, strict=False)
        )

    @functools.cached_property
    def overtaken(self) -> frozenset[int]:
        """Tensors whose copies home is known to overtake in an iteration, and those that have none."""
        known = (x for moment in self.trace.moments for x in moment.invalidates)
        return frozenset((*known, *self.device_homes, *self.places))

    @functools.cached_property
    def renewable(self) -> tuple[int, ...]:
        """Tensors without a place whose copies are renewed before the step all the same, where there is room."""
        return renewable(self.trace, self.schedule)

    @functools.cached_property
    def forward_seconds(self) -> float:
        """Of the forwards, as measured."""
        return sum(moment.seconds for moment in self._moments(Phase.FORWARD))

    def _saved(self, tensors: Sequence[int]) -> tuple[int, ...]:
        """Those of ``tensors`` that are no parameters."""
        return tuple(index for index in tensors if index >= self.first_saved[0])

    def _moments(self, phase: Phase) -> list[Moment]:
        bounds = zip(self.keys, self.bounds, self.bounds[1:], strict=False)
        return [
            moment
            for key, begin, end in bounds
            if key.phase is phase
            for moment in self.trace.moments[begin:end]
        ]

    def find(self, operands: tuple[int, ...], begin: int, end: int) -> int | None:
        """The first moment in ``[begin, end)`` with these operands."""
        moments = self.positions.get(operands, [])
        place = bisect.bisect_left(moments, begin)
        return moments[place] if place < len(moments) and moments[place] < end else None

    def next_use(self, tensor: int, position: int) -> float:
        """Moments from ``position`` to the tensor's next use, around the cycle; inf if it has none."""
        uses = self.uses.get(tensor)
        if not uses:
            return float("inf")
        place = bisect.bisect_left(uses, position)
        return uses[place] - position if place < len(uses) else uses[0] + len(self.operands) - position


def by_first_use(operands: Sequence[tuple[int, ...]]) -> dict[int, int]:
    """Rank of each tensor by its first use among ``operands``, of one moment after the other."""
    order = dict.fromkeys(tensor for indices in operands for tensor in indices)
    return {tensor: rank for rank, tensor in enumerate(order)}
