"""The plans: one for each kind of iteration.

Owns them and what they are made of: samples, times, what was outgrown, what lives on the device in all of them alike
(chosen by `hetero.stm.plans.homechoice`). An iteration's kind is the sequence of its segments' keys. Invariant: while
memory allows it at all, there is a plan for every kind that was sampled, made for the budget less the margin.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from hetero.eviction import CapacityError, HomeCost, Schedule, Trace
from hetero.msc import Phase, Segment, SegmentKey
from hetero.stm.plans.fits import ForwardKind, kind_of
from hetero.stm.plans.making import PlanMaker
from hetero.stm.plans.outgrown import SPARE, Outgrown
from hetero.stm.plans.plan import CyclePlan
from hetero.stm.plans.samples import Samples
from hetero.stm.plans.timings import Keys

__all__ = ["Keys", "PlanBook"]

# Kinds of iterations: with more, a kind is planned when it comes the second time; the most that have a plan, and the
# most of those without that are remembered.
_MANY, _MOST, _MOST_SEEN = 16, 64, 256
# Where device homes have no room any more, plans are made once more without one part in so many of them, at least.
_PORTIONS = 8
_UNTIL_TIMED = 3  # iterations that end, from the one of which a first plan is made, until its times are known
# Of the budget, one part in so many: what an operator took more the first time, or somebody for a while, is forgotten
# where it is as much.
_WORTH_FORGETTING = 32
_GONE_AFTER = 64  # iterations without one of its kind
# Keys of segments that samples are kept of, before it is looked whether any are for nothing.
_LEAST_TO_PRUNE = 256


class PlanBook:
    """Of one manager, made by ``planner``. ``warmup_steps``: iterations that are measured."""

    def __init__(self, planner: PlanMaker, *, warmup_steps: int) -> None:
        self._planner = planner
        self.budget = planner.budget
        self.timings = planner.timings
        self.others = planner.others
        self.samples = Samples(warmup_steps)
        self.outgrown = Outgrown()
        self.margin = 0  # of the budget, what was given to others (`trim`): no plan uses it
        self._plans: dict[Keys, CyclePlan] = {}
        self._verified: set[Keys] = set()
        # Once for each, and not again until its plan is made of other samples.
        self._looked_for_spikes: set[Keys] = set()
        # Those made in haste, and how many such iterations are to end until they are made anew: one where all were made
        # at once; where there was none before, its own, one that verifies it, and one whose times are measured.
        self._hasty: dict[Keys, int] = {}
        self._seen_once: dict[Keys, None] = {}
        # How many iterations have come, those that train by themselves, and which was the last of its kind.
        self._iterations = self._trained = 0
        self._came: dict[Keys, int] = {}
        self._longest_gap: dict[Keys, int] = {}  # iterations between two of a kind, where it was long
        self._prune_at = _LEAST_TO_PRUNE
        # Of iterations that are to be measured again: what their plan kept free for what had not been measured.
        self._kept_free: dict[Keys, int] = {}
        # Parameters that live on the device, in all plans alike, and those that keep a place there, in one.
        self.device_homes: tuple[int, ...] = ()
        self.places: dict[Keys, tuple[int, ...]] = {}
        self.early = False  # updates at home begin in backward
        # What each parameter would cost there, by index; empty: none can, or nothing has been measured.
        self.home_costs: Callable[[], dict[int, HomeCost]] = dict
        # Of the iteration under way, or of the one before.
        self.last: CyclePlan | None = None
        self.last_segments: list[Segment] = []
        self.last_sampled: list[Segment] = []  # an iteration that trains, if any was measured

    def __iter__(self) -> Iterator[CyclePlan]:
        return iter(self._plans.values())

    def __len__(self) -> int:
        """Kinds of iterations that have one."""
        return len(self._plans)

    def get(self, keys: Keys) -> CyclePlan | None:
        """That of iterations of exactly these segments."""
        return self._plans.get(keys)

    @property
    def shown(self) -> CyclePlan | None:
        """What is reported: `last`, or, after an evaluation, the latest plan of iterations that train."""
        if self.last is None or _trains(self.last.keys):
            return self.last
        return next((plan for plan in reversed(self._plans.values()) if _trains(plan.keys)), self.last)

    def is_verified(self, keys: Keys) -> bool:
        """Every segment has been measured while it followed the plan."""
        return keys in self._verified

    def is_unsure(self, plan: CyclePlan, begun: Keys) -> bool:
        """``plan``'s iterations are, or others that have ``begun`` alike, and may be what this one turns out to be."""
        awaited = self.outgrown.awaited()
        return self.outgrown.is_unsure(plan.keys) or any(_begin(keys, begun) for keys in awaited)

    def find(self, begun: Keys, coming: Keys | None) -> CyclePlan | None:
        """A plan whose iterations begin so: the one that is expected, else the one before, else the latest."""
        expected = None if coming is None else self._plans.get(coming)
        for candidate in (expected, self.last, *reversed(self._plans.values())):
            if candidate is not None and candidate.keys[: len(begun)] == begun:
                if candidate is not self.last and candidate.keys in self._plans:
                    self._plans[candidate.keys] = self._plans.pop(candidate.keys)  # the latest is the last
                self.last = candidate
                return candidate
        return None

    # -- learning -------------------------------------------------------------------------------------

    def learn(self, keys: Keys, segments: list[Segment]) -> bool:
        """An iteration is over: what it has shown of memory. True: it had more than its plan knew, which has been made
        of it now."""
        self.last_segments = segments
        self._iterations += 1
        self._trained += _trains(keys)
        self._note_came(keys)
        for other in self.outgrown.awaited():
            if other != keys and _begin(other, keys[:1]):
                self.outgrown.note_other(other)
        if len(self.samples) > self._prune_at:
            self._forget_samples(keys)
        if all(segment.sampled for segment in segments):
            if _trains(keys) or not _trains([segment.key for segment in self.last_sampled]):
                self.last_sampled = segments
            if keys in self._plans:
                self._verified.add(keys)
                if self.samples.take_longer(segments):
                    self.timings.forget(keys)
                    self._verified.discard(keys)
                    self._make_all({keys: self._plans[keys].margin})
                    self.outgrown.forget_seen(trains=_trains(keys))
                    return True
                if self.outgrown.is_unsure(keys) or self._have_passed(segments):
                    self._learn_growth(keys, segments)
                if keys not in self._looked_for_spikes:
                    self._looked_for_spikes.add(keys)
                    if self.samples.forget_spikes(segments, self.budget // _WORTH_FORGETTING):
                        self._plan_without_spikes(keys)
        if keys not in self._plans and self.samples.suffice(keys) and self._comes_again(keys):
            self._drop_some()
            self.samples.keep_longer(keys)
            self._make_all({keys: self.margin + self._kept_free.pop(keys, 0)}, thorough=False)
            self.last = self._plans[keys]
            if not self.last.knows_callers_part:
                self.outgrown.doubt(keys)
            self._hasty[keys] = _UNTIL_TIMED
            self.outgrown.forget_seen(trains=_trains(keys))
        else:
            self._make_if_outgrown(keys, segments)
        return False

    def _comes_again(self, keys: Keys) -> bool:
        """It is worth a plan: there are few kinds, or it has come before."""
        if len(self._plans) < _MANY or keys in self._seen_once or keys in self._kept_free:
            self._seen_once.pop(keys, None)
            return True
        self._seen_once[keys] = None
        if len(self._seen_once) > _MOST_SEEN:
            del self._seen_once[next(iter(self._seen_once))]
        return False

    def _drop_some(self) -> None:
        """Room for one more plan: those that were used longest ago go."""
        while len(self._plans) >= _MOST:
            self.drop(next(keys for keys, plan in self._plans.items() if plan is not self.last))

    def has_gone(self, plan: CyclePlan) -> bool:
        """No iteration of its kind has come for long, and for twice as long as ever before it came again; of those that
        train, while others were trained."""
        return self._gap(plan.keys) > max(_GONE_AFTER, 2 * self._longest_gap.get(plan.keys, 0))

    def drop_gone(self) -> bool:
        """Plans of kinds that have. True if there were any."""
        gone = [plan.keys for plan in self if self.has_gone(plan)]
        for keys in gone:
            self.drop(keys)
        return bool(gone)

    def _note_came(self, keys: Keys) -> None:
        if (gap := self._gap(keys)) > max(_GONE_AFTER, self._longest_gap.get(keys, 0)):
            self._longest_gap[keys] = gap
        self._came[keys] = self._now(keys)

    def _gap(self, keys: Keys) -> int:
        """Iterations since one of these came."""
        now = self._now(keys)
        return now - self._came.get(keys, now)

    def _now(self, keys: Keys) -> int:
        return self._trained if _trains(keys) else self._iterations

    def drop(self, keys: Keys) -> None:
        """The plan of these. If one comes again, it is made anew of what was measured."""
        if self._plans.pop(keys) is self.last:
            self.last = None
        self.places.pop(keys, None)
        self._forget(keys)

    def _forget_samples(self, now: Keys) -> None:
        """Those that no plan is made of, nor may soon be: of kinds that have come once, long ago."""
        kinds = (now, *self._plans, *self._seen_once, *self._kept_free)
        self.samples.keep_only({key for keys in kinds for key in keys})
        self._came = {keys: self._came[keys] for keys in kinds if keys in self._came}
        self._longest_gap = {keys: self._longest_gap[keys] for keys in kinds if keys in self._longest_gap}
        self._prune_at = max(_LEAST_TO_PRUNE, 2 * len(self.samples))

    def _forget(self, keys: Keys) -> None:
        """What was known of its plan, which is gone."""
        self._verified.discard(keys)
        self._looked_for_spikes.discard(keys)
        self._hasty.pop(keys, None)
        self.timings.forget(keys)

    def lacks_room(self, keys: Keys) -> bool:
        """What its plan keeps free all along, for what was not there when it was measured, leaves less than it needs:
        only measuring tells when in the iteration that is there."""
        plan = self._plans.get(keys)
        if plan is None or plan.margin == self.margin:
            return False
        return self.budget - plan.margin < self._planner.least(plan)

    def is_much(self, plan: CyclePlan, unused: int) -> bool:
        """So many bytes, which ``plan`` has kept free in vain, are worth measuring again: of what it keeps free for
        growth, half was seen, and is not unused where it comes again."""
        return unused - (plan.margin - self.margin) // SPARE >= self.budget // _WORTH_FORGETTING

    def measure_again(self, keys: Keys, *, for_good: bool, keeps_free: bool = True) -> None:
        """Iterations with these keys are no longer what they were: forget them. What the longest of these took may come
        again. ``for_good``: even if they turn out to be shorter. ``keeps_free``: as much as before for growth."""
        plan = self._plans.get(keys)
        if not keeps_free:
            self.outgrown.forget_kept(keys)
        if plan is not None:
            # What that left no room for will have been measured.
            more = 0 if self.lacks_room(keys) or not keeps_free else max(0, plan.margin - self.margin)
            self._kept_free[keys] = more
            del self._plans[keys]
        if plan is self.last:
            self.last = None
        self._forget(keys)
        self.samples.forget(keys, for_good=for_good)

    def note_settled(self, kind: ForwardKind, passed: int, *, model_bytes: int) -> None:
        """While nothing was intercepted and model data of ``model_bytes`` was on the device, the budget was passed by
        so many bytes, in an iteration with a forward of this kind."""
        for keys, plan in self._plans.items():
            if any(key.phase is Phase.FORWARD and kind_of(key) == kind for key in keys):
                # What comes after a forward without a backward had the rest of the room as well.
                unused = 0 if keys[-1].trains else plan.limits[-1] - model_bytes
                self.outgrown.note_elsewhere(keys, passed + max(0, unused))

    def _make_if_outgrown(self, keys: Keys, segments: list[Segment]) -> None:
        missed = any(segment.missed_fetches for segment in segments)
        plan = self._plans.get(keys)
        more = self.outgrown.keep_free(
            keys,
            trains=keys[0].trains,
            missed=missed,
            room=lambda: 0 if plan is None else self.budget - plan.margin - self._planner.least(plan),
        )
        margins = {
            other: self._plans[other].margin + nbytes
            for other, nbytes in self.outgrown.keep_free_elsewhere().items()
            if other in self._plans
        }
        has_news, has_larger = self.samples.take_news(), self.samples.take_larger()
        told = self.samples.take_told()
        if (more or has_news or has_larger) and plan is not None:
            # What a larger one has taken more was measured; and what was kept free for what has told of itself now.
            margin = margins.get(keys, plan.margin) + (0 if has_larger else more)
            margins[keys] = max(self.margin, margin - told)
            if told:
                self._add_alike(keys, margins)
        unplanned = self.samples.take_unplanned_gradients()
        for other, their_plan in self._plans.items():
            if not unplanned.isdisjoint(other):
                margins.setdefault(other, their_plan.margin)
        if margins:
            self._make_all(margins)

    def _have_passed(self, segments: list[Segment]) -> bool:
        """After a forward, where nobody makes room, there was more than the budget when it was measured again: for a
        while, perhaps, which what is held when a backward is called does not tell."""
        last = [segment.periods[-1] for segment in segments if segment.key.phase is Phase.FORWARD]
        return any(period.peak_bytes > self.budget for period in last)

    def _learn_growth(self, keys: Keys, segments: list[Segment]) -> None:
        """What was kept free meanwhile need not be, as far as it has been measured now, after a forward."""
        self.outgrown.note_measured(keys)
        grown = self.samples.add_again(segments)
        margins = {keys: max(self.margin, self._plans[keys].margin - grown)}
        self._add_alike(keys, margins)
        self._make_all(margins)
        if not self._plans[keys].knows_callers_part:  # what was measured was not comparable
            self.outgrown.doubt_again(keys)

    def _plan_without_spikes(self, keys: Keys) -> None:
        """Much of what its operators took the first time is not to come again. The next iteration tells."""
        self._verified.discard(keys)
        self.outgrown.doubt(keys)
        margins = {keys: self._plans[keys].margin}
        self._add_alike(keys, margins)
        self._make_all(margins, thorough=False)
        self._hasty[keys] = _UNTIL_TIMED

    def _add_alike(self, keys: Keys, margins: dict[Keys, int]) -> None:
        """With the plans of those that have forwards in common: an iteration may begin as they do, and then follows
        theirs until it is known for what it is."""
        forwards = {key for key in keys if key.phase is Phase.FORWARD}
        for other, plan in self._plans.items():
            if not forwards.isdisjoint(other):
                margins.setdefault(other, plan.margin)

    # -- what is asked --------------------------------------------------------------------------------

    def measured_limit(self, segment: Segment | None) -> int | None:
        """Model data allowed in a segment that was measured before; None if it was not."""
        peak = None if segment is None else self.samples.peak(segment.key)
        return None if peak is None else self.budget - self.margin - peak - self.others.now().total

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
        return None if self.last is None else self.last.forward_seconds

    def least_bytes(self) -> int:
        """`hetero.stm.neighbours.Neighbour.least_bytes`."""
        return self.margin + max(map(self._planner.least_with_homes, self._plans.values()), default=0)

    # -- making plans ---------------------------------------------------------------------------------

    def look_at_others(self) -> bool:
        """An iteration begins. True: more lives on the device of other managers, or less, and plans were made anew."""
        has_changed = self.others.look()
        if has_changed:
            self.remake_all()
        return has_changed

    def trim(self, budget: int) -> None:
        """Plan anew for ``budget`` bytes of the device, leaving the rest of the budget to others."""
        self.margin = self.budget - budget
        self._make_all({keys: self.margin for keys in self._plans}, thorough=False)

    def remake(self, keys: Keys) -> None:
        """With what is known now."""
        self._make_all({keys: self._plans[keys].margin})

    def remake_in_haste(self, keys: Keys) -> None:
        """With what is known now, quickly: `take_time` makes it anew, if nothing else has by then."""
        self._make_all({keys: self._plans[keys].margin}, in_haste=keys)
        self._hasty[keys] = 1

    def take_time(self, keys: Keys) -> None:
        """Such an iteration is over: a plan that was made in haste is made anew, if nothing else is to come first."""
        if keys in self._hasty:
            self._hasty[keys] -= 1
            if self._hasty[keys] <= 0:
                self.remake(keys)

    def remake_all(self) -> None:
        """With what is known now."""
        self._make_all(self._all_margins(), thorough=False)

    def set_homes(self, homes: tuple[int, ...], *, on_trial: Keys | None = None) -> None:
        """Let these live on the device. ``on_trial``: the iterations that have to become shorter by it."""
        if homes != self.device_homes:
            self.device_homes = homes
            for keys in self._plans:
                self.timings.note_moved(keys, on_trial=keys == on_trial)
            self.remake_all()

    def tried(
        self, keys: Keys, homes: tuple[int, ...], costs: dict[int, HomeCost], places: tuple[int, ...]
    ) -> tuple[Trace, Schedule]:
        """What a plan with these would be, where ``homes`` are among those that have ``costs``. Raises
        `CapacityError`."""
        made = self._make(keys, self._plans[keys].margin, homes, costs, places, thorough=False)
        return made.trace, replace(made.schedule, fetched_bytes=made.fetched_bytes)

    def _make_all(
        self, margins: dict[Keys, int], *, thorough: bool = True, in_haste: Keys | None = None
    ) -> None:
        """Make these plans, with as many of the device homes as fit in all of them. Without ``thorough`` only that of
        the iteration under way takes its time: training waits, and most of the others may never be followed again.
        That of ``in_haste`` does not in any case: it is about to be made once more. Where one lacks room for what has
        come to live on the device of other managers, some of that goes home, and all are made for what is left."""
        costs = self.home_costs() if self.device_homes else {}
        now = None if self.last is None else self.last.keys
        made, waiting = dict[Keys, CyclePlan](), dict(margins)

        def is_thorough(keys: Keys) -> bool:
            return keys != in_haste and (keys == now or (thorough and keys in margins))

        while waiting:
            keys = next(iter(waiting))
            try:
                places = self.places.get(keys, ())
                made[keys] = self._make(
                    keys, waiting[keys], self.device_homes, costs, places, thorough=is_thorough(keys)
                )
                short = self._planner.lacks(made[keys])
                if short > 0 and self.others.make_room(short):
                    waiting = self._all_margins() | margins
                    continue
                del waiting[keys]
            except CapacityError as error:
                if self.places.pop(keys, ()):
                    continue
                if not self.device_homes:
                    raise
                self.device_homes = _without(self.device_homes, costs, error.needed - error.capacity)
                waiting = self._all_margins() | margins
        self._plans.update(made)
        for keys in made:
            if is_thorough(keys):
                self._hasty.pop(keys, None)
            else:
                self._hasty.setdefault(keys, 1)
        if self.last is not None:
            self.last = self._plans.get(self.last.keys)

    def _all_margins(self) -> dict[Keys, int]:
        return {keys: plan.margin for keys, plan in self._plans.items()}

    def _make(
        self,
        keys: Keys,
        margin: int,
        homes: tuple[int, ...],
        costs: dict[int, HomeCost],
        places: tuple[int, ...],
        *,
        thorough: bool,
    ) -> CyclePlan:
        return self._planner.make(
            keys, self.samples, margin, homes, costs, places=places, early=self.early, thorough=thorough
        )


def _without(homes: tuple[int, ...], costs: dict[int, HomeCost], nbytes: int) -> tuple[int, ...]:
    """Those of ``homes`` that have a cost, but for the last ones: of so many bytes, and one in `_PORTIONS` at least."""
    kept = [index for index in homes if index in costs]
    most, freed = len(homes) - max(1, len(homes) // _PORTIONS), 0
    while kept and (freed < nbytes or len(kept) > most):
        freed += costs[kept.pop()].nbytes
    return tuple(kept)


def _begin(keys: Any, begun: Keys) -> bool:
    return bool(keys[: len(begun)] == begun)


def _trains(keys: Sequence[SegmentKey]) -> bool:
    return any(key.phase is not Phase.FORWARD for key in keys)
