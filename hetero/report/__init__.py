"""What users look at: statistics, tables, pictures. Reads; changes nothing."""

from hetero.report.plot import plot_stats
from hetero.report.stats import MemoryStats, collect_stats

__all__ = ["MemoryStats", "collect_stats", "plot_stats"]
