"""Making a plan of what was measured.

Owns the arithmetic of a `hetero.stm.plans.plan.CyclePlan`: what each moment leaves to model data
(`hetero.stm.plans.rows`: moment by moment), what lives on the device, what is kept free for gradients on their way.
Which samples count, and when a plan is made, is decided in `hetero.stm.plans.planbook`; the schedule is
`hetero.eviction`'s.
"""

import sys
from collections.abc import Callable, Mapping, Sequence

from hetero.devices import LARGEST_WITHOUT_EXCESS, MOST_EXCESS
from hetero.eviction import (
    CapacityError,
    HomeCost,
    Links,
    OnTheirWay,
    Policy,
    Schedule,
    Trace,
    Updates,
    gradient_reserves,
    leave_link_free,
    on_their_way,
    plan_iteration,
)
from hetero.msc import Phase, Segment
from hetero.stm.plans.lives import Lives, read_lives
from hetero.stm.plans.othershomes import OthersHomes
from hetero.stm.plans.plan import CyclePlan, by_first_use
from hetero.stm.plans.rows import (
    Rows,
    copies_of_others,
    freed_once_made,
    home_gradients,
    mandatory_in,
    non_model_peak,
    sends_to_come,
)
from hetero.stm.plans.samples import Samples
from hetero.stm.plans.timings import Keys, Timing, Timings
from hetero.stm.tensors.managed import ManagedTensor

__all__ = ["PlanMaker"]

# Where blocks are large enough to have any, though none was seen: with less, the first iterations after the warm-up,
# which leaves more memory free, were seen to pass budgets.
_EXPECTED_EXCESS = 2 * MOST_EXCESS


class PlanMaker:
    """Makes plans for one manager's parameters under its budget. ``fixed_bytes``: of buffers on the device;
    ``host_room``: bytes that saved tensors may take at home; ``others``: what lives on the device of other managers';
    ``has_excess``: blocks of the device's allocator may be larger than what was asked for."""

    def __init__(
        self,
        tensors: Sequence[ManagedTensor],
        *,
        budget: int,
        links: Links,
        policy: Policy,
        prefetch: bool,
        fixed_bytes: Callable[[], int],
        host_room: Callable[[], int],
        others: OthersHomes | None = None,
        has_excess: bool = False,
    ) -> None:
        self._tensors = tensors
        self.budget = budget
        self.timings = Timings(links)
        self._policy = policy
        self._prefetch = prefetch
        self._fixed_bytes = fixed_bytes
        self._host_room = host_room
        self.others = OthersHomes() if others is None else others
        self._has_excess = has_excess

    def make(
        self,
        keys: Keys,
        samples: Samples,
        margin: int,
        homes: tuple[int, ...],
        costs: Mapping[int, HomeCost],
        *,
        places: tuple[int, ...] = (),
        early: bool = False,
        thorough: bool = True,
    ) -> CyclePlan:
        """The plan for iterations of these segments, as sampled, with ``homes`` living on the device at ``costs``.

        ``places``: see `CyclePlan`. ``early``: updates begin in backward. ``thorough``: as in `plan_iteration`. Raises
        `CapacityError` if they leave too little to the others; without homes and places it does not.
        """
        at_home = frozenset(range(len(self._tensors))).difference(homes)
        lives = read_lives([samples[key] for key in keys], len(self._tensors))
        sizes = (*(t.device_nbytes if t.index in at_home else 0 for t in self._tensors), *lives.sizes)
        home_bytes, step_bytes = self._home_bytes(homes, costs, keys, samples)
        timing = self._timing(keys, samples)
        places = tuple(x for x in places if x in at_home and timing is not None)
        elsewhere = frozenset((*homes, *places))
        beside = self._fixed_bytes() + sum(sizes[x] for x in places)
        placed = [beside + nbytes for nbytes in home_bytes]
        excess = self._excess(samples, sizes)
        copies = self._copies_of_others(keys, samples)
        others = [
            self.others.nbytes.total - nbytes
            for nbytes in self._copies_of_others(keys, samples, most=self.others.nbytes.parameters)
        ]
        spare = self._spare_bytes(keys, samples, margin + excess, others, placed, sizes, lives, elsewhere)
        gradients = self._gradient_reserves(keys, samples, at_home, timing, spare)
        phases = [key.phase for key in keys for _ in samples[key][-1].periods]
        steps = [step_bytes if phase is Phase.STEP else 0 for phase in phases]
        rows = Rows(
            room=self.budget - margin - excess,
            others=others,
            others_states=self.others.nbytes.states,
            placed=[
                there + way.begin + step for there, way, step in zip(placed, gradients, steps, strict=True)
            ],
            sending=gradients,
            at_home=at_home,
            elsewhere=elsewhere,
            places=places,
        )
        for number, key in enumerate(keys):
            rows.add_segment(samples[key], lives, sizes, None if timing is None else timing.periods[number])
        trace = Trace(
            sizes=sizes,
            moments=tuple(rows.moments),
            sending_bytes=max(way.most for way in gradients),
            updates=None
            if timing is None
            else self._updates(timing, keys, rows.bounds, rows.operands, homes, places, early=early),
        )
        schedule = self._schedule(trace, keys, samples, thorough=thorough)
        return CyclePlan(
            keys=keys,
            bounds=tuple(rows.bounds),
            operands=tuple(rows.operands),
            undisturbed=self._undisturbed(rows, schedule),
            others_gave=tuple(rows.others_gave),
            others_away=tuple(rows.others_away),
            others_away_at_peak=tuple(rows.others_away_at_peak),
            limits=tuple(rows.limits),
            non_model=tuple(rows.non_model),
            margin=margin,
            excess=excess,
            gradient_reserves=tuple(gradients),
            trace=trace,
            schedule=schedule,
            places=places,
            device_homes=homes,
            home_bytes=tuple(home_bytes),
            whole_gradients=tuple(self._whole_gradients(keys, samples)),
            first_saved=lives.first_saved,
            guarded=tuple(rows.guarded),
            has_others_within=any(segment.others_ran for key in keys for segment in samples[key]),
            by_values=any(segment.by_values for key in keys for segment in samples[key]),
            left=tuple(
                _left(samples[key], others[end - 1]) for key, end in zip(keys, rows.bounds[1:], strict=True)
            ),
            others=tuple(others),
            others_more=tuple(rows.others_more),
            others_copies=tuple(copies),
            others_home_bytes=self.others.nbytes.total,
        )

    def _excess(self, samples: Samples, sizes: Sequence[int]) -> int:
        """What to keep free because the allocator's blocks may be larger than what is asked for."""
        # It is not looked at within a period: one block more may be as much too large as any.
        seen = samples.excess + MOST_EXCESS if samples.excess else 0
        if self._has_excess and max(sizes, default=0) > LARGEST_WITHOUT_EXCESS:
            return max(seen, _EXPECTED_EXCESS)
        return seen

    def _schedule(self, trace: Trace, keys: Keys, samples: Samples, *, thorough: bool) -> Schedule:
        links = self.timings.links(keys)
        schedule = plan_iteration(
            trace,
            links=links,
            policy=self._policy,
            prefetch=self._prefetch,
            host_room=self._host_room(),
            thorough=thorough,
        )
        if keys[-1].phase is not Phase.STEP:
            return schedule
        # As it was before any plan, too: a later one may have been waiting for what had been ordered.
        idle = min(trace.moments[-1].seconds, samples[keys[-1]][-1].periods[-1].seconds)
        return leave_link_free(trace, schedule, links, seconds=idle)

    def _undisturbed(self, rows: Rows, schedule: Schedule) -> tuple[list[ManagedTensor] | None, ...]:
        """The operands of moments at which nothing is to be done."""
        return tuple(
            None if gave or actions.evict or actions.fetch else [self._tensors[x] for x in indices]
            for indices, gave, actions in zip(rows.operands, rows.others_gave, schedule.actions, strict=True)
        )

    def _timing(self, keys: Keys, samples: Samples) -> Timing | None:
        """Times of iterations that followed a plan, if they had the periods that were measured."""
        timing = self.timings.get(keys)
        counts = [len(samples[key][-1].periods) for key in keys]
        return timing if timing and [len(periods) for periods in timing.periods] == counts else None

    def _updates(
        self,
        timing: Timing,
        keys: Keys,
        bounds: Sequence[int],
        operands: Sequence[tuple[int, ...]],
        homes: tuple[int, ...],
        places: tuple[int, ...],
        *,
        early: bool,
    ) -> Updates | None:
        """What the host does later, in the order of first use."""
        steps = [number for number, key in enumerate(keys) if key.phase is Phase.STEP]
        if not steps:
            return None
        ranks = by_first_use(operands)
        queued = {index for index in timing.queued if index not in homes}
        order = sorted(queued, key=lambda index: (ranks.get(index, len(ranks)), index))
        nbytes = [self._tensors[index].home.nbytes for index in order]
        return Updates(
            tensors=tuple(order),
            seconds=tuple(size * timing.host_seconds for size in nbytes),
            queued=bounds[steps[-1] + 1] - 1,
            finished=bounds[steps[-1]],
            early=early,
            copies=tuple(size * timing.copy_seconds for size in nbytes) if early else (),
            places=places,
        )

    def least(self, plan: CyclePlan) -> int:
        """What the plan's moments need with no copy but the operands'."""
        return max(self._least_at(plan, position) for position in range(len(plan.operands)))

    def _least_at(self, plan: CyclePlan, position: int, homes: frozenset[int] = frozenset()) -> int:
        """Of a moment, without those of its operands that are among ``homes``."""
        parameters, moment = len(self._tensors), plan.trace.moments[position]
        operands = (self._tensors[index] for index in plan.operands[position] if index not in homes)
        return (
            self._beside(plan, position)
            + sum(tensor.device_nbytes for tensor in operands)
            + sum(plan.trace.sizes[index] for index in moment.operands if index >= parameters)
        )

    def lacks(self, plan: CyclePlan) -> int:
        """Bytes by which the plan's moments pass the budget, with no copy but the operands', for what has come to live
        on the device of other managers since they were measured. What passed it then, a guard sees to."""
        room = self.budget - plan.margin
        return max(
            (
                min(more, self._least_at(plan, position) - room)
                for position, more in enumerate(plan.others_more)
                if more > 0
            ),
            default=0,
        )

    def least_with_homes(self, plan: CyclePlan) -> int:
        """As `least`, beside what lives on the device of ours, without what does of others', or could."""
        homes = frozenset(plan.device_homes)
        return max(
            self._least_at(plan, position, homes)
            + plan.home_bytes[position]
            - plan.others[position]
            - plan.others_copies[position]
            for position in range(len(plan.operands))
        )

    def planned(self, plan: CyclePlan) -> int:
        """What the plan's moments need with the copies that it keeps and fetches ahead."""
        sizes, resident, most = plan.trace.sizes, set(plan.schedule.start), 0
        places = sum(sizes[x] for x in plan.places)
        for position, (moment, actions) in enumerate(
            zip(plan.trace.moments, plan.schedule.actions, strict=True)
        ):
            resident.difference_update(actions.evict)
            resident.update(actions.fetch, moment.operands)
            placed = self._beside(plan, position) + plan.home_bytes[position] + places
            gradients = plan.gradient_reserves[position].begin
            most = max(most, placed + gradients + sum(sizes[index] for index in resident))
            resident.difference_update(moment.invalidates)
        return most

    def _beside(self, plan: CyclePlan, position: int) -> int:
        """Bytes of a moment that are no parameters: what operators allocate, and buffers."""
        return self.budget - plan.margin - plan.limits[position] + self._fixed_bytes()

    def _home_bytes(
        self,
        homes: tuple[int, ...],
        costs: Mapping[int, HomeCost],
        keys: Keys,
        samples: Samples,
    ) -> tuple[list[int], int]:
        """What ``homes`` take in each period, and the most that the update of one of them takes more."""
        known = {index: costs[index] for index in homes if index in costs}
        if len(known) < len(homes):  # states gone, the optimizer changed: as if they took more than there is
            raise CapacityError(moment=0, needed=self.budget + 1, capacity=self.budget)
        always = sum(cost.nbytes - cost.gradient_nbytes for cost in known.values())
        gradients = self._home_gradients(
            keys, samples, {index: cost.gradient_nbytes for index, cost in known.items()}
        )
        most = max((cost.step_nbytes for cost in known.values()), default=0)
        return [always + nbytes for nbytes in gradients], most

    def _copies_of_others(self, keys: Keys, samples: Samples, *, most: int = sys.maxsize) -> list[int]:
        """`copies_of_others` of each period."""
        periods = ((samples[key], index) for key in keys for index in range(len(samples[key][-1].periods)))
        return [copies_of_others(measured, index, most=most) for measured, index in periods]

    def _whole_gradients(self, keys: Keys, samples: Samples) -> list[int]:
        trained = {t.index: t.full_nbytes for t in self._tensors if t.parameter.requires_grad}
        return self._home_gradients(keys, samples, trained)

    def _home_gradients(self, keys: Keys, samples: Samples, sizes: Mapping[int, int]) -> list[int]:
        return home_gradients(
            [samples[key] for key in keys],
            sizes,
            are_there=[samples.begins_with_gradients(key) for key in keys],
            cast={tensor.index for tensor in self._tensors if tensor.low is not None},
        )

    def _gradient_reserves(
        self,
        keys: Keys,
        samples: Samples,
        at_home: frozenset[int],
        timing: Timing | None,
        spare: Sequence[int],
    ) -> list[OnTheirWay]:
        """For each moment, what may be on its way down. ``timing`` knows how much there is at once."""
        trained = [t for t in self._tensors if t.parameter.requires_grad and t.index in at_home]
        largest = max((t.device_nbytes for t in trained), default=0)
        come, ways, freed = list[bool](), list[OnTheirWay](), list[int]()
        for number, key in enumerate(keys):
            count = len(samples[key][-1].periods)
            come += sends_to_come(samples[key][-1], at_home)
            freed += [freed_once_made(samples[key], index, at_home) for index in range(count)]
            if key.phase is not Phase.BACKWARD:
                ways += [OnTheirWay(0, 0)] * count
            elif timing is None:
                ways += [OnTheirWay(2 * largest, 2 * largest)] * count
            else:
                ways += on_their_way(timing.periods[number], timing.links, at_home, most=2 * largest)
        return gradient_reserves(largest, come=come, ways=ways, freed=freed, spare=spare)

    def _spare_bytes(
        self,
        keys: Keys,
        samples: Samples,
        margin: int,
        others: Sequence[int],
        placed: Sequence[int],
        sizes: tuple[int, ...],
        lives: Lives,
        elsewhere: frozenset[int],
    ) -> list[int]:
        """What each operator leaves beside its operands: with less, gradients on their way would pass the budget."""
        spare: list[int] = []
        for key in keys:
            measured = samples[key]
            for index, period in enumerate(measured[-1].periods):
                now = len(spare)
                mandatory = mandatory_in(period, lives, now)
                beside = placed[now] + others[now] + non_model_peak(measured, index) + lives.unseen[now]
                needed = beside + sum(sizes[x] for x in mandatory if x not in elsewhere)
                spare.append(self.budget - margin - needed)
        return spare


def _left(samples: Sequence[Segment], others_bytes: int) -> int | None:
    """`CyclePlan.left` of a forward, with so much of others beside what was measured."""
    return max((s.left_bytes + others_bytes for s in samples if s.left_bytes is not None), default=None)
