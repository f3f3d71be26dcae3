"""What the schedule wants to leave and to come, and could not have yet.

Owns the queues: what is still held by somebody and is to leave, fetches for which there is no room yet, and copies that
are made anew after home was written. Invariant: fetches come in the order in which they were wanted, and what is wanted
now goes before the opposite that was wanted earlier. Whether there is room is the caller's to say.

Numbers from the parameters' on are the plan's saved tensors.
"""

from collections.abc import Callable, Iterable, Sequence

from hetero.devices import LARGEST_WITHOUT_EXCESS
from hetero.eviction import Actions
from hetero.stm.activations.offload import Activations
from hetero.stm.copies.residency import Residency
from hetero.stm.tensors.managed import ManagedTensor

__all__ = ["Backlog"]


class Backlog:
    """Of one manager. ``tensors``: its parameters, by index."""

    def __init__(
        self, tensors: Sequence[ManagedTensor], residency: Residency, activations: Activations
    ) -> None:
        self._tensors = tensors
        self._residency = residency
        self._activations = activations
        self._to_evict: list[int] = []
        self._to_prefetch: list[int] = []
        self._to_renew: list[ManagedTensor] = []
        self._renewed: list[ManagedTensor] = []  # that were, in this segment

    @property
    def is_empty(self) -> bool:
        """Nothing waits."""
        return not (self._to_evict or self._to_prefetch or self._to_renew)

    def begin(self, expected: Iterable[int]) -> int:
        """A segment begins; what is not there of ``expected`` is to be fetched. Returns how many that are."""
        self._to_evict, self._to_renew, self._renewed = [], [], []
        self._to_prefetch = [index for index in expected if not self._is_resident(index)]
        return len(self._to_prefetch)

    def want(self, indices: Iterable[int]) -> None:
        """They are to be fetched, after what waits."""
        self._to_prefetch.extend(index for index in indices if index not in self._to_prefetch)

    def want_renewed(self, tensor: ManagedTensor) -> None:
        """It is to be fetched where it displaces nothing, after what waits for that."""
        self._to_renew.append(tensor)

    def forget_overtaken(self, actions: Actions) -> None:
        """What the schedule wants now goes before what it wanted earlier and could not have yet."""
        if self._to_prefetch and actions.evict:
            self._to_prefetch = [index for index in self._to_prefetch if index not in actions.evict]
        if self._to_evict and actions.fetch:
            self._to_evict = [index for index in self._to_evict if index not in actions.fetch]

    def missing(self, planned: Iterable[int]) -> set[int]:
        """What of ``planned`` and of what waits has yet to come."""
        return {index for index in (*planned, *self._to_prefetch) if not self._is_resident(index)}

    def evict(self, planned: tuple[int, ...]) -> None:
        """As many of ``planned`` and of what waits as can leave."""
        if planned or self._to_evict:
            self._to_evict = [index for index in (*self._to_evict, *planned) if not self._leave(index)]

    def prefetch(
        self, planned: tuple[int, ...], limit: int, excess: int | None, measured_excess: Callable[[], int]
    ) -> None:
        """What waits, then ``planned``, as far as there is room. ``excess``: of that, what blocks got beyond what was
        asked for, if it is known. Else it is measured first, and in any case after each large copy: small ones get no
        more."""
        if not planned and not self._to_prefetch:
            return
        waiting = [index for index in (*self._to_prefetch, *planned) if not self._is_resident(index)]
        self._to_prefetch = []
        for place, index in enumerate(waiting):
            excess = measured_excess() if excess is None else excess
            if not self._bring(index, limit - excess):
                self._to_prefetch = waiting[place:]  # in order: a later one must not overtake
                break
            if self._nbytes(index) > LARGEST_WITHOUT_EXCESS:
                excess = None

    @property
    def may_renew(self) -> bool:
        """There is something to renew, and nothing is wanted more."""
        return bool(self._to_renew) and not self._to_prefetch

    def renew(self, limit: int, spare: int) -> None:
        """What is to be renewed, as far as there is room, and ``spare`` for all of it in this segment."""
        spare -= sum(tensor.device_nbytes for tensor in self._renewed if tensor.is_resident)
        while self._to_renew:
            nbytes = self._to_renew[0].device_nbytes
            if nbytes > spare or self._residency.room.exceeds(limit - nbytes):
                break
            spare -= nbytes
            self._renewed.append(self._to_renew.pop(0))
            self._residency.prefetch(self._renewed[-1], limit=limit)

    # -- copies and saved tensors ---------------------------------------------------------------------

    def _leave(self, index: int) -> bool:
        """It leaves, or is not there; False if it cannot yet."""
        if index >= len(self._tensors):
            return self._activations.evict(index)
        tensor = self._tensors[index]
        return self._residency.evict(tensor) or not tensor.is_resident or tensor.stays

    def _is_resident(self, index: int) -> bool:
        if index >= len(self._tensors):
            return self._activations.is_resident(index)
        return self._tensors[index].is_resident

    def _nbytes(self, index: int) -> int:
        if index >= len(self._tensors):
            return self._activations.nbytes(index)
        return self._tensors[index].device_nbytes

    def _bring(self, index: int, limit: int) -> bool:
        if index >= len(self._tensors):
            return self._activations.prefetch(index, limit=limit)
        return self._residency.prefetch(self._tensors[index], limit=limit)
