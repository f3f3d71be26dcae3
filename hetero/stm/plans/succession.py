"""Which kind of iteration comes next.

Owns the order in which kinds came: a critic's steps, some with the generator's pass before them; seven micro-batches a
step, and at an epoch's end three. Such kinds begin alike, and which one it is shows only when its plan is half over. It
is a guess, for speed; plans are a hint in any case.
"""

from collections import Counter
from collections.abc import Hashable
from typing import Generic, TypeVar

__all__ = ["Succession"]

Kind = TypeVar("Kind", bound=Hashable)

_MEMORY = 48  # iterations
# Where each is another, as with lengths of all sizes, there is nothing to be guessed.
_MOST_KINDS = 4 * _MEMORY


class Succession(Generic[Kind]):
    """Of one manager's iterations."""

    def __init__(self) -> None:
        self._numbers: dict[Kind, int] = {}
        self._kinds: list[Kind] = []
        self._past: list[int] = []

    def _forget(self) -> None:
        self._numbers.clear()
        self._kinds.clear()
        self._past.clear()

    def add(self, kind: Kind) -> None:
        """An iteration of this kind is over."""
        if len(self._kinds) >= _MOST_KINDS:
            self._forget()
        number = self._numbers.setdefault(kind, len(self._kinds))
        if number == len(self._kinds):
            self._kinds.append(kind)
        self._past.append(number)
        del self._past[:-_MEMORY]

    def following(self) -> Kind | None:
        """What came after the longest stretch of the past that ended as the present one does; of equally long ones
        most often, or last. None if the last kind is a new one."""
        past = self._past
        came, longest = Counter[int](), 0
        for place in range(len(past) - 1, 0, -1):
            length = 0
            while length < place and past[place - 1 - length] == past[-1 - length]:
                length += 1
            if length > longest:
                came, longest = Counter(), length
            if length == longest > 0:
                came[past[place]] += 1  # the latest first, as `most_common` has them
        return self._kinds[came.most_common(1)[0][0]] if came else None
