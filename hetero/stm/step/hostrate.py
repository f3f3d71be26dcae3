"""How fast the host updates parameters: what its queue has done so far, or a step in its place.

Owns the count. Plans are made with it (`hetero.stm.plans.timings`).
"""

from hetero.stm.plans.timings import Timings

__all__ = ["HostRate"]


class HostRate:
    """Of one optimizer; ``timings`` ask it. Sizes are those of parameters, in bytes."""

    def __init__(self, timings: Timings) -> None:
        self._nbytes = 0
        self._seconds = 0.0
        self._fastest: float | None = None  # seconds a byte
        timings.host_work = lambda: (self._nbytes, self._seconds)
        timings.host_fastest = lambda: self._fastest or 0.0

    def note(self, nbytes: int, seconds: float) -> None:
        """The queue's thread has updated ``nbytes``, or a step has where that gets none."""
        self._nbytes += nbytes
        self._seconds += seconds
        if nbytes:
            rate = seconds / nbytes
            self._fastest = rate if self._fastest is None else min(self._fastest, rate)

    def has_timed(self, nbytes: int) -> bool:
        """So many have been updated."""
        return self._nbytes >= nbytes

    def seconds_for(self, nbytes: int) -> float:
        """That updating ``nbytes`` takes; 0 before anything has been timed."""
        return nbytes * self._seconds / max(self._nbytes, 1)
