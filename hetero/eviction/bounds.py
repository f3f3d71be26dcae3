"""Bytes that no schedule can go below.

Owns `lower_bound`. First version: what is fetched however one chooses.
"""

from hetero.eviction.intervals import read_intervals
from hetero.eviction.model import Trace

__all__ = ["lower_bound"]


def lower_bound(trace: Trace) -> int:
    """Bytes (fetched and written back) per iteration that no schedule can go below."""
    return read_intervals(trace).compulsory_bytes
