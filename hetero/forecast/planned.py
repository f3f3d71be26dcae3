"""The plan of a step that nobody has run: what lives where, what moves, how long it takes.

Owns `Forecast`, and the choice between updates that begin in backward and those that do not. Everything is planned and
simulated by `hetero.eviction`, as in training.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from hetero.errors import BudgetError, PlanError
from hetero.eviction import (
    HomeCost,
    Links,
    Schedule,
    Trace,
    choose_placement,
    host_bytes,
    lower_bound,
    plan_iteration,
)
from hetero.eviction.model import WORTH, large_bytes
from hetero.forecast.moments import StepMoments
from hetero.forecast.reading import Reading, read
from hetero.simulate import Machine
from hetero.swap import links_of
from hetero.trace import StepTrace, operator_seconds
from hetero.units import format_bytes

__all__ = ["Forecast", "Host", "forecast"]

_MOST_PAIRS = 40  # of homes and places that are planned in the search
_SMALL = 2048  # activations of less than 1/2048 of the budget stay


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """``memory_bytes`` for homes and for what leaves the device; ``bandwidth``: bytes a second that updates read and
    write there."""

    memory_bytes: int
    bandwidth: float

    def __post_init__(self) -> None:
        if self.memory_bytes < 0 or not self.bandwidth > 0.0:
            raise PlanError(f"{self}: memory cannot be negative, and bandwidth must be positive")


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """One training step under ``device_budget``. Bytes and seconds.

    ``everything_fits``: nothing moves. ``model_bytes``: parameters, gradients, optimizer states and buffers together.
    ``unmanaged_bytes``: the peak of the step without hetero; ``least_budget``: no smaller one can work. ``host_bytes``:
    homes, and what else is there at most. ``on_device``: parameters that live on the device; ``parameters``: all.
    ``moved_bytes``: both ways, in a step; ``least_bytes``: no schedule moves fewer. ``activation_bytes``: of these,
    activations. ``unmanaged_seconds``: of a step with everything resident; ``step_seconds``: of the step as it is
    planned; ``up_seconds``, ``down_seconds``, ``update_seconds``: what the link's directions and the host's step take,
    beside each other. ``begins_early``: updates begin in backward.
    """

    machine: str
    device_budget: int
    everything_fits: bool
    model_bytes: int
    unmanaged_bytes: int
    least_budget: int
    host_bytes: int
    parameters: int
    on_device: int
    moved_bytes: int
    least_bytes: int
    activation_bytes: int
    unmanaged_seconds: float
    step_seconds: float
    up_seconds: float
    down_seconds: float
    update_seconds: float
    begins_early: bool

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def forecast(
    trace: StepTrace,
    machine: Machine,
    *,
    device_budget: int,
    host: Host,
    device_homes: bool = True,
    thorough: bool = True,
) -> Forecast:
    """What a training step like ``trace`` takes on ``machine`` under ``device_budget`` bytes.

    ``trace``: of a later step, whose optimizer has its states (``warmup=1`` of `trace_recipe`). Operators take the
    roofline's time (`hetero.trace.operator_seconds`): give a machine that is ``slowed`` by what kernels are expected
    to fall short of it. ``device_homes``: as for `hetero.manage`; ``thorough``: as for
    `hetero.eviction.plan_iteration`. Raises `BudgetError` if the budget or the host's memory cannot work, with what
    would.
    """
    seconds = operator_seconds(trace, machine)
    least = _least_budget(trace, seconds)
    reading = _read_for(trace, seconds, device_budget)
    if least <= device_budget < _needed(reading):
        reading = _read_for(trace, seconds, least)
    job = _Job(
        trace=trace,
        reading=reading,
        machine=machine,
        budget=device_budget,
        least=least,
        host=host,
        device_homes=device_homes,
        thorough=thorough,
    )
    return job.settled() if job.everything_fits else job.planned()


def _read_for(trace: StepTrace, seconds: Sequence[float], budget: int) -> Reading:
    return read(trace, seconds, threshold=max(1, budget // _SMALL), large=large_bytes(budget))


def _least_budget(trace: StepTrace, seconds: Sequence[float]) -> int:
    """The larger the budget, the larger are the activations that stay, or have no moments of their own: the first that
    holds what is needed under it."""
    least = 1
    while (needed := _needed(_read_for(trace, seconds, least))) > least:
        least = needed
    return least


def _needed(reading: Reading) -> int:
    """With no copy but the operands': the fullest period."""
    needed = [
        period.load + sum(reading.parameters[x].nbytes for x in period.reads) for period in reading.periods
    ]
    for activation in reading.activations:
        for use in activation.uses:
            needed[use] += activation.nbytes
    return max(needed)


@dataclass(frozen=True, kw_only=True)
class _Job:
    """One budget, and all that is asked about it."""

    trace: StepTrace
    reading: Reading
    machine: Machine
    budget: int
    least: int
    host: Host
    device_homes: bool
    thorough: bool

    @cached_property
    def model_bytes(self) -> int:
        return sum(p.whole_bytes for p in self.reading.parameters) + self.reading.buffer_bytes

    @cached_property
    def unmanaged_bytes(self) -> int:
        return self.trace.peak_nbytes()

    @cached_property
    def unmanaged_seconds(self) -> float:
        compute = sum(period.seconds for period in self.reading.periods)
        return compute + self.moments.device_step(range(len(self.reading.parameters)))

    @property
    def everything_fits(self) -> bool:
        return self.unmanaged_bytes <= self.budget

    @cached_property
    def links(self) -> Links:
        return links_of(self.machine)

    @cached_property
    def moments(self) -> StepMoments:
        return StepMoments(
            reading=self.reading,
            budget=self.budget,
            links=self.links,
            update_bandwidth=self.host.bandwidth,
            device_bandwidth=self.machine.memory_bandwidth,
        )

    def settled(self) -> Forecast:
        """Everything fits: as unmanaged."""
        return self._forecast(
            everything_fits=True,
            host_bytes=0,
            on_device=len(self.reading.parameters),
            step_seconds=self.unmanaged_seconds,
        )

    def planned(self) -> Forecast:
        """As training would plan it: the quicker of both ways of updating that the host has room for."""
        if self.least > self.budget:
            raise BudgetError(
                f"the fullest operator needs {format_bytes(self.least)} ({self.least} bytes) of the device, and the "
                f"budget is {format_bytes(self.budget)}: raise it to that, or lower the batch size"
            )
        found = [self._best(early=early) for early in (False, True)]
        possible = [each for each in found if each.host_bytes <= self.host.memory_bytes]
        if not possible:
            least = min(each.host_bytes for each in found)
            raise BudgetError(
                f"homes and activations that leave take {format_bytes(least)} ({least} bytes) of the host, which has "
                f"{format_bytes(self.host.memory_bytes)}: more memory, a larger device budget or a smaller batch"
            )
        quickest = min(each.step_seconds for each in possible)
        return next(each for each in possible if each.step_seconds <= (1.0 + WORTH) * quickest)

    def _best(self, *, early: bool) -> Forecast:
        parameters = self.reading.parameters
        costs = {
            x: HomeCost(
                nbytes=p.whole_bytes,
                gradient_nbytes=p.gradient_bytes,
                step_nbytes=self.reading.step_load,
                step_seconds=p.update_bytes / self.host.bandwidth,
            )
            for x, p in enumerate(parameters)
            if p.is_trained and self.device_homes
        }

        def plan(homes: tuple[int, ...], places: tuple[int, ...]) -> tuple[Trace, Schedule]:
            trace = self.moments.trace(homes, places, early=early)
            schedule = plan_iteration(trace, links=self.links, host_room=self._room(), thorough=False)
            placed = sum(trace.sizes[x] for x in places)
            return trace, replace(schedule, fetched_bytes=schedule.fetched_bytes + placed)

        order = range(len(parameters))
        placement = choose_placement(
            order,
            costs,
            [p.nbytes for p in parameters],
            may_stay=[x for x in order if parameters[x].is_trained] if early else (),
            most_bytes=self.budget,
            links=self.links,
            plan=plan,
            most_pairs=_MOST_PAIRS,
        )
        homes, places = placement.home.homes, placement.places
        trace = self.moments.trace(homes, places, early=early)
        schedule = plan_iteration(trace, links=self.links, host_room=self._room(), thorough=self.thorough)
        return self._told(trace, schedule, homes, places, early=early)

    def _room(self) -> int:
        """Of the host, for activations."""
        return max(0, self.host.memory_bytes - sum(p.whole_bytes for p in self.reading.parameters))

    def _told(
        self,
        trace: Trace,
        schedule: Schedule,
        homes: tuple[int, ...],
        places: tuple[int, ...],
        *,
        early: bool,
    ) -> Forecast:
        parameters, count = self.reading.parameters, len(self.reading.parameters)
        queued = [p for x, p in enumerate(parameters) if p.is_trained and x not in homes]
        gradients = sum(p.gradient_bytes for p in queued)
        placed = sum(trace.sizes[x] for x in places)
        away = [x for actions in schedule.actions for x in actions.evict if x >= count]
        out = sum(trace.sizes[x] for x in away)
        homes_bytes = sum(p.whole_bytes for p in parameters)
        snapshots = sum(p.nbytes + p.state_bytes for p in queued) if early else 0
        up = schedule.fetched_bytes + placed
        down = schedule.written_back_bytes + gradients
        return self._forecast(
            everything_fits=False,
            host_bytes=homes_bytes + snapshots + host_bytes(trace, schedule),
            on_device=len(homes),
            moved_bytes=up + down,
            least_bytes=lower_bound(trace) + placed + gradients,
            activation_bytes=2 * out,
            step_seconds=schedule.predicted_seconds,
            up_seconds=self.machine.h2d.seconds(up) if up else 0.0,
            down_seconds=self.machine.d2h.seconds(down) if down else 0.0,
            update_seconds=sum(p.update_bytes for p in queued) / self.host.bandwidth,
            begins_early=early,
        )

    def _forecast(self, **found: Any) -> Forecast:
        nothing: dict[str, Any] = {
            "moved_bytes": 0,
            "least_bytes": 0,
            "activation_bytes": 0,
            "up_seconds": 0.0,
            "down_seconds": 0.0,
            "update_seconds": 0.0,
            "begins_early": False,
        }
        return Forecast(
            machine=self.machine.name,
            device_budget=self.budget,
            model_bytes=self.model_bytes,
            unmanaged_bytes=self.unmanaged_bytes,
            least_budget=self.least,
            parameters=len(self.reading.parameters),
            unmanaged_seconds=self.unmanaged_seconds,
            **{**nothing, **found},
        )
