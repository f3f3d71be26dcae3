"""A step under a budget, as the eviction planner takes it: sampling moments, what each needs and leaves.

Owns the arithmetic of room: what lives on the device all along, gradients that stay there, gradients on their way home.
`hetero.stm.plans` does the same with what was measured.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from hetero.eviction import (
    CapacityError,
    Links,
    Moment,
    OnTheirWay,
    Send,
    Trace,
    Updates,
    gradient_reserves,
    on_their_way,
)
from hetero.forecast.reading import Period, Reading

__all__ = ["StepMoments"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMoments:
    """Of one `Reading` under ``budget`` bytes of the device. ``update_bandwidth``, ``device_bandwidth``: bytes a second
    that an update reads and writes on the host, and on the device."""

    reading: Reading
    budget: int
    links: Links
    update_bandwidth: float
    device_bandwidth: float

    def trace(self, homes: tuple[int, ...], places: tuple[int, ...], *, early: bool) -> Trace:
        """With ``homes`` on the device, and ``places`` there for these parameters alone; ``early``: updates begin in
        backward. Raises `CapacityError` if they leave too little."""
        reading, count = self.reading, len(self.reading.parameters)
        living, placed = frozenset(homes), frozenset(places)
        beside = sum(reading.parameters[x].nbytes for x in places)
        beside += sum(reading.parameters[x].nbytes + reading.parameters[x].state_bytes for x in homes)
        operands, produced, ended = self._lives(count, living | placed)
        free, gradients = list[int](), 0
        for period in reading.periods:  # which counts the gradients that it makes
            free.append(self.budget - beside - gradients - period.load)
            gradients += sum(size for x, size, _ in period.sends if x in living)
        reserves = self._reserves(living, free, operands)
        first_send = next(
            (i for i, period in enumerate(reading.periods) if period.sends), len(reading.periods)
        )
        moments = [
            Moment(
                operands=operands[place],
                seconds=period.seconds,
                capacity=free[place] - reserves[place].begin,
                dirties=produced[place],
                produces=produced[place],
                invalidates=ended[place],
                sends=self._sent(period, living),
                awaits=tuple(x for x in period.reads if x in placed),
                still_sending=reserves[place].begin if place >= first_send else None,
            )
            for place, period in enumerate(reading.periods)
        ]
        moments.append(
            Moment(
                operands=(),
                seconds=self.device_step(homes),
                capacity=self.budget - beside - gradients - (reading.step_load if homes else 0),
                invalidates=(
                    *(
                        x
                        for x, p in enumerate(reading.parameters)
                        if p.is_trained and x not in living | placed
                    ),
                    *ended[len(reading.periods)],
                ),
            )
        )
        worst = min(moments, key=lambda moment: moment.capacity)
        if worst.capacity < 0:
            raise CapacityError(
                moment=moments.index(worst), needed=self.budget - worst.capacity, capacity=self.budget
            )
        sizes = [0 if x in living else p.nbytes for x, p in enumerate(reading.parameters)]
        return Trace(
            sizes=(*sizes, *(a.nbytes for a in reading.activations)),
            moments=tuple(moments),
            sending_bytes=max(way.most for way in reserves),
            updates=self._updates(homes, places, step=len(moments) - 1, early=early),
        )

    def device_step(self, homes: Collection[int]) -> float:
        """Seconds that the updates of those take on the device."""
        moved = sum(
            self.reading.parameters[x].update_bytes for x in homes if self.reading.parameters[x].is_trained
        )
        return moved / self.device_bandwidth

    # -- helpers --------------------------------------------------------------------------------------

    def _lives(
        self, first: int, elsewhere: frozenset[int]
    ) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]], list[tuple[int, ...]]]:
        """Operands and what is produced in each period, and what has ended before it; activations from ``first`` on."""
        count = len(self.reading.periods)
        operands = [[x for x in period.reads if x not in elsewhere] for period in self.reading.periods]
        produced: list[list[int]] = [[] for _ in range(count)]
        ended: list[list[int]] = [[] for _ in range(count + 1)]
        for x, activation in enumerate(self.reading.activations, first):
            for use in activation.uses:
                operands[use].append(x)
            produced[activation.begin].append(x)
            ended[activation.end].append(x)
        return [tuple(x) for x in operands], [tuple(x) for x in produced], [tuple(x) for x in ended]

    def _sent(self, period: Period, living: frozenset[int]) -> tuple[Send, ...]:
        return tuple(
            Send(tensor=x, nbytes=size, seconds=seconds)
            for x, size, seconds in period.sends
            if x not in living
        )

    def _reserves(
        self, living: frozenset[int], free: Sequence[int], operands: Sequence[Sequence[int]]
    ) -> list[OnTheirWay]:
        """For each period, what may be on its way, as in training."""
        periods, parameters = self.reading.periods, self.reading.parameters
        sizes = [*(p.nbytes for p in parameters), *(a.nbytes for a in self.reading.activations)]
        at_home = frozenset(range(len(parameters))).difference(living)
        sends = [i for i, period in enumerate(periods) if any(x in at_home for x, _, _ in period.sends)]
        come = range(sends[0], sends[-1] + 1) if sends else range(0)
        spare = [nbytes - sum(sizes[x] for x in operands[place]) for place, nbytes in enumerate(free)]
        largest = max((parameters[x].gradient_bytes for x in at_home), default=0)
        return gradient_reserves(
            largest,
            come=[place in come for place in range(len(periods))],
            ways=on_their_way(periods, self.links, at_home, most=2 * largest),
            # A period's load has all gradients that it makes, beside everything else.
            freed=[sum(size for x, size, _ in period.sends if x in at_home) for period in periods],
            spare=spare,
        )

    def _updates(self, homes: Sequence[int], places: tuple[int, ...], *, step: int, early: bool) -> Updates:
        parameters = self.reading.parameters
        queued = [x for x, p in enumerate(parameters) if p.is_trained and x not in homes]
        bandwidth = self.update_bandwidth
        return Updates(
            tensors=tuple(queued),
            seconds=tuple(parameters[x].update_bytes / bandwidth for x in queued),
            queued=step,
            finished=step,
            early=early,
            copies=tuple(2 * (parameters[x].nbytes + parameters[x].state_bytes) / bandwidth for x in queued)
            if early
            else (),
            places=places,
        )
