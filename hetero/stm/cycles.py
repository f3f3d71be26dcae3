"""Which iteration this is, and the plan for it.

Owns samples and plans. An iteration (*cycle*) is the sequence of segments from one optimizer step to the next, or
one forward without gradients, or one forward and backward where there is no optimizer. Invariant: a plan is
used only while the segments that ran so far in this cycle are the ones it was made for; plans for other
sequences (an eval loop, another shape, another number of micro-batches) live beside it.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

from hetero.eviction import (
    CapacityError,
    HomeCost,
    Links,
    Policy,
    Schedule,
    Trace,
    choose_placement,
    choose_renewed,
)
from hetero.msc import Phase, Segment, SegmentKey
from hetero.stm.outgrown import Outgrown
from hetero.stm.plans import CyclePlan, PlanMaker
from hetero.stm.samples import Samples
from hetero.stm.succession import Succession
from hetero.stm.tensors import ManagedTensor

__all__ = ["Cycles", "Place"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a segment lies in a plan, and whether to measure it.

    ``missing``: what the plan expects to be resident and may not be, because something else ran before. ``time``:
    measure its times instead (`hetero.stm.timings`). ``guarded``: it may need more memory than is left beside what is
    resident (`hetero.stm.guard`); ``unsure``: and more than was measured. ``number``: of segments before it in its
    iteration.
    """

    plan: CyclePlan | None
    begin: int = 0
    end: int = 0
    sample: bool
    time: bool = False
    guarded: bool
    unsure: bool = False
    missing: tuple[int, ...] = ()
    number: int


# Segments without a step in between (a closure that runs the model, forwards whose graphs are dropped): give up
# waiting for the iteration's end.
_LONGEST_CYCLE = 1024


@dataclass(slots=True)
class _History:
    keys: list[SegmentKey]
    segments: list[Segment]
    has_left_plan: bool = False
    is_outdated: bool = False


class Cycles:
    """Samples segments, plans cycles."""

    def __init__(
        self,
        tensors: Sequence[ManagedTensor],
        *,
        budget: int,
        warmup_bytes: int,
        warmup_steps: int,
        links: Links,
        policy: Policy,
        prefetch: bool,
        fixed_bytes: Callable[[], int],
        headroom: Callable[[int], int],
        activation_bytes: Callable[[], int],
        host_room: Callable[[], int],
        ends_with_backward: bool,
    ) -> None:
        self._tensors = tensors
        self.budget = budget
        self._warmup_bytes = warmup_bytes
        self._planner = PlanMaker(
            tensors,
            budget=budget,
            links=links,
            policy=policy,
            prefetch=prefetch,
            fixed_bytes=fixed_bytes,
            host_room=host_room,
        )
        self.timings = self._planner.timings
        self._headroom = headroom
        self._activation_bytes = activation_bytes
        self._ends_with_backward = ends_with_backward
        self.samples = Samples(warmup_steps)
        self._plans: dict[tuple[SegmentKey, ...], CyclePlan] = {}
        self._verified: set[tuple[SegmentKey, ...]] = set()
        self._departures: dict[tuple[SegmentKey, ...], int] = defaultdict(int)
        self._training = _History([], [])
        self._inference = _History([], [])
        self._current = self._training
        self._succession = Succession()
        self._coming: Hashable | None = None  # the keys that the iteration under way is expected to have
        self.outgrown = Outgrown()
        self._margin = 0  # of every plan, and of what runs without one: given to others by `trim`
        # Parameters that live on the device, in all plans alike (`hetero.stm.devicehomes`), and the most bytes that
        # they may take: memory ran short with more.
        self.device_homes: tuple[int, ...] = ()
        self._most_home_bytes = budget
        self._has_lost_homes = False
        self._has_refused_homes = False
        # What each parameter would cost there, by index; empty: none can, or nothing has been measured.
        self.home_costs: Callable[[], dict[int, HomeCost]] = dict
        # Sends those with these indices home.
        self.leave_device: Callable[[frozenset[int]], None] = lambda indices: None
        self._homes_chosen: set[tuple[SegmentKey, ...]] = set()
        # Updates at home begin in backward; `hetero.stm.speculation` sets this.
        self.updates_early: Callable[[], bool] = lambda: False
        self._early = False
        self._renewed: dict[tuple[SegmentKey, ...], tuple[int, ...]] = {}
        # All model data could be on the device at once (`hetero.stm.settled`).
        self.everything_fits: Callable[[], bool] = lambda: False
        self.last_sampled: list[Segment] = []
        self.last: list[Segment] = []
        self.last_plan: CyclePlan | None = None

    @property
    def plans(self) -> Iterable[CyclePlan]:
        """Of all kinds of iterations that have one."""
        return self._plans.values()

    @property
    def margin(self) -> int:
        """Of the budget, what was given to others."""
        return self._margin

    @property
    def is_under_way(self) -> bool:
        """An iteration has begun and is not known to be over."""
        return bool(self._training.keys or self._inference.keys)

    def begin_anew(self) -> None:
        """Forget how far iterations went; others may have been trained meanwhile."""
        self._homes_chosen.clear()
        for history in (self._inference, self._training):
            self._current = history
            self.abandon()

    # -- segments -------------------------------------------------------------------------------------

    def begin_segment(self, key: SegmentKey) -> Place:
        """Find the plan for the segment that begins. Closes the cycle before it if this begins a new one."""
        self._close_if_over(key.phase)
        self._current = self._training if key.trains or key.phase is not Phase.FORWARD else self._inference
        history = self._current
        if len(history.keys) >= _LONGEST_CYCLE:
            self.abandon()
        history.keys.append(key)
        if len(self._plans) > 1 and history is self._training and len(history.keys) == 1:
            self._coming = self._succession.following()
        plan = self._matching(tuple(history.keys))
        sampled = not self.samples.want(key, history.keys.count(key))
        if plan is None:
            return Place(plan=None, sample=not sampled, guarded=True, number=len(history.keys) - 1)
        place = len(history.keys) - 1
        unsure = self.outgrown.is_unsure(plan.keys)
        return Place(
            plan=plan,
            begin=plan.bounds[place],
            end=plan.bounds[place + 1],
            sample=not sampled or unsure or plan.keys not in self._verified,
            time=plan.keys in self._verified and self.timings.wants(plan.keys),
            missing=plan.expected if place == 0 else (),
            number=place,
            guarded=unsure or history.has_left_plan or plan.guarded[place],
            unsure=unsure,
        )

    def will_be_guarded(self, key: SegmentKey) -> bool:
        """`Place.guarded` of a training segment that is about to begin with ``key``."""
        history = self._training
        plan = self._matching((*history.keys, key))
        if plan is None or history.has_left_plan or self.outgrown.is_unsure(plan.keys):
            return True
        return plan.guarded[len(history.keys)]

    def leave_plan(self) -> None:
        """Operators come that the plan does not know: a branch with the same shapes, a layer unfrozen."""
        self._current.has_left_plan = True

    def note_outdated(self) -> None:
        """The iteration follows its plan, and shows what that did not know of."""
        self._current.is_outdated = True

    def end_segment(self, segment: Segment) -> None:
        """A segment is over; an incomplete one makes the cycle void."""
        if not segment.complete:
            self.abandon()
            return
        self._current.segments.append(segment)
        if segment.sampled and self.samples.want(segment.key, self._current.keys.count(segment.key)):
            self.samples.add(segment)

    def abandon(self) -> None:
        """The current cycle was left by an exception: forget how far it went."""
        self._current.keys.clear()
        self._current.segments.clear()
        self._current.has_left_plan = self._current.is_outdated = False

    def finish(self) -> None:
        """Close the cycle if its last segment is over."""
        self._close_if_over(Phase.FORWARD)

    def unplanned_limit(self, segment: Segment | None) -> int:
        """Model data allowed on the device in a segment that no plan covers."""
        budget = self.budget - self._margin
        room = min(self._warmup_bytes + self._activation_bytes(), self._headroom(budget))
        measured = self.measured_limit(segment)
        return room if measured is None else max(room, measured)

    def measured_limit(self, segment: Segment | None) -> int | None:
        """Model data allowed in a segment that was measured before; None if it was not."""
        samples = () if segment is None else self.samples.present(segment.key)
        peaks = [period.non_model_bytes for s in samples for period in s.periods if period.is_sampled]
        return self.budget - self._margin - max(peaks) if peaks else None

    def needs(self) -> tuple[int, int] | None:
        """Bytes of the device, by all plans: the fewest that any could work with, and what they work with now.

        None before there is a plan.
        """
        if not self._plans:
            return None
        plans = self._plans.values()
        return max(map(self._planner.least, plans)), max(map(self._planner.planned, plans))

    def forward_seconds(self) -> float | None:
        """Of the forwards of an iteration, as measured; None before there is a plan."""
        return None if self.last_plan is None else self.last_plan.forward_seconds

    def trim(self, budget: int) -> None:
        """Plan anew for ``budget`` bytes of the device, leaving the rest of the budget to others."""
        self._margin = self.budget - budget
        self._replan({keys: self._margin for keys in self._plans})
        self._homes_chosen.clear()

    # -- cycles ---------------------------------------------------------------------------------------

    def _close_if_over(self, coming: Phase) -> None:
        history = self._current
        if not history.keys:
            return
        last = history.keys[-1].phase
        if history is self._training and last is not Phase.STEP:
            over = self._ends_with_backward and last is Phase.BACKWARD and coming is Phase.FORWARD
            if not over:
                return
        keys, segments = tuple(history.keys), list(history.segments)
        is_outdated = history.has_left_plan or history.is_outdated
        self.abandon()
        if len(segments) == len(keys):
            if history is self._training:
                self._succession.add(keys)
            before = self.device_homes
            self._learn(keys, segments)
            if is_outdated:
                self._measure_again(keys)
            if gone := frozenset(before).difference(self.device_homes):
                self.leave_device(gone)  # the new plan has given their room to others

    def _learn(self, keys: tuple[SegmentKey, ...], segments: list[Segment]) -> None:
        self.last = segments
        if all(segment.sampled for segment in segments):
            self.last_sampled = segments
            if keys in self._plans:
                self._verified.add(keys)
                if self.outgrown.is_unsure(keys):
                    self._learn_growth(keys, segments)
        if keys not in self._plans and self.samples.suffice(keys):
            self._replan({keys: self._margin})
            self.last_plan = self._plans[keys]
        else:
            self._replan_if_outgrown(keys, segments)
        if self._has_lost_homes or self._has_refused_homes:
            if self._has_lost_homes:
                plan = self._plans.get(keys)
                self._most_home_bytes = (0 if plan is None else max(plan.home_bytes)) // 2
            self._has_lost_homes = self._has_refused_homes = False
            self._keep_homes()
        elif keys in self._verified:
            if self.timings.learn(keys, segments):
                if self.timings.was_in_vain(keys):
                    self._renewed[keys] = self._choose_places(keys, ())
                    self._set_homes(())
                else:
                    self._replan({keys: self._plans[keys].margin})
            if self.updates_early() is not self._early:
                self._early = not self._early
                self._homes_chosen.clear()
                if any(self._renewed.values()):  # they have lost what they were for
                    self._renewed.clear()
                    self._replan({each: plan.margin for each, plan in self._plans.items()})
            if keys not in self._homes_chosen:
                self._choose_homes(keys)

    def _measure_again(self, keys: tuple[SegmentKey, ...]) -> None:
        """Iterations with these keys are no longer what they were: forget them at the 1st, 2nd, 4th, 8th ... that was
        not, because some models take another path every time."""
        self._departures[keys] += 1
        if self._departures[keys].bit_count() == 1:
            plan = self._plans.pop(keys, None)
            if plan is self.last_plan:
                self.last_plan = None
            self._verified.discard(keys)
            self.timings.forget(keys)
            self._homes_chosen.discard(keys)
            self.samples.forget(keys)

    def _replan_if_outgrown(self, keys: tuple[SegmentKey, ...], segments: list[Segment]) -> None:
        missed = any(period.unplanned_fetches for segment in segments for period in segment.periods)
        plan = self._plans.get(keys)
        more = self.outgrown.keep_free(
            keys,
            missed=missed,
            room=lambda: 0 if plan is None else self.budget - plan.margin - self._planner.least(plan),
        )
        if (more or self.samples.take_news()) and plan is not None:
            self._replan({keys: plan.margin + more})

    def _learn_growth(self, keys: tuple[SegmentKey, ...], segments: list[Segment]) -> None:
        """What was kept free meanwhile need not be, as far as it has been measured now, after a forward."""
        self.outgrown.note_measured(keys)
        grown = self.samples.add_again(segments)
        self._replan({keys: max(self._margin, self._plans[keys].margin - grown)})

    # -- device homes ---------------------------------------------------------------------------------

    def lose_device_homes(self) -> None:
        """Memory ran short, and parameters that lived on the device had to leave: fewer from now on."""
        self._has_lost_homes = True

    def refuse_device_homes(self) -> None:
        """Some of them cannot be stepped there, as it has turned out: `home_costs` does not name them any more."""
        self._has_refused_homes = True

    def _choose_homes(self, keys: tuple[SegmentKey, ...]) -> None:
        """Which parameters live on the device, and which others keep a place there."""
        plan = self._plans.get(keys)
        written = self._written_between(keys)
        costs = {index: cost for index, cost in self.home_costs().items() if index not in written}
        if plan is None or not (costs or self._early):
            return
        order = sorted(plan.first_uses, key=plan.first_uses.__getitem__)
        if costs and self._most_home_bytes >= self.budget and self.everything_fits():
            self._homes_chosen.add(keys)
            self._set_homes(tuple(index for index in order if index in costs))
            return
        if not self.timings.is_final(keys):
            return
        self._homes_chosen.add(keys)

        best = choose_placement(
            order,
            costs,
            [tensor.device_nbytes for tensor in self._tensors],
            may_stay=self._may_stay(plan),
            most_bytes=min(self._most_home_bytes, self.budget - plan.margin),
            links=self.timings.links(keys),
            plan=lambda homes, places: self._tried(keys, homes, places),
        )
        # Each kind of iteration has its own best number; all of them have to live with the least.
        others = len(self._homes_chosen) > 1
        chosen = tuple(index for index in best.home.homes if not others or index in self.device_homes)
        self._renewed[keys] = best.places if chosen == best.home.homes else self._choose_places(keys, chosen)
        early = plan.trace.updates is not None and plan.trace.updates.early is not self._early
        if chosen == self.device_homes and (early or plan.renewed != self._renewed[keys]):
            self._replan({keys: plan.margin})
        self._set_homes(chosen, on_trial=keys if best.home.moves_more and not self.device_homes else None)

    def _choose_places(self, keys: tuple[SegmentKey, ...], homes: tuple[int, ...]) -> tuple[int, ...]:
        """Which parameters keep a place on the device beside ``homes``."""
        others = [index for index in self._may_stay(self._plans[keys]) if index not in homes]
        return choose_renewed(others, lambda places: self._tried(keys, homes, places)) if others else ()

    def _may_stay(self, plan: CyclePlan) -> tuple[int, ...]:
        """Those that may keep a place, by first use."""
        updates = plan.trace.updates
        if not self._early or updates is None:
            return ()
        return tuple(index for index in updates.tensors if index in plan.first_uses)

    def _written_between(self, keys: tuple[SegmentKey, ...]) -> set[int]:
        """Parameters that the caller writes at home in such an iteration, besides the step: on the device they would go
        home for that, and come back."""
        forwards = (key for key in keys if key.phase is Phase.FORWARD)
        periods = (period for key in forwards for s in self.samples.present(key)[-1:] for period in s.periods)
        return {index for period in periods for index in period.invalidates}

    def _tried(
        self, keys: tuple[SegmentKey, ...], homes: tuple[int, ...], places: tuple[int, ...]
    ) -> tuple[Trace, Schedule]:
        made = self._make(keys, self._plans[keys].margin, homes, self.home_costs(), places, thorough=False)
        return made.trace, replace(made.schedule, fetched_bytes=made.fetched_bytes)

    def _keep_homes(self) -> None:
        """Those that still can live on the device, as many as may."""
        costs, kept, taken = self.home_costs(), [], 0
        for index in self.device_homes:
            if index in costs and taken + costs[index].nbytes <= self._most_home_bytes:
                taken += costs[index].nbytes
                kept.append(index)
        self._set_homes(tuple(kept))

    def _set_homes(self, homes: tuple[int, ...], *, on_trial: tuple[SegmentKey, ...] | None = None) -> None:
        """``on_trial``: the iterations that have to become shorter by it."""
        if homes != self.device_homes:
            self.device_homes = homes
            for keys in self._plans:
                self.timings.note_moved(keys, on_trial=keys == on_trial)
            self._replan({keys: plan.margin for keys, plan in self._plans.items()})

    def _replan(self, margins: dict[tuple[SegmentKey, ...], int]) -> None:
        """Make these plans, with as many of the device homes as fit in all of them."""
        costs = self.home_costs() if self.device_homes else {}
        made, waiting = dict[tuple[SegmentKey, ...], CyclePlan](), dict(margins)
        while waiting:
            keys = next(iter(waiting))
            try:
                made[keys] = self._make(
                    keys, waiting[keys], self.device_homes, costs, self._renewed.get(keys, ())
                )
                del waiting[keys]
            except CapacityError:
                if self._renewed.pop(keys, ()):
                    continue
                if not self.device_homes:
                    raise
                self.device_homes = self.device_homes[: len(self.device_homes) // 2]
                waiting = {**{keys: plan.margin for keys, plan in self._plans.items()}, **margins}
        self._plans.update(made)
        if self.last_plan is not None:
            self.last_plan = self._plans.get(self.last_plan.keys)

    def _make(
        self,
        keys: tuple[SegmentKey, ...],
        margin: int,
        homes: tuple[int, ...],
        costs: dict[int, HomeCost],
        renewed: tuple[int, ...],
        *,
        thorough: bool = True,
    ) -> CyclePlan:
        return self._planner.make(
            keys, self.samples, margin, homes, costs, renewed=renewed, early=self._early, thorough=thorough
        )

    # -- finding plans --------------------------------------------------------------------------------

    def _matching(self, keys: tuple[SegmentKey, ...]) -> CyclePlan | None:
        """A plan whose iterations begin so: the one that is expected, else the one before, else the latest."""
        coming = self._plans.get(self._coming)  # type: ignore[call-overload]
        if coming is not None and coming.keys[: len(keys)] == keys:
            self.last_plan = coming
        if self.last_plan is not None and self.last_plan.keys[: len(keys)] == keys:
            return self.last_plan
        for candidate in reversed(self._plans.values()):
            if candidate.keys[: len(keys)] == keys:
                self.last_plan = candidate
                return candidate
        return None
