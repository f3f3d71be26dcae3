"""Iterations that are another way than their plan.

Owns when so much speaks against a plan that the iteration is to be measured again. Measuring costs about what it costs
to fetch every parameter once, and some models take another path every time: so it is done when as much has been lost,
and the next time when twice as much has been. Until then the plan is used (`hetero.stm.running.executor`).
"""

from collections import Counter
from collections.abc import Hashable

__all__ = ["Departures"]

_ENOUGH = 8  # iterations, however little is lost in each
# Iterations with much less than was measured; and where more has passed the budget, which may come again, as at the end
# of an epoch.
_LONG, _VERY_LONG = 32, 256


class Departures:
    """Of all kinds of iterations of one manager; ``keys`` says which. Answers whether to measure those again."""

    def __init__(self) -> None:
        # Counters: asking for a kind that nothing is known of leaves nothing, and there may be as many as iterations.
        self._times: Counter[Hashable] = Counter()  # that it was measured again
        self._lost: Counter[Hashable] = Counter()
        # Moments that each of so many iterations, the latest, has left out.
        self._omitted: dict[Hashable, tuple[frozenset[int], int]] = {}
        # So many in a row had much less than was measured, and so often it was measured again for that.
        self._with_less: Counter[Hashable] = Counter()
        self._times_less: Counter[Hashable] = Counter()

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

    def note_unused(self, keys: Hashable, *, is_much: bool, has_passed: bool) -> bool:
        """All through one there was much less beside model data than its plan was made for (``is_much``), or was not:
        what somebody held for a while, when it was measured or when it had outgrown its plan, may have gone for good.
        ``has_passed``: the budget was passed by it, or would have been."""
        if not is_much:
            self._with_less.pop(keys, None)
            return False
        self._with_less[keys] += 1
        if self._with_less[keys] < (_VERY_LONG if has_passed else _LONG) << self._times_less[keys]:
            return False
        del self._with_less[keys]
        self._times_less[keys] += 1
        return True

    def note_measured(self, keys: Hashable) -> None:
        """They will be."""
        self._times[keys] += 1
        for known in (self._lost, self._with_less, self._omitted):
            known.pop(keys, None)
