"""Iterations that need more memory than was measured of them.

Owns what was seen of it, and what follows: how much more to keep free from the next one on, and whether that one is to
be measured again, because only measuring tells what it takes. It is seen by `growth`, `between` and `callers` of
`hetero.stm.running`, and, while nothing is intercepted, by `hetero.stm.settled`; plans are made in
`hetero.stm.plans.planbook`.
"""

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass

__all__ = ["SPARE", "Outgrown"]

SPARE = 2  # times as much as was seen is kept free for what may grow on, so that this stays rare

# What passed the budget, or would have: an iteration that followed its plan; only the next one's; one that nobody
# intercepted, of which no more is known than that, so that the first that follows a plan has to tell how much it takes.
_WHERE = _NOW, _NEXT, _ELSEWHERE = "now", "next", "elsewhere"

_PATIENCE = 8  # iterations that begin as one that is to be measured again, and are others


@dataclass(slots=True)
class _Seen:
    """In an iteration."""

    drift: int = 0
    passes_budget: bool = False
    is_next: bool = True


class Outgrown:
    """Of all kinds of iterations of one manager; ``keys`` says which.

    Attributes:
        trains: what runs now belongs to an iteration that trains. One that does not may run in its middle.
    """

    def __init__(self) -> None:
        self.trains = False
        self._seen = {False: _Seen(), True: _Seen()}
        self._times: Counter[tuple[Hashable, str]] = Counter()
        self._unsure: dict[Hashable, int] = {}  # with how many others have begun alike since
        self._elsewhere: dict[Hashable, int] = {}

    def note(self, nbytes: int, *, passes_budget: bool = False, is_next: bool = False) -> None:
        """In the iteration that runs there is so much more non-model data than its plan was made for.

        ``passes_budget``: where nothing of ours runs that could make room, so that the budget was passed by it, or
        would have been. Then it is the most that was there, not what there was at some moment. ``is_next``: not this
        time, for which room had been made; but the next one may, whose plan knows only why it was made.
        """
        seen = self._seen[self.trains]
        seen.drift = max(seen.drift, nbytes)
        seen.passes_budget = seen.passes_budget or passes_budget
        seen.is_next = seen.is_next and (is_next or not passes_budget)

    def note_elsewhere(self, keys: Hashable, nbytes: int) -> None:
        """An iteration with these has passed the budget, by what its plan should keep free; not the one that runs."""
        self._elsewhere[keys] = max(nbytes, self._elsewhere.get(keys, 0))

    def keep_free_elsewhere(self) -> dict[Hashable, int]:
        """An iteration is over: how many more bytes plans should keep free for what `note_elsewhere` was told."""
        noted, self._elsewhere = self._elsewhere, {}
        return {keys: nbytes for keys, nbytes in noted.items() if self._is_due(keys, _ELSEWHERE)}

    def keep_free(self, keys: Hashable, *, trains: bool, missed: bool, room: Callable[[], int]) -> int:
        """The iteration, one that ``trains`` or does not, is over: how many more bytes its plan should keep free, or 0.
        ``missed``: it cost fetches. ``room``: bytes that the plan has for copies; of more than half of them no more is
        kept free than was seen.

        What passes the budget whatever the plan keeps free is not planned for again and again, but at the 1st, 2nd,
        4th, 8th ... time. Those that only the next one may pass count by themselves: a text's forwards, or a policy's,
        come to many of them before the first that does.
        """
        seen, self._seen[trains] = self._seen[trains], _Seen()
        if seen.passes_budget:
            return max(0, seen.drift) if self._is_due(keys, _NEXT if seen.is_next else _NOW) else 0
        if not (missed and seen.drift > 0):
            return 0
        return max(seen.drift, min(SPARE * seen.drift, room() // 2))

    def forget_seen(self, *, trains: bool) -> None:
        """The iteration is over, and a plan is made of what was measured of it: nothing has to be kept free beside."""
        self._seen[trains] = _Seen()

    def _is_due(self, keys: Hashable, where: str) -> bool:
        self._times[keys, where] += 1
        is_due = self._times[keys, where].bit_count() == 1
        if is_due:
            self._unsure[keys] = 0
        return is_due

    def has_passed(self, keys: Hashable) -> bool:
        """Such iterations have passed the budget, or would have."""
        return any(self._times[keys, where] for where in _WHERE)

    def forget_kept(self, keys: Hashable) -> None:
        """What plans kept free for such iterations is given up: the next one that passes the budget passes no plan that
        knew of it."""
        for where in _WHERE:
            if times := self._times[keys, where]:
                self._times[keys, where] = (1 << times.bit_length()) - 1  # one less than when it is due

    def doubt(self, keys: Hashable) -> None:
        """Its operators have taken more than was measured of them, or what is between them has not been measured: it
        is to be measured again."""
        self._unsure[keys] = 0

    def doubt_again(self, keys: Hashable) -> None:
        """As `doubt`, where measuring has told nothing; not for ever."""
        self._is_due(keys, _NOW)

    def is_unsure(self, keys: Hashable) -> bool:
        """How much it takes is not known before it has been measured again."""
        return keys in self._unsure

    def awaited(self) -> list[Hashable]:
        """Those that are unsure, and may come soon: too many others have not come in their stead."""
        return [keys for keys, others in self._unsure.items() if others < _PATIENCE]

    def note_other(self, keys: Hashable) -> None:
        """An iteration has begun as those of ``keys``, which are unsure, and was another."""
        self._unsure[keys] += 1

    def note_measured(self, keys: Hashable) -> None:
        """It is known now."""
        self._unsure.pop(keys, None)
