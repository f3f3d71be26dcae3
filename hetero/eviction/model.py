"""The nouns of eviction planning: what a step touches, what a link costs, what the executor is told.

Owns the values that the recorder of a trace, the planner, the simulator and the checker share, and the
meaning of each field. It decides nothing.

[Note: what happens at a moment] At sampling moment ``t``, in this order: the copies in ``invalidates`` cease
to exist (free of charge, even when dirty; they are *not* listed in ``Actions.evict``); ``Actions.evict``
leave, a dirty copy being written back; ``Actions.fetch`` start, in order, and occupy memory from now on; the
operator waits for its operands and runs for ``seconds``. Period ``t`` is the time from there to moment ``t +
1``. In a cyclic trace moment ``len(moments)`` is moment 0 of the next iteration.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from hetero.errors import BudgetError, PlanError
from hetero.units import format_bytes

__all__ = [
    "WORTH",
    "Actions",
    "Candidate",
    "CapacityError",
    "Links",
    "Moment",
    "Policy",
    "Schedule",
    "Send",
    "Trace",
    "Updates",
    "large_bytes",
]

WORTH = 0.005
"""Share of a predicted step: what differs by less counts as equally fast, and fewer bytes decide."""


def large_bytes(budget: int) -> int:
    """From how many bytes on an activation has sampling moments of its own, when it is saved and when it is needed,
    under a device budget of ``budget`` bytes. Smaller ones leave and come with the operators of parameters: each moment
    costs time in every iteration."""
    return max(1, budget // 64)


class CapacityError(BudgetError):
    """The operands of one moment alone exceed its capacity: no schedule can exist.

    Carries ``moment`` (index), ``needed`` and ``capacity`` (bytes), for a caller who can name the operator.
    """

    def __init__(self, *, moment: int, needed: int, capacity: int) -> None:
        super().__init__(
            f"moment {moment} needs {format_bytes(needed)} ({needed} bytes) of operands on the device, but "
            f"only {format_bytes(capacity)} ({capacity} bytes) may be held there: raise the budget by "
            f"{format_bytes(needed - capacity)}, or lower the batch size"
        )
        self.moment = moment
        self.needed = needed
        self.capacity = capacity

    def __reduce__(self) -> tuple[object, ...]:
        return _capacity_error, (self.moment, self.needed, self.capacity)


def _capacity_error(moment: int, needed: int, capacity: int) -> CapacityError:
    return CapacityError(moment=moment, needed=needed, capacity=capacity)


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """``nbytes`` go home, ``seconds`` after an operator has begun: the gradient of ``tensor``."""

    tensor: int
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Updates:
    """What the host does to tensors at home, one after another: ``seconds[i]`` for ``tensors[i]``, whose gradient
    has to be there. They are queued at moment ``queued``, and done before moment ``finished`` is reached again; a
    tensor that has not been updated cannot be fetched.

    ``early``: each begins as soon as its gradient is there, of several the first in this order, and the tensor's copy
    is worthless from the gradient on. ``copies[i]``: seconds more for one that begins before moment ``queued``, because
    it keeps what it overwrites; empty for none. ``places``: tensors whose place on the device is theirs for good, in no
    moment's capacity; it is filled anew after each update. Raises `PlanError` if these do not go together."""

    tensors: tuple[int, ...]
    seconds: tuple[float, ...]
    queued: int
    finished: int
    early: bool = False
    copies: tuple[float, ...] = ()
    places: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for what, tensors in (("tensors", self.tensors), ("places", self.places)):
            if len(set(tensors)) < len(tensors):
                raise PlanError(f"updates name a tensor twice among their {what}, {tensors}: name each once")
        for what, times in (("seconds", self.seconds), ("copies", self.copies or self.seconds)):
            if len(times) != len(self.tensors):
                raise PlanError(
                    f"updates have {len(self.tensors)} tensors and {len(times)} {what}: give one for each"
                )
            if not all(0.0 <= seconds < math.inf for seconds in times):
                raise PlanError(f"updates have {what} of {times}: a time must be finite, not negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """A sampling moment (before an operator) and the period that follows it.

    ``operands``: ids of tensors that must be on the device in this period; repeats count once.
    ``seconds``: the operator's own time, without stalls.
    ``capacity``: bytes of model data the device may hold in this period.
    ``dirties``: operands whose device copy the operator writes; evicting them later costs a write back.
    ``invalidates``: tensors whose device copies become worthless here, before the operator.
    ``produces``: operands that come into being here, on the device, and need no fetch: they have no copy before.
    ``sends``: gradients that go home, in the order of their times, none of which is beyond ``seconds``.
    ``awaits``: those of ``Updates.places`` that it reads as well; they are no operands.
    ``still_sending``: bytes of gradients that may be on their way as it begins; None: any number.
    """

    operands: tuple[int, ...]
    seconds: float = 0.0
    capacity: int
    dirties: tuple[int, ...] = ()
    invalidates: tuple[int, ...] = ()
    produces: tuple[int, ...] = ()
    sends: tuple[Send, ...] = ()
    awaits: tuple[int, ...] = ()
    still_sending: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One iteration. ``sizes[i]`` is the bytes of tensor ``i``'s device copy.

    ``cyclic``: the iteration repeats, and what is resident at its end is resident at the start of the next.
    Otherwise it starts with nothing resident. ``sending_bytes``: of gradients that may be on their way at once.
    ``updates``: None if nothing is known of them. Raises `PlanError` naming the first field that makes no sense.
    """

    sizes: tuple[int, ...]
    moments: tuple[Moment, ...]
    cyclic: bool = True
    sending_bytes: int = 0
    updates: Updates | None = None

    def __post_init__(self) -> None:
        if any(size < 0 for size in self.sizes):
            tensor = next(i for i, size in enumerate(self.sizes) if size < 0)
            raise PlanError(f"tensor {tensor} has {self.sizes[tensor]} bytes: a size cannot be negative")
        known = range(len(self.sizes))
        for index, moment in enumerate(self.moments):
            for tensor in (*moment.operands, *moment.invalidates) if moment.invalidates else moment.operands:
                if tensor not in known:
                    raise PlanError(
                        f"moment {index} names tensor {tensor}; the trace has {len(known)} tensors"
                    )
            if moment.dirties and not set(moment.dirties) <= set(moment.operands):
                stray = sorted(set(moment.dirties) - set(moment.operands))
                raise PlanError(f"moment {index} dirties tensors {stray}, which are not among its operands")
            if moment.produces and not set(moment.produces) <= set(moment.operands):
                stray = sorted(set(moment.produces) - set(moment.operands))
                raise PlanError(f"moment {index} produces tensors {stray}, which are not among its operands")
            if not (0.0 <= moment.seconds < math.inf):
                raise PlanError(
                    f"moment {index} takes {moment.seconds} s: a time must be finite, not negative"
                )
        self._check_sends()
        self._check_updates()

    def _check_sends(self) -> None:
        if self.sending_bytes < 0:
            raise PlanError(f"{self.sending_bytes} bytes may be on their way: give 0 or more")
        for index, moment in enumerate(self.moments):
            if moment.still_sending is not None and moment.still_sending < 0:
                raise PlanError(
                    f"{moment.still_sending} bytes may be on their way as moment {index} begins: give 0 or more"
                )
            earliest = 0.0
            for send in moment.sends:
                if not 0 <= send.tensor < len(self.sizes):
                    raise PlanError(
                        f"moment {index} sends the gradient of tensor {send.tensor}; the trace has "
                        f"{len(self.sizes)} tensors"
                    )
                if send.nbytes < 0:
                    raise PlanError(
                        f"moment {index} sends {send.nbytes} bytes for tensor {send.tensor}: a size cannot be negative"
                    )
                if not earliest <= send.seconds <= moment.seconds:
                    raise PlanError(
                        f"moment {index} sends the gradient of tensor {send.tensor} after {send.seconds} s, and takes "
                        f"{moment.seconds} s: sends are listed in the order of their times, from {earliest} s on here"
                    )
                earliest = send.seconds

    def _check_updates(self) -> None:
        updates = self.updates
        places = frozenset(() if updates is None else updates.places)
        for index, moment in enumerate(self.moments):
            if moment.awaits and not places.issuperset(moment.awaits):
                stray = sorted(set(moment.awaits) - places)
                raise PlanError(
                    f"moment {index} awaits tensors {stray}, which have no place of their own: name them in "
                    "Updates.places, or among its operands"
                )
            if places and not places.isdisjoint(moment.operands):
                doubled = sorted(places.intersection(moment.operands))
                raise PlanError(
                    f"tensors {doubled} have a place of their own, and are operands of moment {index}: name them in "
                    "its awaits instead, because their places are in no moment's capacity"
                )
        if updates is None:
            return
        stray = sorted({x for x in (*updates.tensors, *updates.places) if not 0 <= x < len(self.sizes)})
        if stray:
            raise PlanError(f"updates name tensors {stray}; the trace has {len(self.sizes)} tensors")
        for what, index in (("queued", updates.queued), ("finished", updates.finished)):
            if not 0 <= index < len(self.moments):
                raise PlanError(
                    f"updates are {what} at moment {index}; the trace has {len(self.moments)} moments"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """The two directions between home and device: bytes per second each, and seconds per transfer.

    ``d2h_latency``: of transfers to home where it is another one; None: ``latency``. ``issue``: seconds for which
    operators wait while the host issues one transfer; 0 where it is ahead of the device.
    """

    h2d_bandwidth: float
    d2h_bandwidth: float
    latency: float = 0.0
    d2h_latency: float | None = None
    issue: float = 0.0

    def __post_init__(self) -> None:
        if not (self.h2d_bandwidth > 0.0 and self.d2h_bandwidth > 0.0):
            raise PlanError(f"{self}: bandwidths must be positive")
        if not (0.0 <= self.latency < math.inf and 0.0 <= (self.d2h_latency or 0.0) < math.inf):
            raise PlanError(f"{self}: latency must be finite and not negative")
        if not 0.0 <= self.issue < math.inf:
            raise PlanError(f"{self}: the time to issue a transfer must be finite and not negative")

    def h2d_seconds(self, nbytes: int) -> float:
        """What a fetch of ``nbytes`` takes when nothing is in its way."""
        return self.latency + nbytes / self.h2d_bandwidth

    def d2h_seconds(self, nbytes: int) -> float:
        """What a write back of ``nbytes`` takes when nothing is in its way."""
        latency = self.latency if self.d2h_latency is None else self.d2h_latency
        return latency + nbytes / self.d2h_bandwidth


@dataclass(frozen=True, slots=True, kw_only=True)
class Actions:
    """What the executor does at one moment before the operator runs: first ``evict``, then ``fetch``, in
    order.

    ``evict``: drop these copies, written back first when dirty. ``fetch``: start these transfers; the
    operands of this moment come first (the operator waits for them), prefetches for later moments follow.
    """

    evict: tuple[int, ...] = ()
    fetch: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """One `Actions` per moment, repeated every iteration.

    ``start``: ids that are resident, or on their way, when a steady-state iteration begins (none if not
    cyclic). Byte totals are per iteration. ``predicted_seconds``: the simulated steady-state step, in which
    operators waited ``issue_seconds`` for the host to issue transfers (`Links.issue`).
    ``headroom``: bytes that the planner kept free of reused copies so that transfers may start early.
    """

    actions: tuple[Actions, ...]
    start: tuple[int, ...] = ()
    fetched_bytes: int
    written_back_bytes: int
    predicted_seconds: float
    policy: str
    headroom: int = 0
    issue_seconds: float = 0.0

    @property
    def moved_bytes(self) -> int:
        """Bytes over both directions per iteration: what `lower_bound` bounds."""
        return self.fetched_bytes + self.written_back_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A resident copy that may be evicted, as a policy sees it.

    ``next_use``, ``last_use``, ``fetched_at`` count moments (or seconds) on one clock; ``next_use`` is
    measured from now and is ``math.inf`` when the copy is never used again or nothing is known; larger
    ``last_use`` is more recent.
    """

    tensor: int
    nbytes: int
    next_use: float
    last_use: float
    fetched_at: float
    dirty: bool


class Policy(Protocol):
    """Chooses who leaves. Stateless: the same candidates give the same victims."""

    @property
    def name(self) -> str:
        """What its schedules say of where they come from (`Schedule.policy`)."""
        ...

    def victims(self, candidates: Sequence[Candidate], nbytes: int) -> Sequence[int]:
        """Tensors of ``candidates``, each once, to evict in this order; together at least ``nbytes``, if there are as
        many. They may be more. Where they are fewer, a plan adds those unused for longest; at run time it counts as if
        nothing more could leave."""
        ...
