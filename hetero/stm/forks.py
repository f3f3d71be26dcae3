"""What a forked child may do with parameters that its parent manages: read them.

Owns the moment of a fork. Invariant: no lock is held by a thread that the child does not have, and nothing that the
child may read is still on its way: updates are done, gradients and written copies have arrived.

The child has neither the parent's threads nor its device, and homes are memory that both share ([Note: slabs] in
`hetero.devices.pinned`): a step in the child would write the parent's parameters. So it is refused, as is whatever
else needs the device or writes homes. What the parent writes after the fork, the child sees. What it has of the device
it cannot give back, either: it keeps it.
"""

import ctypes
import os
from typing import Protocol

from hetero.errors import ManageError
from hetero.stm.living import Living

__all__ = ["Forkable", "in_child", "watch"]


class Forkable(Protocol):
    """A manager, as a fork sees it (`hetero.stm.manager.StatefulTensorMgr`)."""

    def begin_fork(self) -> None:
        """Finish what is under way, take the locks and let nothing begin until `end_fork`."""

    def end_fork(self, *, in_child: bool) -> None:
        """In parent and child: go on."""


_managers = Living[Forkable]()
_forking: list[Forkable] = []


def watch(manager: Forkable) -> None:
    """From now on, prepare ``manager`` for forks of this process."""
    _managers.add(manager)


def in_child() -> ManageError:
    """The error that says so."""
    return ManageError(
        f"process {os.getpid()} was forked from the one that called hetero.manage(): it can read parameters, gradients "
        "and states, but neither run operators nor write, because it would write its parent's memory. Train in the "
        "parent, or call manager.close() before the fork and hetero.manage() after it"
    )


def _before() -> None:
    for manager in _managers:
        _forking.append(manager)  # first: whatever it raises, which Python prints and drops, locks are held
        manager.begin_fork()


def _after(*, in_child: bool) -> None:
    while _forking:
        manager = _forking.pop()
        manager.end_fork(in_child=in_child)
        if in_child:
            _keep_for_good(manager)


def _keep_for_good(manager: Forkable) -> None:
    """In a child, though nobody else keeps it any more: torch ends a process that destroys an event of CUDA's and
    cannot reach the device. No module has it, because modules are emptied in the end."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(manager))


os.register_at_fork(
    before=_before,
    after_in_parent=lambda: _after(in_child=False),
    after_in_child=lambda: _after(in_child=True),
)
