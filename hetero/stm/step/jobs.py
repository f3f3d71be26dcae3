"""What the queue's thread does for one parameter, and for several small ones together.

Owns the order: gradient down, changes, copies of home up, then the update. Invariant: kernels run as they would
have on the thread that called ``optimizer.step()``.

[Note: threads]
As many as there: reductions (Adafactor, Muon) have other bits with other numbers of them. Fewer, for the sake of the
threads that feed the device, cannot be had for this thread alone: threads made later would take them over.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from hetero.devices import CopyEngine
from hetero.stm.deferred import Batch, Update
from hetero.stm.homeaccess import Arrivals
from hetero.stm.tensors.managed import ManagedTensor
from hetero.stm.updates.captured import ParameterUpdate, run_together

__all__ = ["Captured", "Surroundings", "change", "make_job", "make_update", "wait"]

# Above, the call of step costs less than a tenth of the update.
_SMALL_BYTES = 256 << 10

_DENORMAL = 1e-310  # half of it is 0 where a thread flushes such numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """One parameter's update and what has to come before it."""

    tensor: ManagedTensor
    update: ParameterUpdate
    arrivals: Arrivals
    gradient: torch.Tensor


def wait(engine: CopyEngine, item: Captured) -> None:
    """The gradient is down, and home may be written."""
    if item.arrivals.gradient is not None:
        engine.host_after_download(item.arrivals.gradient, item.gradient)
    engine.host_after_uploads(item.arrivals.uploads, item.tensor.home)


def change(engine: CopyEngine, item: Captured) -> None:
    """Make of the gradient, which is down, what was asked for."""
    for asked in item.arrivals.changes:
        asked.apply(engine, item.gradient)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What host kernels depend on besides their operands, and threads do not share: how a reduction is divided, and
    whether denormal numbers are."""

    threads: int
    flushes: bool

    @staticmethod
    def of_this_thread() -> "Surroundings":
        """As they are now."""
        return Surroundings(torch.get_num_threads(), _DENORMAL * 0.5 == 0.0)

    def take_over(self) -> None:
        """Make this thread's the same; what already is costs nothing."""
        mine = Surroundings.of_this_thread()
        if mine.threads != self.threads:
            torch.set_num_threads(self.threads)
        if mine.flushes != self.flushes:
            torch.set_flush_denormal(self.flushes)


class _Job:
    """An update with what comes before it."""

    __slots__ = ("engine", "item", "note", "surroundings")

    def __init__(
        self,
        engine: CopyEngine,
        item: Captured,
        surroundings: Surroundings,
        note: Callable[[int, float], None],
    ) -> None:
        self.engine = engine
        self.item = item
        self.surroundings = surroundings
        self.note = note

    def __call__(self) -> None:
        _run_jobs([self])


def _run_jobs(jobs: Sequence["_Job"]) -> None:
    jobs[0].surroundings.take_over()
    for job in jobs:
        wait(job.engine, job.item)
    begin = time.perf_counter()
    for job in jobs:
        change(job.engine, job.item)
        job.engine.before_host_write(job.item.tensor.home)
    run_together([job.item.update for job in jobs])
    for job in jobs:
        job.item.tensor.refresh_low()
    jobs[0].note(sum(job.item.tensor.home.nbytes for job in jobs), time.perf_counter() - begin)


def make_job(
    engine: CopyEngine, item: Captured, surroundings: Surroundings, note: Callable[[int, float], None]
) -> Callable[[], None]:
    """What `make_update` runs, for one parameter alone."""
    return _Job(engine, item, surroundings, note)


def make_update(
    engine: CopyEngine, item: Captured, surroundings: Surroundings, note: Callable[[int, float], None]
) -> Update:
    """``note`` is told how many bytes of parameters took how many seconds."""
    key = item.update.batch_key
    small = key is not None and item.update.nbytes <= _SMALL_BYTES
    batch = Batch(key=key, nbytes=item.update.nbytes, run_all=_run_jobs) if small else None
    return Update(_Job(engine, item, surroundings, note), batch)
