"""Whether the next backward is expected to be followed by the step that it would be if nothing changes.

Owns the answer (`hetero.stm.step.speculation`: [Note: what is expected]). It knows no tensors.
"""

__all__ = ["Expectation"]

_LONGEST = 64  # iterations that are watched after one that came otherwise
_TRUSTED = 16  # right ones in a row after which the next that is not counts as the first
_UNLEARNT = 8  # iterations in a row without trials, after which plans do not count on them, the first time


class Expectation:
    """Of one optimizer's iterations.

    Attributes:
        is_open: updates may be tried.
        is_habit: plans should count on it; it outlasts a few iterations that came otherwise, more each time, because
            plans are made anew for it.
    """

    def __init__(self) -> None:
        self.is_open = self.is_habit = False
        self._was_open = False
        self._otherwise = 0  # iterations that have not been as `is_habit` says, in a row
        self._enough = 1  # of them, for it to be no more
        self._backwards = 0
        self._clips = False
        self._came_otherwise = False
        # So many more iterations are watched; when one comes otherwise, it is `_length` again. Two at first: what
        # clipping did in one is known in the next.
        self._watched = self._length = 2
        self._next_length = 1
        self._right = 0

    def note_backward(self) -> None:
        """One of those since the last step begins."""
        self._backwards += 1
        if self._backwards > 1:
            self.is_open = False

    def note_taken_back(self) -> None:
        """An update that was tried was not wanted as it was."""
        self._came_otherwise = True
        self.is_open = False

    def note_clipping(self, *, changes: bool) -> None:
        """By the time the next step begins: whether clipping in the last one has changed any gradient."""
        self._clips = changes

    def note_step(self, *, deferred: bool, pays: bool) -> None:
        """A step has begun; ``deferred``: it is done later, for some parameters. ``pays``: trials would save time."""
        if deferred and self._backwards == 1 and not self._clips and not self._came_otherwise:
            self._watched = max(0, self._watched - 1)
            self._right += self._was_open
            if self._right >= _TRUSTED:
                self._next_length = 1
        else:
            if self._was_open:
                self._length, self._next_length = self._next_length, min(2 * self._next_length, _LONGEST)
            self._watched, self._right = self._length, 0
        self._backwards, self._came_otherwise = 0, False
        self.is_open = self._was_open = pays and self._watched == 0
        self._otherwise = 0 if self.is_open is self.is_habit else self._otherwise + 1
        if self._otherwise >= self._enough:
            self.is_habit, self._otherwise = self.is_open, 0
            self._enough = max(_UNLEARNT, 2 * self._enough)
