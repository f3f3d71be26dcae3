"""MemStatsCollector: what each period of an iteration uses, moves and waits for.

A *sampling moment* is the instant before an operator, before any layout change; a *period* lies between two of
them (Gemini). The collector measures and remembers; it changes no layout.
"""

from hetero.msc.collector import MemStatsCollector, Segment, period_stats
from hetero.msc.peaks import PeakKeeper
from hetero.msc.periods import Period, PeriodStats, Phase, SegmentKey

__all__ = [
    "MemStatsCollector",
    "PeakKeeper",
    "Period",
    "PeriodStats",
    "Phase",
    "Segment",
    "SegmentKey",
    "period_stats",
]
