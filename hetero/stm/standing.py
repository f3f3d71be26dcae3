"""Whether a manager can do anything for its tensors, which every entry asks first.

Owns what says so: that it is settled, that it is closed, that this process is a forked child.
"""

from hetero.stm.forks import in_child
from hetero.stm.tensors.owner import SettledState

__all__ = ["Standing"]


class Standing:
    """Of one manager; read with its lock held, unless a stale answer does no harm.

    Attributes:
        settled: the state in which nothing is intercepted (`hetero.stm.settled.state`), once there is one.
        is_closed: it manages nothing any more.
        is_in_child: this process was forked from the one that manages.
    """

    def __init__(self) -> None:
        self.settled: SettledState | None = None
        self.is_closed = False
        self.is_in_child = False

    @property
    def is_settled(self) -> bool:
        """Everything is there, and nothing of it is intercepted."""
        return self.settled is not None and self.settled.is_on

    def check_process(self) -> None:
        """Raises `ManageError` in a forked child, which can neither reach the device nor write homes."""
        if self.is_in_child:
            raise in_child()
