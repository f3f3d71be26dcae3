"""Which parameters live on the device, and which others keep a place there.

Owns when this is chosen (once times were measured under a plan that is to stay), and taken back: what moved on trial
and has saved no time, what memory ran short with. How a choice is made is `hetero.eviction.placement`'s, who moves is
`hetero.stm.step.devicehomes`. All plans have the same parameters on the device; places are one plan's own.

[Note: what choosing may take]
A choice plans an iteration some dozens of times, while training waits. The first is made at once; one more, after
something has changed, as soon as all of them have taken no more than a share of the time so far; those for further
kinds of iterations (batches of many lengths, evaluations), a much smaller one. Until then, their plans have what lives
on the device for the others.

[Note: after a loss]
Often a few bytes were wanting: of losses, say, that the loop keeps. So a 16th of what lived there stays away, and twice
as much with each further loss, so that there are few; no less than twice what had to leave, which may grow on; and no
more than half. It may also have been for a while: a larger evaluation, a copy of the model. So after some iterations
that train, without a loss, all may be tried again, and, where that was in vain, after twice as many. It is the same
with those that could not be stepped there, because somebody held them.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from hetero.eviction import HomeCost, choose_placement, choose_places
from hetero.msc import Phase, Segment
from hetero.stm.plans.plan import CyclePlan
from hetero.stm.plans.planbook import PlanBook
from hetero.stm.plans.timings import Keys
from hetero.stm.tensors.managed import ManagedTensor

__all__ = ["HomeChoice"]

_UNTIL_TRIED_AGAIN = 32  # iterations after a loss ([Note: after a loss])
_SHARE_OF_TIME, _SHARE_OF_FURTHER = 0.25, 0.02  # [Note: what choosing may take]


class HomeChoice:
    """For the plans of one manager."""

    def __init__(self, tensors: Sequence[ManagedTensor], book: PlanBook) -> None:
        self._tensors = tensors
        self._book = book
        self._most_bytes = book.budget  # that they may take: memory ran short with more
        # That left because memory ran short, in the iteration that runs; and that lived there as it did.
        self._lost_bytes = self._bytes_before = 0
        self._has_refused = False
        self._failures = _Failures()
        self._chosen: set[Keys] = set()
        self._wanted = 0  # parameters there, by the kind of iterations that was chosen for first
        self._began, self._spent = time.monotonic(), 0.0  # seconds
        # What was chosen last is all, because everything fits. Plain: each step asks.
        self.has_all = False
        # Sends those with these indices home; `hetero.stm.step.devicehomes` sets this.
        self.send_home: Callable[[frozenset[int]], None] = lambda indices: None
        # Costs of those that could not be stepped there are named again; `hetero.stm.step.devicehomes` sets this.
        self.forget_refusals: Callable[[], None] = lambda: None
        # Updates at home begin in backward; `hetero.stm.step.speculation` sets this.
        self.updates_early: Callable[[], bool] = lambda: False
        # `hetero.stm.sharing.Sharing.room_beside_others`; `hetero.stm.manager` sets this.
        self.room_beside_others: Callable[[], int] = lambda: book.budget
        # All model data could be on the device at once (`hetero.stm.settled`).
        self.everything_fits: Callable[[], bool] = lambda: False

    def lose(self, nbytes: int) -> None:
        """Memory ran short, and of what lived on the device so many bytes had to leave: less from now on
        ([Note: after a loss])."""
        self._lost_bytes += nbytes
        last = self._book.last
        if last is not None:  # what is learned of this iteration makes plans anew, with fewer
            self._bytes_before = max(self._bytes_before, *last.home_bytes)

    def forget_loss(self) -> None:
        """The iteration in which memory ran short was left by an exception: what it asked for, nothing had room for."""
        self._lost_bytes = self._bytes_before = 0

    def follow_plans(self, there: Iterable[int]) -> None:
        """They are new: what lives ``there``, on the device, and has no room in them any more goes home at once."""
        if gone := frozenset(there).difference(self._book.device_homes):
            self.send_home(gone)

    def refuse(self) -> None:
        """Some of them cannot be stepped there, as it has turned out: their costs are not named for a while."""
        self._has_refused = True

    def choose_again(self) -> None:
        """For all kinds of iterations."""
        self._chosen.clear()

    def note_more_states(self) -> None:
        """Parameters were stepped for the first time. Where everything fits they are to live on the device as well."""
        if self.has_all:
            self.choose_again()

    def choose_again_for(self, keys: Keys) -> None:
        """Iterations of these segments are no longer what they were."""
        self._chosen.discard(keys)

    def learn(self, keys: Keys, segments: Sequence[Segment]) -> None:
        """An iteration is over, and the book has learned of it: its times, and what follows from them."""
        book = self._book
        if self._lost_bytes or self._has_refused:
            self._failures.note()
            if self._lost_bytes:
                self._most_bytes = self._fewer(self._bytes_before)
            self._lost_bytes = self._bytes_before = 0
            self._has_refused = self.has_all = False
            self._keep()
            return
        # Of evaluations there may be many between two steps, which tell what can be stepped there.
        trains = any(key.trains for key in keys)
        if trains and self._failures.may_try_again(is_trying=bool(self._chosen)):
            self._most_bytes = book.budget
            self.forget_refusals()
            self.choose_again()
        if book.samples.take_less() or (len(book.device_homes) < self._wanted and book.drop_gone()):
            self.choose_again()
        if not book.is_verified(keys):
            return
        if book.timings.learn(keys, segments):
            if book.timings.was_in_vain(keys):
                book.places[keys] = self._choose_places(keys)
                book.set_homes(())
            elif book.timings.is_final(keys):
                book.remake_in_haste(keys)  # what is chosen below has another plan
            else:
                book.remake(keys)  # under which times are taken that are to be final
        if self.updates_early() is not book.early:
            book.early = not book.early
            self._chosen.clear()
            self._spent = 0.0  # this changes too much to wait
            if any(book.places.values()):  # they have lost what they were for
                book.places.clear()
                book.remake_all()
        if keys not in self._chosen:
            self._choose(keys)

    def _fewer(self, there: int) -> int:
        """Of so many bytes that lived on the device, what may from now on ([Note: after a loss])."""
        portion = (there << min(self._failures.times, 4)) // 32
        return there - min(max(portion, 2 * self._lost_bytes), there // 2)

    def _choose(self, keys: Keys) -> None:
        book = self._book
        plan = book.get(keys)
        written = self._written_between(keys)
        costs = {index: cost for index, cost in book.home_costs().items() if index not in written}
        if plan is None or not (costs or book.early):
            return
        if not costs and book.device_homes:  # their states have gone: until a step has made them anew
            return
        order = sorted(plan.first_uses, key=plan.first_uses.__getitem__)
        room = self._room(costs)
        has_room = self._most_bytes >= book.budget and sum(cost.nbytes for cost in costs.values()) <= room
        if costs and has_room and self.everything_fits():
            self._chosen.add(keys)
            self.has_all = True
            # Those of other kinds of iterations as well: another head, a layer that this one has left out.
            others = [index for index in costs if index not in plan.first_uses]
            self._wanted = len(costs)
            book.set_homes(tuple(index for index in (*order, *others) if index in costs))
            return
        self.has_all = False
        if not book.timings.is_final(keys):
            return
        begin = time.monotonic()
        self._chosen = {those for those in self._chosen if book.get(those) is not None}
        share = _SHARE_OF_FURTHER if self._chosen else _SHARE_OF_TIME
        if self._spent > share * (begin - self._began):
            return
        if self._chosen:
            # Each kind of iteration has its own best number; all of them have to live with the least.
            costs = {index: cost for index, cost in costs.items() if index in book.device_homes}
        self._chosen.add(keys)
        best = choose_placement(
            order,
            costs,
            [tensor.device_nbytes for tensor in self._tensors],
            may_stay=self._may_stay(plan),
            most_bytes=min(self._most_bytes, book.budget - plan.margin, room),
            links=book.timings.links(keys),
            plan=lambda homes, places: book.tried(keys, homes, costs, places),
        )
        chosen = best.home.homes
        if len(self._chosen) == 1:
            self._wanted = len(chosen)
        book.places[keys] = best.places
        early = plan.trace.updates is not None and plan.trace.updates.early is not book.early
        if chosen == book.device_homes and (early or plan.places != book.places[keys]):
            book.remake(keys)
        book.set_homes(chosen, on_trial=keys if best.home.moves_more and not book.device_homes else None)
        self._spent += time.monotonic() - begin

    def _room(self, costs: Mapping[int, HomeCost]) -> int:
        """What other managers leave to parameters at these costs, which are with gradients. Where no iterations of
        theirs are within ours, our gradients are not there at the same time as what theirs take, and all of it is for
        the rest: so much more, as if each gradient were the same share of its parameter's cost."""
        room = self.room_beside_others()
        if any(plan.has_others_within for plan in self._book):
            return room
        whole = sum(cost.nbytes for cost in costs.values())
        without = whole - sum(cost.gradient_nbytes for cost in costs.values())
        return room * whole // max(1, without)

    def _choose_places(self, keys: Keys) -> tuple[int, ...]:
        """Which parameters keep a place on the device where none lives there."""
        plan = self._book.get(keys)
        if plan is None or not (order := self._may_stay(plan)):
            return ()
        return choose_places(order, lambda places: self._book.tried(keys, (), {}, places))

    def _may_stay(self, plan: CyclePlan) -> tuple[int, ...]:
        """Those that may keep a place, by first use."""
        updates = plan.trace.updates
        if not self._book.early or updates is None:
            return ()
        return tuple(index for index in updates.tensors if index in plan.first_uses)

    def _written_between(self, keys: Keys) -> set[int]:
        """Parameters that the caller writes at home in such an iteration, besides the step: on the device they would go
        home for that, and come back."""
        forwards = (key for key in keys if key.phase is Phase.FORWARD)
        samples = self._book.samples
        periods = (period for key in forwards for s in samples.present(key)[-1:] for period in s.periods)
        return {index for period in periods for index in period.invalidates}

    def _keep(self) -> None:
        """Those that still can live on the device, as many as may."""
        costs, kept, taken = self._book.home_costs(), [], 0
        for index in self._book.device_homes:
            if index in costs and taken + costs[index].nbytes <= self._most_bytes:
                taken += costs[index].nbytes
                kept.append(index)
        self._book.set_homes(tuple(kept))


class _Failures:
    """[Note: after a loss].

    Attributes:
        times: how many there were since all was tried last with success, or ever.
    """

    def __init__(self) -> None:
        self.times = 0
        self._wait, self._left = _UNTIL_TRIED_AGAIN, 0  # iterations
        self._since = math.inf  # iterations that all has been tried for again

    def note(self) -> None:
        """One more."""
        if self._left == 0:
            was_in_vain = self._since <= self._wait
            self._wait = 2 * self._wait if was_in_vain else _UNTIL_TRIED_AGAIN
            self.times = self.times if was_in_vain else 0
        self.times += 1
        self._left = self._wait

    def may_try_again(self, *, is_trying: bool) -> bool:
        """An iteration without any is over: whether all may be tried from the next one on, after it had to wait.
        ``is_trying``: it has been chosen for this one what lives there, which may have to wait for its time."""
        if self._left == 0:
            self._since += is_trying
            return False
        self._left -= 1
        if self._left == 0:
            self._since = 0
        return self._left == 0
