"""A machine as a few numbers: a roofline for operators, and two directions of a link.

Owns the time that an operator or a transfer takes when nothing is in its way. It knows no traces and measures
nothing.
"""

import math
from dataclasses import dataclass, replace

from hetero.errors import PlanError

__all__ = ["GTX_1080_TI", "Link", "Machine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One direction of a link: a transfer of n bytes takes ``latency + n * seconds_per_byte`` seconds."""

    latency: float
    seconds_per_byte: float

    def __post_init__(self) -> None:
        if not (0.0 <= self.latency < math.inf and 0.0 <= self.seconds_per_byte < math.inf):
            raise PlanError(f"{self}: times must be finite and not negative")

    @staticmethod
    def of_bandwidth(bytes_per_second: float, *, latency: float = 0.0) -> "Link":
        """The link that moves ``bytes_per_second``; raises `PlanError` unless that is positive."""
        if not bytes_per_second > 0.0:
            raise PlanError(f"a link of {bytes_per_second} bytes per second: it must be positive")
        return Link(latency=latency, seconds_per_byte=1.0 / bytes_per_second)

    def seconds(self, nbytes: int) -> float:
        """That one transfer of ``nbytes`` takes."""
        return self.latency + nbytes * self.seconds_per_byte


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A device with a link to its host: operations and bytes of memory per second, both directions.

    ``launch_seconds``: added to every operator that does anything.
    """

    name: str
    flops: float
    memory_bandwidth: float
    h2d: Link
    d2h: Link
    launch_seconds: float = 0.0

    def __post_init__(self) -> None:
        if not (self.flops > 0.0 and self.memory_bandwidth > 0.0):
            raise PlanError(f"machine {self.name!r}: flops and memory_bandwidth must be positive")
        if not 0.0 <= self.launch_seconds < math.inf:
            raise PlanError(f"machine {self.name!r}: launch_seconds must be finite and not negative")

    def operator_seconds(self, flops: int, nbytes: int) -> float:
        """The roofline (Williams et al. 2009): as long as the slower of arithmetic and memory takes."""
        if not flops and not nbytes:
            return 0.0
        return self.launch_seconds + max(flops / self.flops, nbytes / self.memory_bandwidth)

    def slowed(self, factor: float) -> "Machine":
        """The same machine and link, its operators ``factor`` times as slow: kernels reach no roof. Raises
        `PlanError` for a factor that is not positive."""
        if not 0.0 < factor < math.inf:
            raise PlanError(f"machine {self.name!r} slowed by {factor}: the factor must be positive")
        return replace(
            self,
            flops=self.flops / factor,
            memory_bandwidth=self.memory_bandwidth / factor,
            launch_seconds=self.launch_seconds * factor,
        )


# 3584 cores at 1.582 GHz, two operations each; 352 bits of GDDR5X at 11 Gb/s. The transfer times are those that
# the AutoSwap paper (Zhang et al. 2019) measured on one, for blocks of 1 MB and more.
GTX_1080_TI = Machine(
    name="GTX 1080 Ti",
    flops=11.34e12,
    memory_bandwidth=484e9,
    h2d=Link(latency=9.7e-6, seconds_per_byte=0.0823e-9),
    d2h=Link(latency=47.2e-6, seconds_per_byte=0.0756e-9),
)
