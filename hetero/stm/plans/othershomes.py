"""What lives on the device of other managers, as plans count it.

Owns how much that is: it comes and goes by their choice, at their steps, so that no measurement tells how much there
will be. Measurements leave it out (`hetero.msc.Period.others_home_bytes`), and each plan adds what there is when it is
made; one that is made for less than there is now is made anew before it is followed. Of the other way round, there is
no haste: what has left may be back in the next iteration, as where somebody looks at optimizer states in each.
"""

from collections.abc import Callable

from hetero.stm.neighbours import HomeBytes

__all__ = ["OthersHomes"]

_UNTIL_BELIEVED = 8  # iterations in a row with less

_NOTHING = HomeBytes(0, 0)


class OthersHomes:
    """``now``: what lives there; ``send_home``: so many bytes of it leave, or as many as can.

    Attributes:
        nbytes: that plans count.
    """

    def __init__(
        self,
        now: Callable[[], HomeBytes] = lambda: _NOTHING,
        *,
        send_home: Callable[[int], None] = lambda nbytes: None,
    ) -> None:
        self.now = now
        self.send_home = send_home
        self.nbytes = _NOTHING
        self._most, self._iterations = _NOTHING, 0  # since there is less

    def look(self) -> bool:
        """An iteration begins. True: plans are to be made anew."""
        now = self.now()
        if now.total < self.nbytes.total:
            self._most = max(self._most, now, key=lambda nbytes: nbytes.total)
            self._iterations += 1
            if self._iterations < _UNTIL_BELIEVED:
                return False
            now = self._most
        self._most, self._iterations = _NOTHING, 0
        has_changed = now != self.nbytes
        self.nbytes = now
        return has_changed

    def more_than(self, nbytes: int) -> int:
        """By how much more than ``nbytes`` lives there now."""
        return max(0, self.now().total - nbytes)

    def make_room(self, short: int) -> bool:
        """A plan lacks so many bytes beside them. True if less lives there now, and it is to be made anew."""
        if self.nbytes.total == 0:
            return False
        self.send_home(short)
        before, now = self.nbytes, self.now()
        self.nbytes = min(before, now, key=lambda nbytes: nbytes.total)
        return self.nbytes.total < before.total
