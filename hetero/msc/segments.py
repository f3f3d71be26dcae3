"""The segment: one managed forward, one backward, one step.

Owns the record of what happened in it. Invariant: periods never misalign, because they are kept per segment, and a
segment's key holds everything that decides which operators run: training or not, shapes of the inputs, how many
forwards wait for their backward. A segment that has not been seen before is sampled by itself, whatever surrounds it.
"""

from dataclasses import dataclass, field

import torch

from hetero.msc.periods import Period, PeriodStats, SegmentKey

__all__ = ["Copy", "Segment", "period_stats"]


@dataclass(frozen=True, slots=True)
class Copy:
    """One transfer, between two events on its stream."""

    is_upload: bool
    nbytes: int
    begin: torch.Event
    end: torch.Event


@dataclass(slots=True)
class Segment:
    """One forward, backward or step, as it happened. ``complete`` stays False if it was left by an exception.

    ``sampled``: its memory was measured, period by period, which takes time. ``timed``: it was not, and its periods'
    times were, from ``opened`` to ``closed``; so were its ``copies``. ``left_bytes``: non-model data on the device when
    the caller, with what it has made of a forward's results, called a backward. ``has_gradients``: some were there
    when it began. ``by_values``: so far as it was guarded, an operator ran in it whose memory depends on values.
    ``brought_back``: copies and saved tensors that its plan has on the device when it begins, and that had left since
    the segment before. ``others_ran``: since its iteration began, segments of other managers of the device have, or
    one of theirs was under way when it began.
    """

    key: SegmentKey
    sampled: bool
    complete: bool = False
    periods: list[Period] = field(default_factory=list)
    timed: bool = False
    opened: torch.Event | None = None
    closed: torch.Event | None = None
    copies: list[Copy] = field(default_factory=list)
    left_bytes: int | None = None
    has_gradients: bool = False
    by_values: bool = False
    queued: tuple[int, ...] = ()  # parameters whose updates were left to be done later, in order
    brought_back: int = 0
    others_ran: bool = False

    @property
    def missed_fetches(self) -> int:
        """That its plan did not foresee, ahead of their use or not."""
        return self.brought_back + sum(period.unplanned_fetches for period in self.periods)


def period_stats(segments: list[Segment]) -> list[PeriodStats]:
    """Freeze the periods of an iteration. Only sampled ones; the device must have reached their end."""
    rows: list[PeriodStats] = []
    for segment in segments:
        for period in segment.periods:
            if not period.is_sampled:
                continue
            period.read_events()
            # What has become model data within the period, a gradient, is none that was there when it began.
            non_model = max(
                period.non_model_bytes + period.excess_bytes + period.others_home_bytes,
                period.peak_bytes - period.model_bytes,
            )
            rows.append(
                PeriodStats(
                    index=len(rows),
                    operator=str(period.name),
                    phase=segment.key.phase.value,
                    device_model_bytes=period.model_bytes - period.activation_bytes,
                    device_activation_bytes=period.activation_bytes,
                    activation_out_bytes=period.activation_out_bytes,
                    activation_in_bytes=period.activation_in_bytes,
                    device_non_model_bytes=non_model,
                    device_peak_bytes=period.peak_bytes,
                    host_model_bytes=period.host_model_bytes,
                    host_non_model_bytes=max(0, period.host_bytes - period.host_model_bytes),
                    fetched_bytes=period.fetched_bytes,
                    evicted_bytes=period.evicted_bytes,
                    written_bytes=period.written_bytes,
                    stall_seconds=period.stall_seconds,
                    seconds=period.seconds,
                )
            )
    return rows
