"""A manager that was dropped with its model, and never closed: Python's collector finds it, and nothing of it may stay,
on the device or in torch.

Invariant: what is called weakly keeps nobody.
"""

import _thread
import sys
import weakref
from collections.abc import Callable
from typing import Any

from hetero.stm import StatefulTensorMgr, patches
from hetero.stm.interception.functions import give_back
from hetero.stm.interception.whereabouts import DeviceProperties
from hetero.stm.running.unseen import is_seen

__all__ = ["end_dropped", "make_plain", "weakly"]


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """As ``method``, without keeping its object."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        if (present := reference()) is not None:
            present(*args)

    return call


def make_plain(manager: StatefulTensorMgr) -> None:
    """Parameters are `nn.Parameter` again, wherever their bytes are."""
    for tensor in manager.tensors:
        give_back(tensor.parameter)
        tensor.forget_home()


def end_dropped(
    manager: StatefulTensorMgr, properties: DeviceProperties, abandon: Callable[[], None]
) -> None:
    """Let go of what ``manager`` has, whose owner nobody holds: identities hold parameters where the collector cannot
    see it. ``abandon`` ends what may be settled.

    To be called by the owner's ``__del__``: a weak reference's callback would have to keep ``manager``, and with it the
    parameters, until the collector runs once more."""
    if sys.is_finalizing() or manager.standing.is_in_child:
        return  # neither is there
    # Python's collector runs on any thread, in the middle of anything. What holds the lock may wait for this thread,
    # what the queue's thread is doing cannot be ended from within, and modes, a compiler's for one, are not to see it.
    if is_seen() or manager.updates.is_here() or not manager.lock.acquire(blocking=False):
        _thread.start_new_thread(_let_go, (manager, properties, abandon))
        return
    try:
        _let_go(manager, properties, abandon)
    finally:
        manager.lock.release()


def _let_go(manager: StatefulTensorMgr, properties: DeviceProperties, abandon: Callable[[], None]) -> None:
    with manager.lock:
        abandon()
        manager.close()
        properties.detach()
        make_plain(manager)
        patches.remove(manager.segments)
