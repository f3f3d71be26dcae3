"""What users look at: statistics, tables, pictures. Reads; changes nothing."""

from hetero.report.plan import Plan, PlannedMoment, describe_plan
from hetero.report.plot import plot_stats
from hetero.report.stats import MemoryStats, collect_stats

__all__ = ["MemoryStats", "Plan", "PlannedMoment", "collect_stats", "describe_plan", "plot_stats"]
