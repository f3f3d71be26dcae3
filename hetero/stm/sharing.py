"""What one manager does for others on its device, and they for it (`hetero.stm.neighbours` says who they are)."""

import contextlib
import threading
from collections.abc import Iterator, Sequence

import torch

from hetero.msc import MemStatsCollector
from hetero.stm import neighbours
from hetero.stm.activations.offload import Activations
from hetero.stm.gradients.offload import Gradients
from hetero.stm.neighbours import HomeBytes, Neighbour
from hetero.stm.plans.cycles import Cycles
from hetero.stm.plans.planbook import PlanBook
from hetero.stm.running.relief import Relief
from hetero.stm.standing import Standing
from hetero.stm.tensors.managed import ManagedTensor
from hetero.stm.tensors.state import Kind, Ledger, Tier

__all__ = ["Sharing"]


class Sharing:
    """Of one manager (`hetero.stm.neighbours.Neighbour`), of which none waits for another's lock."""

    def __init__(
        self,
        standing: Standing,
        collector: MemStatsCollector,
        tensors: Sequence[ManagedTensor],
        ledger: Ledger,
        gradients: Gradients,
        activations: Activations,
        *,
        lock: threading.RLock,
        device: torch.device,
    ) -> None:
        self.device = device
        self._standing = standing
        self._collector = collector
        self._tensors = tensors
        self._ledger = ledger
        self._gradients = gradients
        self._activations = activations
        self._lock = lock
        self._parameter_bytes = 0, 0  # of how many
        self._begun: dict[int, int] = {}  # others' segments when the iteration began, by id

    def join(self, relief: Relief, plans: PlanBook, cycles: Cycles) -> None:
        """From now on others may ask; ``relief`` lets go of what they get, and ``plans`` tell what has to stay."""
        self._relief = relief
        self._plans = plans
        self._cycles = cycles
        neighbours.join(self)

    # -- what others ask ------------------------------------------------------------------------------------

    @property
    def is_closed(self) -> bool:
        """It manages nothing any more."""
        return self._standing.is_closed

    @property
    def segments(self) -> int:
        """`hetero.stm.neighbours.Neighbour.segments`."""
        return self._collector.segments

    def give(self, nbytes: int, *, urgent: bool, spares_settled: bool) -> int:
        """`hetero.stm.neighbours.Neighbour.give`."""
        if not self._lock.acquire(blocking=False):
            return 0
        try:
            if self._standing.is_closed or self._standing.is_in_child:
                return 0
            settled = self._standing.settled
            makes_way = urgent and not spares_settled
            if settled is not None and settled.is_on and not (makes_way and settled.make_way()):
                return 0
            return self._relief.give(nbytes, urgent=urgent)
        finally:
            self._lock.release()

    def make_room(self, nbytes: int) -> bool:
        """Let as much leave as keeps the budget with so many bytes more; False if that is not enough."""
        if not self._lock.acquire(blocking=False):
            return True  # as far as anybody knows
        try:
            standing = self._standing
            is_ours = not (standing.is_closed or standing.is_in_child or standing.is_settled)
            return not is_ours or self._relief.make_room(nbytes)
        finally:
            self._lock.release()

    def away_bytes(self) -> int:
        """`hetero.stm.neighbours.Neighbour.away_bytes`. Asked at each of another's sampling moments: it only looks at
        what is counted anyway."""
        standing = self._standing
        if standing.is_closed or standing.is_in_child or standing.is_settled:
            return 0
        if self._parameter_bytes[0] != len(self._tensors):
            self._parameter_bytes = len(self._tensors), sum(tensor.device_nbytes for tensor in self._tensors)
        whole = self._parameter_bytes[1] + self._gradients.whole_bytes + self._activations.whole_bytes
        kinds = Kind.PARAMETER, Kind.GRADIENT, Kind.ACTIVATION
        return whole - sum(self._ledger.nbytes(Tier.DEVICE, kind) for kind in kinds)

    def home_bytes(self) -> HomeBytes:
        """`hetero.stm.neighbours.Neighbour.home_bytes`."""
        if self._standing.is_closed:
            return HomeBytes(0, 0)
        nbytes = self._ledger.nbytes
        there = nbytes(Tier.DEVICE, Kind.PARAMETER)
        settled = self._standing.settled
        if settled is None or not settled.is_on:
            there = self._relief.living_bytes
        elif settled.optimizer is None:  # it may come and go at each forward
            return HomeBytes(0, 0)
        return HomeBytes(there, nbytes(Tier.DEVICE, Kind.OPTIMIZER_STATE))

    def copy_bytes(self) -> int:
        """`hetero.stm.neighbours.Neighbour.copy_bytes`."""
        if self._standing.is_closed:
            return 0
        return self._ledger.nbytes(Tier.DEVICE, Kind.PARAMETER) - self.home_bytes().parameters

    def least_bytes(self) -> int:
        """`hetero.stm.neighbours.Neighbour.least_bytes`."""
        return 0 if self._standing.is_closed else self._plans.least_bytes()

    def send_home(self, nbytes: int) -> None:
        """`hetero.stm.neighbours.Neighbour.send_home`."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            standing = self._standing
            if not (standing.is_closed or standing.is_in_child or standing.is_settled):
                self._relief.send_home(nbytes)
        finally:
            self._lock.release()

    def while_others_move(self) -> contextlib.AbstractContextManager[None]:
        """`hetero.stm.neighbours.Neighbour.while_others_move`."""
        return self._collector.homes_changing()

    @property
    def thread(self) -> int:
        """`hetero.stm.neighbours.Neighbour.thread`."""
        return self._standing.thread

    def is_amid(self) -> bool:
        """`hetero.stm.neighbours.Neighbour.is_amid`."""
        settled = self._standing.settled
        if self._cycles.awaits_backward:
            return self._activations.has_records  # or its graph has gone
        return settled is not None and settled.is_amid_unseen()

    def note_together(self) -> None:
        """`hetero.stm.neighbours.Neighbour.note_together`."""
        self._cycles.note_together()

    def note_relieved_by_others(self) -> None:
        """Another has made room for the operator that runs now, which may be one of this one's."""
        self._collector.note_relieved_by_others()

    # -- what others are asked ------------------------------------------------------------------------------

    def ask(self, nbytes: int, urgent: bool, *, spares_settled: bool = False) -> int:
        """For so many bytes (`hetero.stm.neighbours.ask`); returns how many they have given."""
        given = neighbours.ask(self, nbytes, urgent=urgent, spares_settled=spares_settled)
        if given:
            self._collector.note_given()
        return given

    def begin_iteration(self) -> None:
        """One of ours does."""
        self._begun = {id(other): other.segments for other in neighbours.others(self)}

    def segments_of_others(self) -> int:
        """How many of others' have begun."""
        return sum(other.segments for other in neighbours.others(self))

    def have_run_within(self) -> bool:
        """Others have, since our iteration began."""
        return any(True for _ in self._active())

    def are_beside(self, *, is_first: bool) -> bool:
        """`hetero.stm.plans.cycles.Others.are_beside`."""
        return any(True for _ in self._beside(is_first=is_first))

    def tell_together(self, *, is_first: bool) -> None:
        """`hetero.stm.plans.cycles.Others.tell_together`."""
        for other in self._beside(is_first=is_first):
            other.note_together()

    def away_from_others(self, *, active: bool = False) -> int:
        """What others have that is not on the device; ``active``: those that have run since our iteration began."""
        return sum(other.away_bytes() for other in (self._active() if active else neighbours.others(self)))

    def away_or_living(self) -> int:
        """`hetero.msc.collector.Others.away_or_living`."""
        return self.away_from_others() + self.homes_of_others().parameters

    def homes_of_others(self) -> HomeBytes:
        """What lives on the device of theirs."""
        homes = [other.home_bytes() for other in neighbours.others(self)]
        return HomeBytes(sum(each.parameters for each in homes), sum(each.states for each in homes))

    def home_bytes_of_others(self) -> int:
        """`hetero.msc.collector.Others.home_bytes_of_others`."""
        return self.homes_of_others().total

    def copy_bytes_of_others(self) -> int:
        """`hetero.msc.collector.Others.copy_bytes_of_others`."""
        return sum(other.copy_bytes() for other in neighbours.others(self))

    def send_others_home(self, nbytes: int) -> None:
        """So many of these bytes, or as many as can leave."""
        for other in neighbours.others(self):
            if nbytes > 0:
                before = other.home_bytes().total
                other.send_home(nbytes)
                nbytes -= before - other.home_bytes().total

    def room_beside_others(self) -> int:
        """Of our budget, what may live on the device of ours for others to follow their plans; negative where they lack
        room as it is."""
        homes = {other: other.home_bytes().total for other in neighbours.others(self)}
        needed = (other.least_bytes() + sum(homes.values()) - homes[other] for other in homes)
        return self._plans.budget - max(needed, default=0)

    @contextlib.contextmanager
    def moving_homes(self) -> Iterator[None]:
        """Around moves of what lives on the device of ours."""
        with self._collector.homes_changing(), neighbours.moving_homes(self):
            yield

    def _beside(self, *, is_first: bool) -> Iterator[Neighbour]:
        for other in neighbours.others(self) if is_first else self._active():
            if other.thread == self.thread and (not is_first or other.is_amid()):
                yield other

    def _active(self) -> Iterator[Neighbour]:
        for other in neighbours.others(self):
            if other.segments != self._begun.get(id(other), other.segments):
                yield other

    def has_others(self) -> bool:
        """There is somebody to ask."""
        return neighbours.has_others(self)

    def tell(self) -> None:
        """That room was made here in the middle of an operator."""
        neighbours.note_relieved(self)
