"""MemStatsCollector: what each period of an iteration uses, moves and waits for.

A *sampling moment* is the instant before an operator, before any layout change; a *period* lies between two of
them (Gemini). The collector measures and remembers; it changes no layout.
"""

from hetero.msc.collector import MemStatsCollector
from hetero.msc.peaks import PeakKeeper, unseen
from hetero.msc.periods import (
    AskedOf,
    BackwardSignature,
    Gradient,
    Period,
    PeriodStats,
    Phase,
    SegmentKey,
    Wait,
)
from hetero.msc.segments import Copy, Segment, period_stats
from hetero.msc.timing import CopyTime, IterationTimes, PeriodTimes, read_times

__all__ = [
    "AskedOf",
    "BackwardSignature",
    "Copy",
    "CopyTime",
    "Gradient",
    "IterationTimes",
    "MemStatsCollector",
    "PeakKeeper",
    "Period",
    "PeriodStats",
    "PeriodTimes",
    "Phase",
    "Segment",
    "SegmentKey",
    "Wait",
    "period_stats",
    "read_times",
    "unseen",
]
