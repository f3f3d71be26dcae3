"""What an iteration's times say: each period's own time, gradients' ways home, how fast copies really were.

Owns the reading of timed segments (`hetero.msc.segments`). Invariant: own times, what compute waited for and what it
waited while transfers were issued add up to the time from the iteration's first event to its last.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hetero.msc.periods import Period, seconds_between
from hetero.msc.segments import Copy, Segment

__all__ = ["CopyTime", "IterationTimes", "PeriodTimes", "read_times"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeriodTimes:
    """``seconds``: own time, until the next operator begins: the library's work at sampling moments included, but for
    those at which transfers are issued.
    ``sends``: parameters whose gradients go home, their bytes, and own time until then."""

    seconds: float
    sends: tuple[tuple[int, int, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyTime:
    """One transfer."""

    is_upload: bool
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationTimes:
    """``segments``: the periods of each. ``seconds``: from the first event to the last. ``queued``: parameters whose
    updates were left to be done later, in order. ``issued``: transfers; operators waited ``issue_seconds`` while the
    host issued them."""

    segments: tuple[tuple[PeriodTimes, ...], ...]
    seconds: float
    copies: tuple[CopyTime, ...]
    queued: tuple[int, ...]
    issued: int
    issue_seconds: float


def read_times(segments: Sequence[Segment]) -> IterationTimes | None:
    """The times of an iteration that was timed as a whole and is over; None if some of it was not.

    Waits for the device to reach the end. The segments' events are dropped.
    """
    periods = [period for segment in segments for period in segment.periods]
    opened, closed = segments[0].opened, segments[-1].closed
    whole = all(segment.timed and segment.complete for segment in segments)
    if not whole or opened is None or closed is None or any(period.begin is None for period in periods):
        return None
    for period, following in zip(periods, [*periods[1:], None], strict=True):
        end = closed if following is None else following.begin
        assert end is not None
        period.read_times(end, after=following)
    lead = _lead(periods[0], opened)
    rows = [PeriodTimes(seconds=period.seconds, sends=period.sends) for period in periods]
    # What the library does before the iteration's first operator comes, around the cycle, after its last one.
    rows[-1] = PeriodTimes(seconds=rows[-1].seconds + lead, sends=rows[-1].sends)
    times = IterationTimes(
        segments=_by_segment(rows, segments),
        seconds=seconds_between(opened, closed),
        copies=tuple(_copy_time(copy) for segment in segments for copy in segment.copies if copy.end.query()),
        queued=next((segment.queued for segment in reversed(segments) if segment.queued), ()),
        issued=sum(period.issued for period in periods),
        issue_seconds=sum(period.issue_seconds for period in periods),
    )
    for segment in segments:
        segment.opened = segment.closed = None
        segment.copies = []
        for period in segment.periods:
            period.reached = period.begin = period.end = None
            period.waits, period.gradients = [], []
    return times


def _lead(first: Period, opened: torch.Event) -> float:
    assert first.begin is not None
    return max(0.0, seconds_between(opened, first.begin) - first.waited_seconds - first.issue_seconds)


def _by_segment(
    rows: Sequence[PeriodTimes], segments: Sequence[Segment]
) -> tuple[tuple[PeriodTimes, ...], ...]:
    found, begin = [], 0
    for segment in segments:
        found.append(tuple(rows[begin : begin + len(segment.periods)]))
        begin += len(segment.periods)
    return tuple(found)


def _copy_time(copy: Copy) -> CopyTime:
    seconds = seconds_between(copy.begin, copy.end)
    return CopyTime(is_upload=copy.is_upload, nbytes=copy.nbytes, seconds=seconds)
