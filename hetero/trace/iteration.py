"""Finding the repeating iteration in an endless stream of operators.

Owns SmartPool's test (Zhang et al., "Efficient Memory Management for GPU-based Deep Learning Systems", 2019):
the stream repeats when consecutive subsequences are equal. Equal layers repeat too, so subsequences are only
cut where a training iteration can begin: at the first forward operator after parameters were updated. It
knows no storages.
"""

from hetero.errors import ConfigError

__all__ = ["IterationFinder"]


class IterationFinder:
    """Fed one operator after the other, tells when the last iteration has repeated.

    An iteration is the shortest run of such segments that equals the run before it, ``repeats`` times in all.
    A loop whose steps are alike at first and differ later (five critic steps, then one of the generator)
    needs a larger ``repeats`` than the length of the like part.
    """

    def __init__(self, *, repeats: int = 2) -> None:
        if repeats < 2:
            raise ConfigError(f"repeats={repeats}: an iteration repeats at least 2 times")
        self._repeats = repeats
        self._position = 0
        self._updated = False
        self._segment: list[int] = []
        self._numbers: dict[tuple[int, ...], int] = {}
        self._segments: list[int] = []
        self._ends: list[int] = []

    def feed(self, signature: int, *, forward: bool, updates: bool) -> tuple[int, int] | None:
        """Take the next operator; the last iteration's ``[begin, end)`` if it has just been found.

        ``signature`` is equal for operators that do the same on the same sizes, ``forward`` says that it
        belongs to a forward phase, ``updates`` that it writes a parameter.
        """
        found = self.close() if forward and self._updated else None
        self._updated = updates or (self._updated and not forward)
        self._segment.append(signature)
        self._position += 1
        return found

    def close(self) -> tuple[int, int] | None:
        """End the running segment here, as at the end of the stream, and look for an iteration."""
        if not self._updated:
            return None
        key = tuple(self._segment)
        self._segments.append(self._numbers.setdefault(key, len(self._numbers)))
        self._ends.append(self._position)
        self._segment = []
        self._updated = False
        length = self._period()
        if length is None:
            return None
        return (self._ends[-1 - length], self._ends[-1])

    def _period(self) -> int | None:
        """The fewest last segments that equal those before them, ``repeats`` times in all."""
        segments = self._segments
        for length in range(1, len(segments) // self._repeats + 1):
            tail = segments[-length:]
            if all(
                segments[len(segments) - (k + 1) * length : len(segments) - k * length] == tail
                for k in range(1, self._repeats)
            ):
                return length
        return None
