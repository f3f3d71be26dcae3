"""Iterations that need more memory than was measured of them.

Owns what was seen of it, and what follows: how much more to keep free from the next one on, and whether that one is to
be measured again, because only measuring tells what it takes. Whoever sees it is `hetero.stm.running.executor`, and,
while nothing is intercepted, `hetero.stm.settled`; plans are made in `hetero.stm.plans.planbook`.
"""

from collections import Counter
from collections.abc import Callable, Hashable

__all__ = ["Outgrown"]

_SPARE = 2  # times as much as was seen is kept free for what may grow on, so that this stays rare


class Outgrown:
    """Of all kinds of iterations of one manager; ``keys`` says which."""

    def __init__(self) -> None:
        self._drift = 0
        self._passes_budget = False
        self._times: Counter[Hashable] = Counter()
        self._unsure: set[Hashable] = set()

    def note(self, nbytes: int, *, passes_budget: bool = False) -> None:
        """In the iteration that runs there is so much more non-model data than its plan was made for.

        ``passes_budget``: where nothing of ours runs that could make room, so that the budget was passed by it, or
        would have been. Then it is the most that was there, not what there was at some moment.
        """
        self._drift = max(self._drift, nbytes)
        self._passes_budget = self._passes_budget or passes_budget

    def keep_free(self, keys: Hashable, *, missed: bool, room: Callable[[], int]) -> int:
        """The iteration is over: how many more bytes its plan should keep free, or 0. ``missed``: it cost fetches.
        ``room``: bytes that the plan has for copies; of more than half of them no more is kept free than was seen.

        What passes the budget whatever the plan keeps free is not planned for again and again, but at the 1st, 2nd,
        4th, 8th ... time.
        """
        drift, passes_budget = self._drift, self._passes_budget
        self._drift, self._passes_budget = 0, False
        if passes_budget:
            self._times[keys] += 1
            if self._times[keys].bit_count() != 1:
                return 0
            self._unsure.add(keys)
            return max(0, drift)
        return max(drift, min(_SPARE * drift, room() // 2)) if missed and drift > 0 else 0

    def is_unsure(self, keys: Hashable) -> bool:
        """How much it takes is not known before it has been measured again."""
        return keys in self._unsure

    def note_measured(self, keys: Hashable) -> None:
        """It is known now."""
        self._unsure.discard(keys)
