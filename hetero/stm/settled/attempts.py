"""When one may try to settle: what failed is tried again, ever less often, and after some failures never."""

__all__ = ["Attempts"]

_LONGEST_WAIT = 32  # forwards between two attempts


class Attempts:
    """Of one manager. ``allowed``: by the user.

    Attributes:
        are_allowed: False for good once somebody has forbidden them, because memory ran short or somebody would notice.
        times_passed: how often settled iterations have passed the budget, by what depends on more than what tells
            iterations apart.
    """

    def __init__(self, *, allowed: bool) -> None:
        self.are_allowed = allowed
        self.times_passed = 0
        self._wait = 0  # forwards
        self._failures = self._times_beside = 0

    def forbid(self) -> None:
        """Never again."""
        self.are_allowed = False

    def is_due(self) -> bool:
        """A forward begins: whether one may be made now."""
        if not self.are_allowed:
            return False
        if self._wait > 0:
            self._wait -= 1
            return False
        return True

    def note_success(self) -> None:
        """It has settled."""
        self._failures = 0

    def note_failure(self) -> None:
        """It could not, for what takes a look at everything to find out."""
        self._failures += 1
        self._wait = min(_LONGEST_WAIT, 1 << self._failures)

    def note_passed(self) -> None:
        """The budget was passed while settled."""
        self.times_passed += 1
        self._wait = 4 << self.times_passed

    def note_beside(self) -> None:
        """It left because the budget might have been passed beside what others have still to take."""
        self._times_beside += 1
        self._wait = min(_LONGEST_WAIT, 2 << self._times_beside)
