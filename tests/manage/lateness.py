"""Updates that are late on purpose: how the tests named ``test_deferred_*`` make them so, and look at them."""

import contextlib
import gc
import threading

import pytest
import torch
from accelerators import clear_races
from loops import mlp
from twins import adamw, device

import hetero
from hetero.stm.deferred import UpdateQueue
from hetero.stm.step.hoststep import HostStep


def managed_mlp(make_optimizer=adamw, *, depth=2, device_homes=False, **keywords):
    target = device()
    gc.collect()
    clear_races()
    torch.manual_seed(0)
    model = mlp(depth=depth)
    optimizer = make_optimizer(model)
    manager = hetero.manage(
        model, optimizer, device=target, device_budget="4MiB", device_homes=device_homes, **keywords
    )
    return model, optimizer, manager, target


def pending(manager):
    return [tensor.name for tensor in manager._stm.tensors if tensor.pending is not None]


def host_step_of(optimizer):
    cells = [cell.cell_contents for cell in optimizer.__dict__["step"].__func__.__closure__]
    return next(cell for cell in cells if isinstance(cell, HostStep))


@contextlib.contextmanager
def stopped(manager):
    """No update is run within it until somebody waits; yields the names of those that were waited for."""
    queue = manager._stm.updates
    released = threading.Event()
    waited = []
    finish, finish_all, run = queue.finish, queue.finish_all, UpdateQueue._run
    names = {}

    def gated(self, update):
        released.wait()
        run(self, update)

    def finish_and_tell(update):
        names.update({id(t.pending): t.name for t in manager._stm.tensors if t.pending is not None})
        waited.append(names.get(id(update)))
        released.set()
        finish(update)

    def finish_all_and_tell():
        released.set()
        finish_all()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(UpdateQueue, "_run", gated)
        queue.finish, queue.finish_all = finish_and_tell, finish_all_and_tell
        try:
            yield waited
        finally:
            released.set()
            del queue.finish, queue.finish_all
            queue.finish_all()
