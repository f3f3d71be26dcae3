"""What one manager does for others on its device, and they for it (`hetero.stm.neighbours` says who they are)."""

import threading
from collections.abc import Callable, Sequence

import torch

from hetero.msc import MemStatsCollector
from hetero.stm import neighbours
from hetero.stm.activations.offload import Activations
from hetero.stm.gradients.kept import has_gradient
from hetero.stm.running.relief import Relief
from hetero.stm.standing import Standing
from hetero.stm.tensors.managed import ManagedTensor
from hetero.stm.tensors.state import Kind, Ledger, Tier

__all__ = ["Sharing", "away_bytes"]


def away_bytes(tensors: Sequence[ManagedTensor], ledger: Ledger, activations: Activations) -> int:
    """`hetero.stm.neighbours.Neighbour.away_bytes`, of these tensors."""
    parameters = sum(tensor.device_nbytes for tensor in tensors)
    gradients = sum(tensor.device_nbytes for tensor in tensors if has_gradient(tensor))
    there = sum(ledger.nbytes(Tier.DEVICE, kind) for kind in (Kind.PARAMETER, Kind.GRADIENT, Kind.ACTIVATION))
    return parameters + gradients + activations.whole_bytes - there


class Sharing:
    """Of one manager (`hetero.stm.neighbours.Neighbour`), of which none waits for another's lock. ``away_bytes``: as
    there, of what the manager moves."""

    def __init__(
        self,
        standing: Standing,
        collector: MemStatsCollector,
        *,
        away_bytes: Callable[[], int],
        lock: threading.RLock,
        device: torch.device,
    ) -> None:
        self.device = device
        self._standing = standing
        self._collector = collector
        self._away_bytes = away_bytes
        self._lock = lock

    def join(self, relief: Relief) -> None:
        """From now on others may ask; ``relief`` lets go of what they get."""
        self._relief = relief
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
        """`hetero.stm.neighbours.Neighbour.away_bytes`."""
        if not self._lock.acquire(blocking=False):
            return 0
        try:
            standing = self._standing
            moves = not (standing.is_closed or standing.is_in_child or standing.is_settled)
            return self._away_bytes() if moves else 0
        finally:
            self._lock.release()

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

    def others_away_bytes(self) -> int:
        """`hetero.msc.Period.others_away_bytes`."""
        return neighbours.away_bytes(self)

    def others_segments(self) -> int:
        """How many have begun of others (`hetero.stm.neighbours.segments`)."""
        return neighbours.segments(self)

    def has_others(self) -> bool:
        """There is somebody to ask."""
        return neighbours.has_others(self)

    def tell(self) -> None:
        """That room was made here in the middle of an operator."""
        neighbours.note_relieved(self)
