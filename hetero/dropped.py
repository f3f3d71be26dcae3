"""A manager that was dropped with its model, and never closed: Python's collector finds it, and nothing of it may stay,
on the device or in torch.

Invariant: what is called weakly keeps nobody.
"""

import _thread
import weakref
from collections.abc import Callable
from typing import Any

from hetero.stm import StatefulTensorMgr, patches
from hetero.stm.interception.functions import give_back
from hetero.stm.interception.whereabouts import DeviceProperties
from hetero.stm.running.unseen import is_seen

__all__ = ["make_plain", "weakly", "when_dropped"]


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


def when_dropped(
    owner: object, manager: StatefulTensorMgr, properties: DeviceProperties, abandon: Callable[[], None]
) -> "weakref.finalize[..., object]":
    """Let go of what ``manager`` has once nobody holds ``owner``: identities hold parameters where the collector cannot
    see it. ``abandon`` ends what may be settled. To be detached by whoever closes."""
    end = weakref.finalize(owner, _abandon, manager, properties, abandon)
    end.atexit = False
    return end


def _abandon(manager: StatefulTensorMgr, properties: DeviceProperties, abandon: Callable[[], None]) -> None:
    if manager.standing.is_in_child:
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
