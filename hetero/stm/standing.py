"""Whether a manager can do anything for its tensors, which every entry asks first.

Owns what says so: that it is settled, that it is closed, that this process is a forked child; and on which thread it
runs.
"""

import threading
import weakref
from collections.abc import Callable

from hetero.stm.forks import in_child
from hetero.stm.tensors.owner import SettledState

__all__ = ["Standing"]


class Standing:
    """Of one manager; read with its lock held, unless a stale answer does no harm.

    Attributes:
        is_closed: it manages nothing any more.
        is_in_child: this process was forked from the one that manages.
        thread: of the model's last forward.
    """

    def __init__(self) -> None:
        self._settled: Callable[[], SettledState | None] = lambda: None
        self.is_closed = False
        self.is_in_child = False
        self.thread = threading.get_ident()

    @property
    def settled(self) -> SettledState | None:
        """The state in which nothing is intercepted (`hetero.stm.settled.state`), once there is one, and as long as the
        manager keeps it: it has the optimizer, whose hooks may have the model. Graphs have us, where Python's collector
        does not see it, and would keep all of them."""
        return self._settled()

    @settled.setter
    def settled(self, settled: SettledState) -> None:
        self._settled = weakref.ref(settled)

    @property
    def is_settled(self) -> bool:
        """Everything is there, and nothing of it is intercepted."""
        settled = self._settled()
        return settled is not None and settled.is_on

    def check_process(self) -> None:
        """Raises `ManageError` in a forked child, which can neither reach the device nor write homes."""
        if self.is_in_child:
            raise in_child()
