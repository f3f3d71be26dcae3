"""`MemoryStats`: what a managed model used and moved, as one frozen value.

Owns the user's view of the numbers; they are counted in `hetero.msc` and `hetero.stm.tensors.state`.
"""

import dataclasses
from dataclasses import dataclass

from rich import box
from rich.table import Table

from hetero.config import Config
from hetero.devices import Accelerator
from hetero.msc import Period, PeriodStats, period_stats
from hetero.report.text import ROWS, as_text
from hetero.stm import Kind, StatefulTensorMgr, Tier
from hetero.stm.plans.cycles import Followed
from hetero.units import format_bytes, format_seconds

__all__ = ["MemoryStats", "collect_stats"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryStats:
    """A snapshot. All sizes in bytes.

    Attributes:
        device_budget: the cap.
        peak_device_bytes: highest device memory in use from `hetero.manage` to `close`, of whatever kind.
        model_data_bytes: parameters, gradients, optimizer states and buffers, wherever they are. Each counted
            once: a device copy of a parameter is not model data twice, nor is its low-precision twin at home.
        device_model_bytes, host_model_bytes: model data by where it is now, copies included.
        bytes_moved: over both directions in the last complete iteration; 0 while everything fits.
        lower_bound_bytes: what any schedule would have had to move in that iteration under this budget (interval
            linear program, Berger et al. 2018), gradients included, with the same parameters living on the device, had
            it left the copies that it found; less those that it did not leave, and less saved tensors that backward
            needed before they had left. None where the iteration followed no plan, or moved less than that, because
            something was not there to be moved.
        predicted_seconds: simulated time of a planned iteration; 0.0 before there is a plan.
        total_fetched_bytes, total_written_bytes: host to device and device to host since `hetero.manage`.
        activation_out_bytes, activation_in_bytes: saved tensors that left the device, and that came back, since
            `hetero.manage`.
        activations_kept: saved tensors on the device that were not worth moving, or not safe to, since then.
        stall_seconds: time compute waited for copies since `hetero.manage`, as the host saw it.
        unplanned_fetches: fetches that no plan foresaw, since `hetero.manage`; warm-up is not counted.
        tried_updates, taken_back_updates: updates at home that were begun in backward, and those of them that were not
            wanted as they were, since `hetero.manage`.
        settled_forwards: forwards that ran without interception because everything fits, since `hetero.manage`; each
            after one check of its inputs and of the memory in use.
        by_kind: bytes per tier and kind.
        periods: the periods of the last measured iteration that trained; if none did, of the last.
    """

    device_budget: int
    peak_device_bytes: int
    model_data_bytes: int
    device_model_bytes: int
    host_model_bytes: int
    bytes_moved: int
    lower_bound_bytes: int | None
    predicted_seconds: float
    total_fetched_bytes: int
    total_written_bytes: int
    activation_out_bytes: int
    activation_in_bytes: int
    activations_kept: int
    stall_seconds: float
    unplanned_fetches: int
    tried_updates: int
    taken_back_updates: int
    settled_forwards: int
    by_kind: dict[str, dict[str, int]]
    periods: list[PeriodStats]

    def to_dict(self) -> dict[str, object]:
        """The same as plain values, ready for JSON."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        return as_text(self._summary(), *([self._table()] if self.periods else []))

    def _summary(self) -> Table:
        table = Table(show_header=False, box=None)
        for name, value in (
            ("device budget", format_bytes(self.device_budget)),
            ("peak on device", format_bytes(self.peak_device_bytes)),
            ("model data", format_bytes(self.model_data_bytes)),
            ("moved per iteration", format_bytes(self.bytes_moved)),
            (
                "lower bound, with gradients",
                "not known: the iteration was not as planned"
                if self.lower_bound_bytes is None
                else format_bytes(self.lower_bound_bytes),
            ),
            (
                "activations moved so far",
                f"{format_bytes(self.activation_out_bytes)} out, {format_bytes(self.activation_in_bytes)} in",
            ),
            ("unplanned fetches", str(self.unplanned_fetches)),
            ("stalled", format_seconds(self.stall_seconds)),
        ):
            table.add_row(name, value)
        if self.tried_updates:
            table.add_row(
                "updates begun in backward",
                f"{self.tried_updates}, {self.taken_back_updates} of them taken back",
            )
        return table

    def _table(self) -> Table:
        table = Table(title="Periods of the last measured iteration", box=box.SIMPLE_HEAD)
        for column in ("#", "operator", "phase"):
            table.add_column(column, no_wrap=True, max_width=50)
        for column in ("model", "non-model", "peak", "fetched", "evicted", "written", "stall", "time"):
            table.add_column(column, justify="right", no_wrap=True)
        for period in self.periods[:ROWS]:
            table.add_row(
                str(period.index),
                period.operator,
                period.phase,
                *(
                    format_bytes(value)
                    for value in (
                        period.device_model_bytes,
                        period.device_non_model_bytes,
                        period.device_peak_bytes,
                        period.fetched_bytes,
                        period.evicted_bytes,
                        period.written_bytes,
                    )
                ),
                format_seconds(period.stall_seconds),
                format_seconds(period.seconds),
            )
        if len(self.periods) > ROWS:
            table.caption = f"{len(self.periods) - ROWS} more in stats.periods"
        return table


def collect_stats(
    stm: StatefulTensorMgr,
    accelerator: Accelerator,
    config: Config,
    *,
    settled_forwards: int,
    everything_fits: bool,
) -> MemoryStats:
    """A snapshot of a manager's numbers. Waits for the device if an iteration was being measured."""
    accelerator.synchronize()
    stm.close_books()
    ledger, total = stm.ledger, stm.collector.total
    segments = stm.plans.last_sampled
    moved = 0
    bound: int | None = 0
    if not everything_fits:
        moved = sum(_moved(period) for segment in stm.plans.last_segments for period in segment.periods)
        bound = _least(stm.cycles.followed, moved)
    plan = stm.plans.shown
    copies = ledger.nbytes(Tier.DEVICE, Kind.PARAMETER) + ledger.nbytes(Tier.DEVICE, Kind.GRADIENT)
    saved, saved_on_host = ledger.activation_bytes
    return MemoryStats(
        device_budget=config.device_budget,
        peak_device_bytes=stm.collector.peaks.highest,
        model_data_bytes=ledger.host_bytes
        + ledger.device_bytes
        - copies
        - saved
        - saved_on_host
        - stm.registry.twin_bytes
        - stm.trials.snapshot_bytes,
        device_model_bytes=ledger.device_bytes - saved,
        host_model_bytes=ledger.host_bytes - saved_on_host,
        bytes_moved=moved,
        lower_bound_bytes=bound,
        predicted_seconds=0.0 if plan is None else plan.schedule.predicted_seconds,
        total_fetched_bytes=total.fetched_bytes,
        total_written_bytes=total.written_bytes,
        activation_out_bytes=total.activation_out_bytes,
        activation_in_bytes=total.activation_in_bytes,
        activations_kept=stm.activations.kept,
        stall_seconds=total.stall_seconds,
        unplanned_fetches=total.unplanned_fetches,
        tried_updates=stm.trials.tried,
        taken_back_updates=stm.trials.taken_back,
        settled_forwards=settled_forwards,
        by_kind={
            tier.name.lower(): {kind.name.lower(): ledger.nbytes(tier, kind) for kind in Kind}
            for tier in Tier
        },
        periods=period_stats(segments),
    )


def _least(followed: Followed | None, moved: int) -> int | None:
    """`MemoryStats.lower_bound_bytes` of an iteration that has ``moved`` so many."""
    if followed is None or moved < followed.plan.moved_bytes - followed.missing_bytes:
        return None
    return max(0, followed.plan.least_bytes + followed.plan.gradient_bytes - followed.missing_bytes)


def _moved(period: Period) -> int:
    return (
        period.fetched_bytes + period.written_bytes + period.activation_out_bytes + period.activation_in_bytes
    )
