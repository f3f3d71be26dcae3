"""Following the plan.

Owns what is done at each sampling moment. Invariant: the schedule is a hint for speed, never a condition: operands are
made resident at every sampling moment whatever the schedule said, and an access that it did not foresee is a
fetch of its own, counted. What is planned is decided in `hetero.stm.plans.planbook`, where in it the iteration is, in
`hetero.stm.running.course`, how much more there is than was measured, in `hetero.stm.running.growth`; bytes are moved
by `Residency`; what is tried again, and under which cap, is `hetero.stm.running.guarding`'s; what is done for the
caller, who runs between the model's segments, `hetero.stm.running.between`'s.
"""

import contextlib
from collections.abc import Iterable, Sequence

from hetero.devices import Accelerator
from hetero.msc import MemStatsCollector, Phase, Segment, SegmentKey
from hetero.stm.activations.offload import Activations
from hetero.stm.copies.holders import Holders
from hetero.stm.copies.residency import Residency
from hetero.stm.gradients.kept import has_gradient
from hetero.stm.gradients.offload import Gradients
from hetero.stm.plans.cycles import Cycles, Place
from hetero.stm.plans.planbook import PlanBook
from hetero.stm.running.backlog import Backlog
from hetero.stm.running.between import Between
from hetero.stm.running.callers import CallersPart
from hetero.stm.running.course import Course
from hetero.stm.running.growth import Growth
from hetero.stm.running.guarding import Guarding
from hetero.stm.running.relief import Relief
from hetero.stm.tensors.managed import ManagedTensor

__all__ = ["Executor"]


class Executor:
    """Carries out schedules at sampling moments."""

    def __init__(
        self,
        tensors: Sequence[ManagedTensor],
        residency: Residency,
        gradients: Gradients,
        activations: Activations,
        collector: MemStatsCollector,
        cycles: Cycles,
        plans: PlanBook,
        accelerator: Accelerator,
        relief: Relief,
    ) -> None:
        self._tensors = tensors
        self._residency = residency
        self._gradients = gradients
        self._activations = activations
        self._collector = collector
        self._cycles = cycles
        self._plans = plans
        self._relief = relief
        self._segment: Segment | None = None
        self._is_backward = False
        self._course = Course(cycles, activations)
        self._backlog = Backlog(tensors, residency, activations)
        self._growth = Growth(
            tensors,
            residency,
            gradients.kept,
            activations,
            collector,
            plans,
            self._course,
            self._backlog,
        )
        self._holders = Holders(residency.resident)
        self._room = residency.room
        self._room.is_planned = lambda: self._course.plan is not None
        self._room.next_use = self._course.next_use
        self._room.enough = self._growth.enough
        self._guarding = Guarding(
            accelerator, relief, self._room, plans.budget, note_values=self._note_values
        )
        samples = plans.samples
        self._caller = CallersPart(
            self._room,
            collector.peaks,
            plans.outgrown,
            plans.budget,
            samples.note_excess,
            samples.note_callers,
            plans.others,
        )
        self.between = Between(
            residency,
            activations,
            collector,
            plans,
            self._course,
            self._growth,
            self._guarding,
            self._caller,
            segment=lambda: self._segment,
        )

    @property
    def segment(self) -> Segment | None:
        """The segment that runs now."""
        return self._segment

    @property
    def is_guarded(self) -> bool:
        """What runs now, or ran last, follows no plan, has left it, or is known to need relief."""
        return self._guarding.is_on

    def guarded(self, coming: SegmentKey | None = None) -> contextlib.AbstractContextManager[None]:
        """Around what may run out of memory (`hetero.stm.running.guard`): the segment that runs, or ``coming``, if it
        may begin within."""
        # What runs before the first managed operator of ``coming`` is still under the cap that the last one has set.
        return self._guarding.around(
            at_once=self._guarding.is_on or (coming is not None and self._cycles.will_be_guarded(coming))
        )

    def guarded_within(self) -> contextlib.AbstractContextManager[None]:
        """Around what runs within a backward: guarded if the segment is and nobody guards it yet. The node of the
        backward that it runs in is not: which formula that takes would depend on it (`hetero.stm.running.guard`)."""
        return self._guarding.around_within()

    def note_unguarded(self) -> None:
        """As `hetero.stm.uses.Uses.note_unguarded`."""
        self._course.runs_unguarded = True

    def begin_segment(self, key: SegmentKey, *, is_open: bool = False) -> None:
        """A forward, backward or step begins. ``is_open``: operators of the caller's own run in it, which nobody tries
        again."""
        self.finish_segment()
        self._guarding.is_open = is_open
        self._is_backward = key.phase is Phase.BACKWARD
        place = self._cycles.begin_segment(key)
        self._course.begin(place)
        if place.number == 0 and (key.trains or key.phase is not Phase.FORWARD):
            self._activations.begin_iteration()
        # Forward's guard is around this one.
        is_within_guard = self._guarding.is_on and self._is_backward
        self._guarding.set(place.guarded)
        if key.phase is not Phase.STEP:  # which uses no copies
            self._residency.follow_stream()
        elif self._course.plan is not None and not place.sample:
            self._caller.begin_step(self._course.plan)
        if place.number == 0 and not place.sample:
            self._caller.begin_iteration()
        missing = self._backlog.begin(place.expected if self._course.plan is not None else ())
        self._activations.reclaim(0)
        self._segment = segment = self._measure(key, place, missing)
        there = segment.has_gradients or len(self._gradients.kept) > 0
        planned = self._course.plan is not None and key.phase is not Phase.STEP
        if (
            planned
            and not there
            and self._plans.samples.begins_with_gradients(key)
            and not self._has_gradients()
        ):
            self._plans.samples.note_no_gradients(key)
        if there and planned and self._plans.samples.note_gradients(key):
            # The plan is of iterations that begin without, and has used their memory.
            if self._is_backward:
                self._guard_from_here()
            else:  # its guard is still to come
                self._guarding.set(True)
        self._growth.begin()
        # As keys and values of a text do, and may within it.
        grows = place.number == 0 and key.phase is Phase.FORWARD and not key.trains
        if self._growth.drift and (grows or is_within_guard):
            self._guarding.set(True)
        # What runs before the segment's first managed operator has a period too.
        self.before_operator([], key.phase.value)

    def finish_segment(self) -> None:
        """The segment, if any, is over."""
        self.between.take_from_caller()
        if self._segment is not None:
            if self._course.plan is not None:
                self._caller.end(self._course.plan)
                if not (self._segment.key.trains or self._segment.sampled):
                    self._caller.end_inference(
                        self._course.plan, self._limit(), position=self._course.callers
                    )
            self._cycles.note_unused(min(self._growth.unused, self._caller.take_unused()))
            self._activations.close_gone()  # what the last operator has used up is not there until the next iteration
            self._collector.end_segment()
            self._cycles.end_segment(self._segment)
            self._segment = None
            self._is_backward = False
            self._course.end()
            self._growth.end()  # another thread's operators may go on

    def before_operator(self, operands: list[ManagedTensor], name: object) -> None:
        """The pre-op sampling moment: measure, then change the layout as planned, then make operands resident."""
        self._activations.close_gone()
        if self._is_backward:
            self._limit_gradients()
        collector = self._collector
        if self._is_in_place(operands):
            self._course.position += 1
            if collector.is_clocked:
                collector.moment(name, ())
                collector.operands_ready()
            return
        indices = tuple([tensor.index for tensor in operands])
        if collector.is_sampling:
            self._gradients.reclaim(0)
            held = self._holders.held(operands)
            collector.moment(_label(name, operands), indices, held, self._activations.held())
        else:
            collector.moment(name, indices)
        self._change_layout(operands, indices, name)

    def after_operator(self) -> None:
        """The operator that `before_operator` was called for has run."""
        self._collector.operator_over()

    @property
    def follows_plan(self) -> bool:
        """What runs now was planned, has not left its plan, and is not being measured."""
        return not (
            self._course.plan is None
            or self._course.has_strayed
            or self._guarding.is_on
            or self._collector.is_sampling
        )

    def renew(self, tensor: ManagedTensor) -> None:
        """Its copy has been dropped, because home is being written: order one of the result, if it has a place of its
        own; else as soon as there is room, if it can stay until it is used without displacing a planned one."""
        plan = self._course.plan
        if plan is None:
            return
        if tensor.index in plan.places:
            self._backlog.want([tensor.index])
        elif tensor.index in plan.renewable:
            self._backlog.want_renewed(tensor)

    def homes_written(self, tensors: Sequence[ManagedTensor]) -> None:
        """The optimizer has stepped: copies of ``tensors`` are worthless, wherever they were."""
        self._residency.drop_stale(tensors)  # before: what follows does not take their memory
        self._collector.moment("stepped", ())
        self._collector.note_queued(tuple(t.index for t in tensors if t.pending is not None))
        for tensor in tensors:
            self._collector.count_stale(tensor.index)
        if self._course.plan is not None:
            self._backlog.want(self._course.plan.places)
        self._change_layout([], (), "stepped")

    def homes_overtook(self, indices: Iterable[int]) -> None:
        """They have been written since the forward before began, by no step of ours: copies from before are worthless
        in each such iteration, whether there are any now or not."""
        for index in indices:
            self._collector.count_stale(index)
        if self._course.plan is not None and not self._course.plan.overtaken.issuperset(indices):
            self._cycles.note_outdated()

    def make_room(self, nbytes: int) -> None:
        """For a saved tensor that comes back at an instant that no plan foresaw. Others leave for what whoever reads it
        takes itself."""
        limit = self._limit()
        self._room.require(nbytes, limit=limit, operator=lambda: "a saved tensor")
        if self._course.plan is not None and self._room.exceeds(limit - nbytes):
            self._activations.shed(self._room.excess(limit - nbytes))
            if not self._guarding.is_on and self._room.exceeds(limit - nbytes):
                self._guard_from_here()

    # -- helpers --------------------------------------------------------------------------------------

    def _measure(self, key: SegmentKey, place: Place, missing: int) -> Segment:
        """The collector's segment of what begins at ``place``; so many planned copies are ``missing`` there."""
        if place.sample:
            self._relief.await_release()
            self._holders.begin()
        segment = self._collector.begin_segment(key, sample=place.sample, time=place.time)
        segment.others_ran = place.others_ran
        if place.number > 0:  # before an iteration, others may have run
            segment.brought_back = missing
        if place.sample:
            segment.has_gradients = self._has_gradients()
        return segment

    def _has_gradients(self) -> bool:
        """There is one, wherever it is."""
        return any(has_gradient(tensor) for tensor in self._tensors)

    def _guard_from_here(self) -> None:
        self._guarding.from_here(by_values=self._course.is_by_values)

    def _note_values(self) -> None:
        if self._segment is not None:
            self._segment.by_values = True

    def _change_layout(self, operands: list[ManagedTensor], indices: tuple[int, ...], name: object) -> None:
        growth = self._growth
        actions = self._course.advance(indices)
        plan = self._course.plan
        if (self._course.has_strayed or self._course.saves_otherwise) and not self._guarding.is_on:
            self._guard_from_here()  # it may take more than was measured, in operators that nobody sees as well
        self._backlog.forget_overtaken(actions)
        asks = plan is not None and plan.others_gave[self._course.current]
        looks = bool(asks or actions.evict or actions.fetch or self._collector.is_sampling)
        if looks and growth.has_grown() and not self._guarding.is_on and not self._is_step:
            self._guard_from_here()
        self._backlog.evict(actions.evict)
        if growth.drift or growth.excess:
            growth.answer(actions.fetch, self._limit() - self._gradient_room())
        limit = self._limit()
        room = limit - self._gradient_room()
        coming = growth.still_to_come(self._course.current)
        # Where nothing has grown, this is for copies that the schedule does not know; else the guard makes that room.
        self._room.trim(room if growth.drift else room - coming, keep=indices)
        if plan is not None and self._room.exceeds(limit):
            self._activations.shed(self._room.excess(limit))
        self._residency.wanted = frozenset(indices)
        try:
            fetched = self._residency.require(operands, limit=limit, operator=lambda: _label(name, operands))
            short = self._room.excess(limit + growth.excess - coming)
            # The operands alone pass it: what the operator itself needs may not fit. One of no parameter's, which saves
            # its operands, is under way, too late to be guarded itself.
            if short > 0 and not self._guarding.is_on:
                if not operands and self._relief.frees(short):
                    growth.look_again()
                else:
                    self._guard_from_here()
            if plan is not None and self._is_backward:
                # Operands, and what was not there when it was measured, may leave less than was planned.
                less = self._room.excess(limit + growth.excess - self._gradient_room())
                if less > 0:
                    self._gradients.do_with_less(less)
            if fetched and plan is not None:
                self._collector.count_unplanned(
                    max(0, fetched - sum(index in indices for index in actions.fetch))
                )
            # None was there at the look above, and since then memory has only been given back.
            excess = 0 if looks and not (fetched or growth.excess) else None
            self._backlog.prefetch(actions.fetch, room + growth.excess, excess, growth.measured_excess)
            self._renew(room - coming)
        finally:
            self._residency.wanted = frozenset()
        self._collector.operands_ready()

    def _is_in_place(self, operands: list[ManagedTensor]) -> bool:
        """The plan foresaw this moment and asks for nothing, and every operand can be read: the common case."""
        course = self._course
        if not course.expects(operands) or not self._backlog.is_empty or self._collector.is_sampling:
            return False
        plan = course.plan
        assert plan is not None
        growth = self._growth
        limit = plan.limits[course.position] - growth.excess
        room = self._gradient_room() if self._is_backward else 0
        if growth.drift:
            limit -= growth.drift
        if growth.drift or self._is_backward:
            # With less than that, what comes may not fit, and `_change_layout` has to see to it.
            room = max(room, growth.still_to_come(course.position) - growth.excess)
        return self._residency.holds(operands, limit=limit - room)

    @property
    def _is_step(self) -> bool:
        return self._segment is None or self._segment.key.phase is Phase.STEP

    def _limit(self) -> int:
        if self._course.plan is None:
            return self._cycles.unplanned_limit(self._segment)
        limit = self._course.plan.limits[self._course.current] - self._growth.drift - self._growth.excess
        return min(limit, self._cycles.unplanned_limit(None)) if self._course.has_left_plan else limit

    def _limit_gradients(self) -> None:
        plan = self._course.plan
        position = min(self._course.position, self._course.stop - 1)
        self._gradients.follow(None if plan is None else plan.gradient_reserves[position])

    def _gradient_room(self) -> int:
        """What has to stay free for gradients that will be on their way before the next moment."""
        if self._course.plan is None or not self._is_backward:
            return 0
        return self._gradients.room_left

    def _renew(self, limit: int) -> None:
        if self._backlog.may_renew:
            assert self._course.plan is not None
            self._gradients.reclaim(0)
            self._backlog.renew(limit, self._course.plan.spare[self._course.current])


def _label(name: object, operands: list[ManagedTensor]) -> str:
    text = name if isinstance(name, str) else getattr(name, "__name__", str(name))
    return f"{text}({', '.join(tensor.name for tensor in operands)})" if operands else text
