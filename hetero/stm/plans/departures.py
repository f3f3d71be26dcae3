"""Iterations that are another way than their plan.

Owns when so much speaks against a plan that the iteration is to be measured again. Measuring costs about what it costs
to fetch every parameter once, and some models take another path every time: so it is done when as much has been lost,
and the next time when twice as much has been. Until then the plan is used (`hetero.stm.running.executor`).
"""

from collections import defaultdict
from collections.abc import Hashable

__all__ = ["Departures"]

_ENOUGH = 8  # iterations, however little is lost in each


class Departures:
    """Of all kinds of iterations of one manager; ``keys`` says which. Answers whether to measure those again."""

    def __init__(self) -> None:
        self._times: dict[Hashable, int] = defaultdict(int)  # that it was measured again
        self._lost: dict[Hashable, int] = defaultdict(int)
        # Moments that each of so many iterations, the latest, has left out.
        self._omitted: dict[Hashable, tuple[frozenset[int], int]] = {}

    def note_more(self, keys: Hashable, *, lost: int, parameters: int) -> bool:
        """There was more in one than its plan knows, a branch with the same shapes, a layer unfrozen, which cost
        ``lost`` fetches beside the plan's. ``parameters``: that the plan knows."""
        self._omitted.pop(keys, None)
        self._lost[keys] += max(lost, parameters // _ENOUGH, 1)
        return self._lost[keys] >= parameters << self._times[keys]

    def note_less(self, keys: Hashable, moments: frozenset[int]) -> bool:
        """One left out these ``moments`` of its plan, or none, and had nothing more. The plan serves it as well, and
        fetches in vain; what all leave out should not be in it."""
        always, times = self._omitted.pop(keys, (moments, 0))
        if not always & moments:
            return False
        self._omitted[keys] = always & moments, times + 1
        return times + 1 >= _ENOUGH << self._times[keys]

    def note_measured(self, keys: Hashable) -> None:
        """They will be."""
        self._times[keys] += 1
        self._lost[keys] = 0
        self._omitted.pop(keys, None)
