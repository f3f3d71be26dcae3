"""The period: what happened between two sampling moments.

Owns the two records of it: `Period`, filled while it runs, and `PeriodStats`, the frozen one users see.

[Note: own time]
A period's own time is what it would take if nothing had to be waited for: the time between two events on the compute
stream, without that between the events around each wait in between, and without that in which the next operator waits
while the host issues transfers: nothing where the device is behind, and what this takes where it has caught up. The
plan's simulation adds waits of its own.
"""

import dataclasses
import enum
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

__all__ = [
    "AskedOf",
    "BackwardSignature",
    "Gradient",
    "HandedOver",
    "Period",
    "PeriodStats",
    "Phase",
    "SegmentKey",
    "Wait",
    "seconds_between",
]


class Phase(enum.StrEnum):
    """Part of the iteration."""

    FORWARD = "forward"
    BACKWARD = "backward"
    STEP = "step"


@dataclass(frozen=True, slots=True)
class Wait:
    """Compute waited, between two events on its stream. ``within``: the operator had begun."""

    before: torch.Event
    after: torch.Event
    within: bool

    @property
    def seconds(self) -> float:
        """Waits for the device to reach the end."""
        return seconds_between(self.before, self.after)


def seconds_between(before: torch.Event, after: torch.Event) -> float:
    """Waits for the device to reach both: parts of a model may run on streams of their own, and what is waited for on
    one says nothing of another."""
    before.synchronize()
    after.synchronize()
    return max(0.0, before.elapsed_time(after) / 1e3)


@dataclass(frozen=True, slots=True)
class Gradient:
    """Parameter ``index`` got its gradient on the device, and sent ``nbytes`` home; after ``waits`` waits."""

    index: int
    nbytes: int
    event: torch.Event
    waits: int


@dataclass(frozen=True, slots=True)
class HandedOver:
    """Parameter ``index`` got its gradient, whose memory of ``nbytes`` was nobody else's. From then until the next one,
    or the period's end, there were at most ``beside_bytes`` of other non-model data."""

    index: int
    nbytes: int
    beside_bytes: int


@dataclass(frozen=True, slots=True)
class SegmentKey:
    """What decides which operators a segment runs.

    ``trains``: gradients are recorded. ``signature``: shapes and dtypes of the inputs, the module's mode,
    autocast; for a backward, its `BackwardSignature`. ``elements``: how many the tensors among the inputs have. It
    tells nothing of the operators: what counts as the same may take more memory where there are more.
    """

    phase: Phase
    trains: bool
    signature: Hashable
    elements: int = field(default=0, compare=False)


class AskedOf(NamedTuple):
    """What a backward was asked the gradients of: the ``ours`` among the model's parameters, None where it may be
    whichever; and of how much else, ``others``."""

    ours: frozenset[int] | None
    others: int


@dataclass(frozen=True, slots=True)
class BackwardSignature:
    """What decides which operators a backward runs.

    ``forwards``: those it belongs to. What they saved leaves as it goes on, unless its ``graph_is_kept``. One that
    ``returns`` gradients may be differentiated again: then much of what it makes is kept. One that was ``asked_of``
    some alone runs what leads to these; None: of all that it reaches.
    """

    forwards: tuple[SegmentKey, ...]
    graph_is_kept: bool
    asked_of: AskedOf | None
    returns: bool


@dataclass(slots=True)
class Period:
    """One period as it is being measured. Bytes; -1 where this period was not sampled.

    ``used_bytes``: on the device when the operator began, ``asked_bytes`` of them asked for; ``peak_bytes``: at most
    until the period's end, ``excess_bytes`` of them not asked for. Of other managers, ``others_home_bytes``: what lives
    on the device then, parameters and optimizer states, which is no non-model data: it comes and goes by their choice;
    ``others_copy_bytes``: what else is there of their parameters, which is; ``others_away_bytes``: of their data, what
    was not there, 0 where they do not move it, and parameters that live there; ``others_away_after``: the same at its
    end, if segments of theirs have begun within. ``non_model_bytes``: at most of what is no model data and was asked
    for, ``between_bytes`` of these after its operator was over, -1 where that is not known.
    ``relieved``: it ran out of memory until copies were evicted in its middle; ``lost_own``: among them what will be
    there again, which it had saved itself or others have. ``others_gave``: before it began, other managers made room,
    with what they may have there again.

    ``reached``: the sampling moment, where times are measured; until ``begin`` the host issued ``issued`` transfers.
    ``seconds``: its own time ([Note: own time]). ``waits`` and ``gradients``: in the order in which they came;
    ``sends``: of each gradient parameter, bytes and seconds of own time until then, ascending, after `read_events`;
    ``handed_over``: the same gradients, and what there was beside them.

    Saved tensors go by (which forward, which record of it): ``saved`` with their bytes, ``used`` by backward and
    ``dropped`` within the period, ``held_saved`` by somebody else when it began. ``spared_bytes``: of those that were
    needed before they had left, and so did not have to come back.
    """

    operands: tuple[int, ...]
    held: tuple[int, ...] = ()
    invalidates: list[int] = field(default_factory=list)
    name: object = ""
    fetched_bytes: int = 0
    evicted_bytes: int = 0
    written_bytes: int = 0
    unplanned_fetches: int = 0
    stall_seconds: float = 0.0
    model_bytes: int = -1
    used_bytes: int = -1
    asked_bytes: int = -1
    others_away_bytes: int = 0
    others_away_after: int | None = None
    others_home_bytes: int = 0
    others_copy_bytes: int = 0
    peak_bytes: int = -1
    excess_bytes: int = 0
    non_model_bytes: int = -1
    between_bytes: int = -1
    relieved: bool = False
    lost_own: bool = False
    others_gave: bool = False
    host_model_bytes: int = -1
    host_bytes: int = -1
    seconds: float = 0.0
    reached: torch.Event | None = None
    issued: int = 0
    begin: torch.Event | None = None
    end: torch.Event | None = None
    activation_bytes: int = -1
    activation_out_bytes: int = 0
    activation_in_bytes: int = 0
    spared_bytes: int = 0
    saved: list[tuple[tuple[int, int], int]] = field(default_factory=list)
    used: list[tuple[int, int]] = field(default_factory=list)
    dropped: list[tuple[int, int]] = field(default_factory=list)
    held_saved: tuple[tuple[int, int], ...] = ()
    waits: list[Wait] = field(default_factory=list)
    gradients: list[Gradient] = field(default_factory=list)
    sends: tuple[tuple[int, int, float], ...] = ()
    handed_over: list[HandedOver] = field(default_factory=list)

    @property
    def is_sampled(self) -> bool:
        """Its memory was measured."""
        return self.peak_bytes >= 0

    @property
    def beside_bytes(self) -> int:
        """Non-model data that were asked for before the operator began."""
        return self.asked_bytes - self.model_bytes - self.others_home_bytes

    @property
    def with_others_bytes(self) -> int:
        """`beside_bytes`, had other managers had all of theirs there, but for optimizer states."""
        return self.beside_bytes + self.others_away_bytes

    @property
    def most_with_others_bytes(self) -> int:
        """``non_model_bytes``, likewise. Where segments of theirs have begun within, nobody knows what was away at the
        peak: what was at both ends, at least. They account for the rest themselves."""
        away = self.others_away_bytes
        if self.others_away_after is not None:
            away = min(away, self.others_away_after)
        return max(self.with_others_bytes, self.non_model_bytes + away)

    @property
    def sent_bytes(self) -> int:
        """Of the gradients that went home, after `read_events`."""
        return sum(nbytes for _, nbytes, _ in self.sends)

    def non_model_with(self, staying: Mapping[int, int]) -> int:
        """``non_model_bytes``, had the gradients of these parameters, of so many bytes, stayed once they were made."""
        most, stayed, seen = self.non_model_bytes, 0, set[int]()
        for gradient in self.handed_over:
            beside = gradient.beside_bytes
            if gradient.index in staying and gradient.index not in seen:
                stayed += staying[gradient.index]
                seen.add(gradient.index)
            else:  # on its way home, or added to one that stays
                beside += gradient.nbytes
            most = max(most, stayed + min(beside, self.non_model_bytes))
        return max(most, self.non_model_bytes + sum(n for x, n in staying.items() if x not in seen))

    def read_events(self) -> None:
        """Turn the events into seconds; waits for the device to reach the period's end."""
        if self.begin is not None and self.end is not None:
            self.read_times(self.end)
        self.begin = self.end = None
        self.waits, self.gradients = [], []

    def read_times(self, end: torch.Event, *, after: "Period | None" = None) -> None:
        """Own time from ``begin`` to ``end``; waits for both. ``after``: the period that begins there; what its
        operands were waited for is no time of this one's."""
        assert self.begin is not None
        waits = [wait for wait in self.waits if wait.within]
        within = [wait.seconds for wait in waits]
        before = 0.0 if after is None else after.waited_seconds + after.issue_seconds
        self.seconds = max(0.0, seconds_between(self.begin, end) - sum(within) - before)
        skipped = len(self.waits) - len(waits)
        latest, sends = 0.0, []
        for gradient in self.gradients:
            # Of what runs on streams of its own, the one that came later may have been made earlier.
            latest = max(latest, self._own(gradient.event, sum(within[: gradient.waits - skipped])))
            sends.append((gradient.index, gradient.nbytes, latest))
        self.sends = tuple(sends)

    @property
    def waited_seconds(self) -> float:
        """Of the operator's own operands, before it began. Waits for the device."""
        return sum(wait.seconds for wait in self.waits if not wait.within)

    @property
    def issue_seconds(self) -> float:
        """For which the operator waited, beside that, because the host issued transfers. Waits for the device."""
        if not self.issued or self.reached is None or self.begin is None:
            return 0.0
        return max(0.0, seconds_between(self.reached, self.begin) - self.waited_seconds)

    def _own(self, event: torch.Event, waited: float) -> float:
        assert self.begin is not None
        return min(self.seconds, max(0.0, seconds_between(self.begin, event) - waited))


@dataclass(frozen=True, slots=True, kw_only=True)
class PeriodStats:
    """One period of the last measured iteration.

    Attributes:
        index: position in the iteration.
        operator: the operator and its parameters, as ``linear(layer.weight)``.
        phase: ``"forward"``, ``"backward"`` or ``"step"``.
        device_model_bytes: parameters, gradients, states and buffers on the device when the operator begins.
        device_activation_bytes: tensors saved for backward that may leave, on the device, likewise.
        device_non_model_bytes: peak of everything else on the device: what operators allocate, gradients among it.
        device_peak_bytes: peak of all device memory in use.
        host_model_bytes: model data on the host.
        host_non_model_bytes: what else the process holds in host memory.
        fetched_bytes: host to device.
        evicted_bytes: device copies that were given up: dropped, which costs nothing, or, where they had been written,
            after a copy home.
        written_bytes: device to host: gradients and written copies.
        activation_out_bytes, activation_in_bytes: saved tensors, device to host and back.
        stall_seconds: time compute waited for copies.
        seconds: the operator's own time.
    """

    index: int
    operator: str
    phase: str
    device_model_bytes: int
    device_non_model_bytes: int
    device_peak_bytes: int
    host_model_bytes: int
    host_non_model_bytes: int
    device_activation_bytes: int
    activation_out_bytes: int
    activation_in_bytes: int
    fetched_bytes: int
    evicted_bytes: int
    written_bytes: int
    stall_seconds: float
    seconds: float

    def to_dict(self) -> dict[str, object]:
        """The same, ready for JSON."""
        return dataclasses.asdict(self)
