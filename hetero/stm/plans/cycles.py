"""Which iteration this is, and how far it has come.

Owns its history. An iteration (*cycle*) is the sequence of segments from one optimizer step to the next, or of one call
of the closure that a step evaluates as often as it likes, or one forward without gradients, or one forward and backward
where there is no optimizer. Forwards without gradients that come while another waits for its backward are part of its
iteration, because they need the room that its copies and saved tensors have (what a model says without its adapters).
Invariant: a plan (`hetero.stm.plans.planbook`) is used only while the segments that ran so far in this cycle are the
ones it was made for; plans for other sequences (an eval loop, another shape, another number of micro-batches) live
beside it.
"""

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from hetero.msc import Phase, Segment, SegmentKey
from hetero.stm.plans.departures import Departures
from hetero.stm.plans.homechoice import HomeChoice
from hetero.stm.plans.plan import CyclePlan
from hetero.stm.plans.planbook import PlanBook
from hetero.stm.plans.succession import Succession
from hetero.stm.plans.timings import Keys

__all__ = ["Cycles", "Followed", "Place"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a segment lies in a plan, and whether to measure it.

    ``expected``: `CyclePlan.expected`, of which some may not be there, because something else ran before, there was no
    room, or somebody was given home's memory and may have written there. ``time``: measure its times instead
    (`hetero.stm.plans.timings`). ``guarded``: it may need more memory than is left beside what is resident
    (`hetero.stm.running.guard`); ``unsure``: and more than was measured. ``number``: of segments before it in its
    iteration. ``others_ran``: `hetero.msc.Segment.others_ran`.
    """

    plan: CyclePlan | None
    begin: int = 0
    end: int = 0
    sample: bool
    time: bool = False
    guarded: bool
    unsure: bool = False
    expected: tuple[int, ...] = ()
    number: int
    others_ran: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Followed:
    """What the last complete iteration followed from end to end. It cannot have moved less than this plan's lower
    bound, which is about iterations that leave what they find, minus ``missing_bytes``: of copies that it has found and
    not left, and of saved tensors that were needed before they had left."""

    plan: CyclePlan
    missing_bytes: int


# Segments without a step in between (forwards whose graphs are dropped): give up waiting for the iteration's end.
_LONGEST_CYCLE = 1024
# Backwards without a step: another optimizer steps than the one that we know of, if it has not been so before.
_MOST_WITHOUT_STEP = 128
# Forwards without gradients, one after the other, that are part of a training iteration. More are an evaluation.
_MOST_WITHIN = 8
# Of training iterations with several forwards: where there are more, hardly one will come again.
_MOST_PUT_TOGETHER = 16


@dataclass(slots=True)
class _History:
    keys: list[SegmentKey] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    has_strayed: bool = False
    has_more: bool = False
    is_outdated: bool = False
    is_planned: bool = False  # there is a plan for the segment that came last
    is_over: bool = False  # whatever comes next belongs to another iteration
    is_beside_others: bool = False  # another manager's goes on within it, or it within that, unplanned
    omitted: set[int] = field(default_factory=set)
    found: dict[int, int] = field(default_factory=dict)  # copies there when it began, and their bytes
    unused: int = sys.maxsize  # bytes that all of its segments had less than planned

    def clear(self) -> None:
        """Nothing has come yet."""
        self.keys, self.segments, self.omitted, self.unused = [], [], set(), sys.maxsize
        self.has_strayed = self.has_more = self.is_outdated = self.is_over = self.is_beside_others = False


class Others(Protocol):
    """Other managers of the device (`hetero.stm.sharing.Sharing`)."""

    def begin_iteration(self) -> None:
        """One of ours does."""

    def have_run_within(self) -> bool:
        """Some have, since it began."""

    def are_beside(self, *, is_first: bool) -> bool:
        """Some whose models our thread runs are in the middle of an iteration as ours begins (``is_first``), or have
        run since: one backward may go through theirs and ours."""

    def tell_together(self, *, is_first: bool) -> None:
        """These: `Cycles.note_together`."""


class Cycles:
    """Of one manager. ``headroom``: of so many bytes, what is free; ``activation_bytes``: of saved tensors that we
    hold on the device; ``copies``: those of parameters that are there, or on their way, and their bytes;
    ``ends_with_backward``: there is no optimizer whose step would end an iteration, or nothing for it to step, where
    another one trains what was added; ``others``: managers of the device.

    Attributes:
        followed: None if the last complete iteration followed no plan.
        is_to_be_measured: nobody knows what the next iteration that trains takes: the last one was the first with
            another manager's within it.
    """

    def __init__(
        self,
        book: PlanBook,
        homes: HomeChoice,
        *,
        warmup_bytes: int,
        headroom: Callable[[int], int],
        activation_bytes: Callable[[], int],
        copies: Callable[[], dict[int, int]],
        ends_with_backward: Callable[[], bool],
        others: Others,
        ended: Callable[[], None],
    ) -> None:
        self._book = book
        self._homes = homes
        self._warmup_bytes = warmup_bytes
        self._headroom = headroom
        self._activation_bytes = activation_bytes
        self._copies = copies
        self._ends_with_backward = ends_with_backward
        self._others = others
        self.is_to_be_measured = False
        self._times_beside_others = 0
        self._backwards_without_step, self._most_without_step = 0, _MOST_WITHOUT_STEP
        self._ended = ended  # called after each iteration that trains
        self._training = _History()
        self._inference = _History()
        self._departures = Departures()
        self._current = self._training
        self._succession = Succession[Keys]()
        self._put_together: set[Keys] = set()
        # There are too many kinds that differ in the order of their micro-batches; `hetero.stm.modelcalls` sets this.
        self.coarsen: Callable[[], None] = lambda: None
        self._coming: Keys | None = None  # the keys that the iteration under way is expected to have
        self.followed: Followed | None = None

    @property
    def is_under_way(self) -> bool:
        """An iteration has begun and is not known to be over."""
        return bool(self._training.keys or self._inference.keys)

    @property
    def awaits_backward(self) -> bool:
        """A forward that trains has run, and its backward is to come."""
        keys = self._training.keys
        return bool(keys) and keys[-1].phase is Phase.FORWARD and any(key.trains for key in keys)

    def begin_anew(self) -> None:
        """Forget how far iterations went; others may have been trained meanwhile."""
        self._homes.choose_again()
        for history in (self._inference, self._training):
            self._current = history
            self.abandon()

    def begin_segment(self, key: SegmentKey) -> Place:
        """Find the plan for the segment that begins. Closes the cycle before it if this begins a new one."""
        self._close_if_over(key.phase)
        self._count_without_step(key.phase)
        self._current = self._training if self._is_training(key) else self._inference
        history = self._current
        self._book.outgrown.trains = history is self._training
        if len(history.keys) >= _LONGEST_CYCLE:
            self.abandon()
        if not history.keys:
            history.found = self._copies()
        history.keys.append(key)
        book = self._book
        if len(book) > 1 and history is self._training and len(history.keys) == 1:
            self._coming = self._succession.following()
        is_first = len(history.keys) == 1
        if is_first:
            self._others.begin_iteration()
            self._forget_alone((key,))
            self._look_at_others()
        others_ran = self._others.are_beside(is_first=True) if is_first else self._others.have_run_within()
        plan = book.find(tuple(history.keys), self._coming)
        history.is_planned = plan is not None
        sampled = not book.samples.want(key, history.keys.count(key))
        place = len(history.keys) - 1
        if plan is None:
            return Place(plan=None, sample=not sampled, guarded=True, number=place, others_ran=others_ran)
        is_beside_others = self._note_others(plan, tuple(history.keys))
        unsure = book.is_unsure(plan, tuple(history.keys))
        return Place(
            plan=plan,
            begin=plan.bounds[place],
            end=plan.bounds[place + 1],
            sample=not sampled or unsure or not book.is_verified(plan.keys),
            time=book.is_verified(plan.keys) and book.timings.wants(plan.keys),
            expected=plan.expected[place],
            number=place,
            guarded=unsure or is_beside_others or history.has_strayed or self._is_guarded(plan, place),
            unsure=unsure,
            others_ran=others_ran,
        )

    def _is_training(self, key: SegmentKey) -> bool:
        """The segment that begins with ``key`` is part of an iteration that trains."""
        if key.trains or key.phase is not Phase.FORWARD:
            return True
        before = self._training.keys[-_MOST_WITHIN:]
        waits = bool(before) and not self._training.is_over and before[-1].phase is Phase.FORWARD
        return waits and any(key.trains for key in before)

    def will_be_guarded(self, key: SegmentKey) -> bool:
        """`Place.guarded` of a training segment that is about to begin with ``key``."""
        history = self._training
        begun = (*history.keys, key)
        plan = self._book.find(begun, self._coming)
        if plan is None or history.has_strayed or (self.is_to_be_measured and not history.keys):
            return True
        if self._note_others(plan, begun) or self._book.is_unsure(plan, begun):
            return True
        return self._is_guarded(plan, len(history.keys))

    def _note_others(self, plan: CyclePlan, begun: Keys) -> bool:
        """Look whether an iteration of another manager goes on within this one, which has ``begun`` so, or this one
        within that, and ``plan`` does not know: one backward may go through both. True: what comes is guarded for it.

        All of them are measured again from the next one on, while none follows a plan that knows of no other; at the
        1st, 2nd, 4th, 8th ... time: those that are only now and then within one another are planned for both.
        """
        history = self._training
        if plan.has_others_within or not begun[0].trains:
            return False
        is_first = len(begun) == 1
        if not history.is_beside_others and self._others.are_beside(is_first=is_first):
            history.is_beside_others = True
            self._times_beside_others += 1
            if self._times_beside_others.bit_count() == 1:
                self._book.outgrown.doubt(plan.keys)
                self.note_together()
                self._others.tell_together(is_first=is_first)
        return history.is_beside_others

    def _look_at_others(self) -> None:
        """More lives on the device of other managers, or less: plans are made anew; and what lives there of ours is
        chosen anew, if there may be more, or has to be less."""
        book = self._book
        before, there = book.device_homes, book.others.nbytes.total
        if book.look_at_others():
            self._homes.follow_plans(before)
            if book.others.nbytes.total < there or book.device_homes != before:
                self._homes.choose_again()

    def _is_guarded(self, plan: CyclePlan, place: int) -> bool:
        """Its segment ``place`` is, even where it follows the plan. In a step no operator is tried again."""
        # What has come to live there since the iteration began: its plan is followed all the same.
        if self._book.others.more_than(plan.others_home_bytes):
            return True
        return plan.guarded[place] or (plan.by_values and plan.keys[place].phase is not Phase.STEP)

    def note_together(self) -> None:
        """Another manager's iterations go on within ours, or ours within theirs, for the first time: the next one is
        measured again."""
        self.is_to_be_measured = True

    def _forget_alone(self, begun: Keys) -> None:
        """What was planned, and measured, of iterations that begin so, if that is due."""
        if self.is_to_be_measured and begun[0].trains and begun[0].phase is Phase.FORWARD:
            self.is_to_be_measured = False
            while (plan := self._book.find(begun, None)) is not None:
                self._book.measure_again(plan.keys, for_good=True)
                self._homes.choose_again_for(plan.keys)

    def note_strayed(self) -> None:
        """An operator comes that the plan does not know: a branch with the same shapes, a layer unfrozen."""
        self._current.has_strayed = self._current.has_more = True

    def note_omitted(self, moments: Iterable[int]) -> None:
        """These of the plan do not come: a layer is left out, an expert has no tokens."""
        self._current.has_strayed = True
        self._current.omitted.update(moments)

    def note_outdated(self) -> None:
        """The iteration follows its plan, and shows what that did not know of."""
        self._current.is_outdated = True

    def note_unused(self, nbytes: int) -> None:
        """A segment is over, in which its plan has kept so many bytes free in vain all along."""
        self._current.unused = min(self._current.unused, nbytes)

    def note_evaluated(self) -> None:
        """A step has called its closure, and may do so again: no step will end the iteration."""
        self._training.is_over = bool(self._training.keys)

    def end_segment(self, segment: Segment) -> None:
        """A segment is over; an incomplete one makes the cycle void."""
        if not segment.complete:
            self.abandon()
            self._homes.forget_loss()
            return
        self._current.segments.append(segment)
        samples = self._book.samples
        if segment.sampled and samples.want(segment.key, self._current.keys.count(segment.key)):
            samples.add(segment, again=self._current.is_planned)

    def abandon(self) -> None:
        """The current cycle was left by an exception: forget how far it went."""
        self._current.clear()

    def finish(self) -> None:
        """Close the cycle if its last segment is over."""
        self._close_if_over(Phase.FORWARD)

    def unplanned_limit(self, segment: Segment | None) -> int:
        """Model data allowed on the device in a segment that no plan covers."""
        budget = self._book.budget - self._book.margin
        room = min(self._warmup_bytes + self._activation_bytes(), self._headroom(budget))
        measured = self._book.measured_limit(segment)
        return room if measured is None else max(room, measured)

    def _close_if_over(self, coming: Phase) -> None:
        history = self._current
        if not history.keys:
            return
        last = history.keys[-1].phase
        if history is self._training and last is not Phase.STEP:
            over = last is Phase.BACKWARD and coming is Phase.FORWARD
            is_waited_for = self._backwards_without_step <= self._most_without_step
            if not (history.is_over or (over and (not is_waited_for or self._ends_with_backward()))):
                return
        keys, segments = tuple(history.keys), history.segments
        follows, found = not (history.has_strayed or history.is_outdated), history.found
        has_departed = len(segments) == len(keys) and self._has_departed(keys, history)
        leaves_out = not (history.is_outdated or history.has_more)
        unused = history.unused
        self.abandon()
        if len(segments) == len(keys):
            plan = self._book.get(keys) if follows else None
            left = self._copies()
            missing = sum(nbytes for index, nbytes in found.items() if index not in left)
            missing += sum(period.spared_bytes for segment in segments for period in segment.periods)
            self.followed = None if plan is None else Followed(plan=plan, missing_bytes=missing)
            if history is self._training:
                self._ended()
                self._succession.add(keys)
                self._count_put_together(keys)
            before = self._book.device_homes
            is_known = self._book.learn(keys, segments)
            if plan is not None and not (has_departed or is_known):
                self._note_shortage(keys, plan, segments)
            self._homes.learn(keys, segments)
            has_unused = plan is not None and self._departures.note_unused(
                keys,
                is_much=self._book.is_much(plan, unused),
                has_passed=self._book.outgrown.has_passed(keys),
            )
            if (has_departed or has_unused) and not is_known:
                if has_departed:
                    self._departures.note_measured(keys)
                self._book.measure_again(keys, for_good=leaves_out or has_unused, keeps_free=not has_unused)
                self._homes.choose_again_for(keys)
            else:
                self._book.take_time(keys)
            self._homes.follow_plans(before)

    def _count_without_step(self, coming: Phase) -> None:
        """After many backwards, and more than ever came before a step, none is waited for any more."""
        if coming is Phase.STEP:
            self._most_without_step = max(self._most_without_step, 4 * self._backwards_without_step)
            self._backwards_without_step = 0
        elif coming is Phase.BACKWARD:
            self._backwards_without_step += 1
        elif self._backwards_without_step == self._most_without_step:
            self._backwards_without_step += 1
            self._training.clear()  # all of these together are no iteration

    def _note_shortage(self, keys: Keys, plan: CyclePlan, segments: list[Segment]) -> None:
        """If memory ran short where the plan was followed, an operator took more than was measured of it, and may take
        more each time: the most of both is planned for."""
        lost = sum(segment.missed_fetches for segment in segments if any(p.relieved for p in segment.periods))
        if lost > 0 and self._departures.note_more(keys, lost=lost, parameters=len(plan.first_uses)):
            self._departures.note_measured(keys)
            self._book.outgrown.doubt(keys)

    def _count_put_together(self, keys: Keys) -> None:
        if sum(key.phase is Phase.FORWARD for key in keys) > 1:
            self._put_together.add(keys)
            if len(self._put_together) > _MOST_PUT_TOGETHER:
                self._put_together.clear()
                self.coarsen()

    def _has_departed(self, keys: Keys, history: _History) -> bool:
        """Iterations with these ``keys`` are so far from their plan that they are to be measured again."""
        plan = self._book.get(keys)
        if plan is None:
            return False
        parameters = len(plan.first_uses)
        lost = sum(segment.missed_fetches for segment in history.segments)
        if history.is_outdated or history.has_more:
            return self._departures.note_more(
                keys, lost=parameters if history.is_outdated else lost, parameters=parameters
            )
        if lost > 0 and self._book.lacks_room(keys):
            return self._departures.note_more(keys, lost=lost, parameters=parameters)
        return self._departures.note_less(keys, frozenset(history.omitted))
