"""The values of a traced training step: operators, storages with their lives, and what can be read from them.

Owns `Operator`, `Storage` and `StepTrace`. Time is the operator's index: operator ``i`` runs during ``[i, i +
1)``, and a storage that is allocated by operator ``i`` and freed before operator ``j`` starts lives in ``[i,
j)``. Invariant: a `StepTrace` that exists is consistent (lives inside the step, operators refer to storages
alive when they run). Nothing here imports torch, records anything or touches files.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from hetero.errors import PlanError
from hetero.pool.problem import Buffer, Problem
from hetero.units import format_bytes, round_up

__all__ = ["KINDS", "PHASES", "Kind", "Operator", "Phase", "StepTrace", "Storage"]

Phase = Literal["forward", "backward", "step"]
Kind = Literal["parameter", "buffer", "gradient", "state", "input", "activation", "temporary"]

PHASES: tuple[Phase, ...] = get_args(Phase)
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One operator of the step: what it is called, where it belongs, and the ids of the storages it touches.

    An operator that updates in place both reads and writes; one that overwrites (``zero_``, ``copy_``'s
    target) only writes. Outputs are writes. ``module`` is the dotted name of the module whose forward runs,
    or ran when the operator's autograd node was made; the optimizer's class name during the step; empty where
    neither is known. ``flops``: multiplications and additions of matrix products, convolutions and attention
    (torch's own count); 0 for all else, whose time memory decides.
    """

    name: str
    phase: Phase
    module: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    flops: int = 0

    def __post_init__(self) -> None:
        if self.phase not in PHASES:
            raise PlanError(f"operator {self.name!r}: phase {self.phase!r} is not one of {', '.join(PHASES)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """One storage: ``nbytes`` bytes on ``device`` throughout the half-open life ``[begin, end)`` in
    operators.

    ``kind`` tells what it holds. ``input`` is anything else that was there before the step began (batch,
    masks); an ``activation`` is allocated in forward and still alive when backward starts; a ``temporary`` is
    not.
    """

    id: int
    begin: int
    end: int
    nbytes: int
    kind: Kind
    name: str
    device: str

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise PlanError(f"storage {self.id}: kind {self.kind!r} is not one of {', '.join(KINDS)}")
        if self.nbytes < 0:
            raise PlanError(f"storage {self.id} ({self.name}): size {self.nbytes} bytes is negative")
        if not 0 <= self.begin < self.end:
            raise PlanError(
                f"storage {self.id} ({self.name}): life [{self.begin}, {self.end}) is empty or before 0"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTrace:
    """One training step, operator by operator.

    ``span`` is the length of the step in operators; a trace read from a MiniMalloc CSV has a span but no
    operators. ``device`` is the device that sizes and peaks are asked of by default. ``source`` says where
    the trace comes from: ``"real"``, ``"fake"``, ``"snapshot"`` (a CUDA memory snapshot) or ``"csv"``.
    ``measured_peak_nbytes`` is the device allocator's own peak over the recorded step, where there is such an
    allocator.

    Raises `PlanError` for an empty step, a repeated storage id, a life beyond the step, or an operator that
    touches a storage which is not alive.
    """

    operators: tuple[Operator, ...]
    storages: tuple[Storage, ...]
    span: int
    device: str
    source: str
    measured_peak_nbytes: int | None = None

    def __post_init__(self) -> None:
        if self.span <= 0:
            raise PlanError("the trace has no operators: the step ran none that touches a tensor")
        if self.operators and len(self.operators) != self.span:
            raise PlanError(f"the trace has {len(self.operators)} operators, its span says {self.span}")
        lives = {storage.id: storage for storage in self.storages}
        if len(lives) != len(self.storages):
            raise PlanError(f"{len(self.storages) - len(lives)} storage ids are repeated; ids must be unique")
        for storage in self.storages:
            if storage.end > self.span:
                raise PlanError(
                    f"storage {storage.id} ({storage.name}) lives until {storage.end}, "
                    f"beyond the step's {self.span} operators"
                )
        _check_touches(self.operators, lives)

    @property
    def devices(self) -> tuple[str, ...]:
        """Every device on which the step holds storages, sorted."""
        return tuple(sorted({storage.device for storage in self.storages}))

    def live_at(self, index: int, *, device: str | None = None) -> tuple[Storage, ...]:
        """The storages alive while operator ``index`` runs, largest first."""
        on = device or self.device
        live = [s for s in self.storages if s.begin <= index < s.end and s.device == on]
        return tuple(sorted(live, key=lambda s: (-s.nbytes, s.id)))

    def load_curve(
        self, *, device: str | None = None, kind: Kind | None = None, granularity: int = 1
    ) -> npt.NDArray[np.int64]:
        """Live bytes on ``device`` while each operator runs: int64, shape (span,).

        ``kind`` restricts it to one kind of storage. ``granularity`` rounds every storage up to a multiple,
        as an allocator does: 512 for CUDA's caching allocator.
        """
        on = device or self.device
        change = np.zeros(self.span + 1, dtype=np.int64)
        for storage in self.storages:
            if storage.device == on and kind in (None, storage.kind):
                nbytes = round_up(storage.nbytes, granularity)
                change[storage.begin] += nbytes
                change[storage.end] -= nbytes
        return np.cumsum(change[:-1])

    def peak_nbytes(self, *, device: str | None = None, granularity: int = 1) -> int:
        """The most bytes alive at once on ``device``: the lower bound of any placement's footprint."""
        return int(self.load_curve(device=device, granularity=granularity).max())

    def peak_at(self, *, device: str | None = None) -> int:
        """The index of the first operator during which the load is at its peak."""
        return int(self.load_curve(device=device).argmax())

    def phase_peaks(self, *, device: str | None = None) -> dict[Phase, int]:
        """The peak load in bytes of each phase that the step has, in the order of `PHASES`."""
        load = self.load_curve(device=device)
        peaks: dict[Phase, int] = {}
        for phase in PHASES:
            indices = [i for i, operator in enumerate(self.operators) if operator.phase == phase]
            if indices:
                peaks[phase] = int(load[indices].max())
        return peaks

    def peak_difference(self, *, granularity: int = 1) -> float | None:
        """(predicted peak - measured peak) / measured peak; None where no allocator measured one."""
        if not self.measured_peak_nbytes:
            return None
        return self.peak_nbytes(granularity=granularity) / self.measured_peak_nbytes - 1.0

    def to_problem(self, *, device: str | None = None, granularity: int = 1) -> Problem:
        """The placement problem of the storages on ``device``; storages without bytes are left out."""
        on = device or self.device
        return Problem(
            buffers=tuple(
                Buffer(id=s.id, begin=s.begin, end=s.end, nbytes=round_up(s.nbytes, granularity))
                for s in self.storages
                if s.device == on and s.nbytes
            ),
            name=f"{self.source} trace on {on}",
        )

    def table(self, *, at: int | None = None, limit: int = 15, device: str | None = None) -> str:
        """The biggest contributors at operator ``at`` (default: the peak) as text: kinds, then storages."""
        index = self.peak_at(device=device) if at is None else at
        live = self.live_at(index, device=device)
        total = sum(storage.nbytes for storage in live)
        lines = [f"{format_bytes(total)} live in {len(live)} storages on {device or self.device}"]
        lines[0] += f" at operator {index} of {self.span}{_describe(self.operators, index)}"
        if self.measured_peak_nbytes and (difference := self.peak_difference()) is not None:
            measured = format_bytes(self.measured_peak_nbytes)
            lines.append(
                f"the allocator measured a peak of {measured}: the trace is {100 * difference:+.2f} % off"
            )
        lines += [f"  {kind:<11}{format_bytes(n):>11}{_share(n, total)}" for kind, n in _by_kind(live)]
        lines.append("largest:")
        for storage in live[:limit]:
            row = f"  {storage.kind:<11}{format_bytes(storage.nbytes):>11}{_share(storage.nbytes, total)}"
            lines.append(f"{row}  [{storage.begin}, {storage.end})  {storage.name}")
        if len(live) > limit:
            rest = sum(storage.nbytes for storage in live[limit:])
            lines.append(f"  {len(live) - limit} more {format_bytes(rest):>11}{_share(rest, total)}")
        return "\n".join(lines)


def _check_touches(operators: Iterable[Operator], lives: dict[int, Storage]) -> None:
    for index, operator in enumerate(operators):
        for touched in (*operator.reads, *operator.writes):
            storage = lives.get(touched)
            if storage is None or not storage.begin <= index < storage.end:
                what = "unknown" if storage is None else f"alive in [{storage.begin}, {storage.end})"
                raise PlanError(f"operator {index} ({operator.name}) touches storage {touched}, {what}")


def _describe(operators: tuple[Operator, ...], index: int) -> str:
    if not operators:
        return ""
    operator = operators[index]
    return f": {operator.name} in {operator.phase} of {operator.module or 'no module'}"


def _by_kind(live: tuple[Storage, ...]) -> list[tuple[Kind, int]]:
    totals: dict[Kind, int] = {}
    for storage in live:
        totals[storage.kind] = totals.get(storage.kind, 0) + storage.nbytes
    return sorted(totals.items(), key=lambda item: -item[1])


def _share(nbytes: int, total: int) -> str:
    return f"{100.0 * nbytes / total:6.1f} %" if total else "     - %"
