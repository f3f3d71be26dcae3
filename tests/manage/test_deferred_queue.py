"""The queue of updates by itself: their order, and what must find it empty."""

import os
import threading
import time

import pytest
import torch
from lateness import managed_mlp, pending, stopped
from loops import backward, two_steps
from torch import nn
from twins import adamw, device

import hetero
from hetero.stm.deferred import Update, UpdateQueue

pytestmark = pytest.mark.usefixtures("late_queue")


def test_updates_come_in_the_order_of_the_next_forward():
    class Backwards(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

        def forward(self, x):
            for layer in reversed(self.layers):
                x = layer(x).relu()
            return x

    target = device()
    model = Backwards()
    optimizer = adamw(model)
    with hetero.manage(model, optimizer, device=target, device_budget="4MiB", device_homes=False) as manager:
        two_steps(model, optimizer, target)
        two_steps(model, optimizer, target)
        backward(model, target)
        order = []
        submit = manager._stm.updates.submit
        names = {}

        def note(updates):
            names.update({id(t.pending): t.name for t in manager._stm.tensors})
            order.extend(names[id(update)] for update in updates)
            submit(updates)

        manager._stm.updates.submit = note
        optimizer.step()
        del manager._stm.updates.submit
        assert [int(name.split(".")[1]) for name in order] == [3, 3, 2, 2, 1, 1, 0, 0]


def test_a_queue_runs_everything_once_and_what_is_waited_for_first():
    queue = UpdateQueue()
    running, gate = threading.Event(), threading.Event()
    done = []

    def hold():
        running.set()
        gate.wait()

    updates = [Update(hold)]
    updates += [Update(lambda number=number: done.append(number)) for number in range(5)]
    queue.submit(updates)
    running.wait()
    waiter = threading.Thread(target=queue.finish, args=(updates[4],))
    waiter.start()
    while queue._waiting[0] is not updates[4]:
        time.sleep(1e-4)
    gate.set()
    waiter.join()
    queue.finish_all()
    assert done == [3, 0, 1, 2, 4]
    assert all(update.done for update in updates)
    queue.close()


def test_a_fork_finds_nothing_queued():
    model, optimizer, manager, target = managed_mlp()
    with manager:
        two_steps(model, optimizer, target)
        backward(model, target)
        with stopped(manager):
            optimizer.step()
            assert pending(manager)
            child = os.fork()
            if child == 0:
                waiting = manager._stm.updates._waiting
                os._exit(1 if waiting or manager._stm.updates._current else 0)
            assert os.waitpid(child, 0)[1] == 0


@pytest.mark.skipif(
    not hasattr(torch.compiler, "_compile_session_context"),
    reason="this version sets no flag for all threads",
)
def test_nothing_is_queued_while_anybody_compiles():
    """Optimizers compute otherwise, by a last bit, while `torch.compiler.is_compiling()`."""
    model, optimizer, manager, target = managed_mlp()
    with manager:
        two_steps(model, optimizer, target)
        backward(model, target)
        with stopped(manager):
            optimizer.step()
            assert pending(manager)
            with torch.compiler._compile_session_context():
                assert torch.compiler.is_compiling()
                assert not manager._stm.updates._waiting
                assert manager._stm.updates._current is None


def test_a_step_while_the_interpreter_goes_down_is_done_at_once():
    queue = UpdateQueue()
    queue._worker.shutdown()
    done = []
    updates = [Update(lambda: done.append(1)), Update(lambda: done.append(2))]
    queue.submit(updates)
    assert done == [1, 2]
    for update in updates:
        queue.finish(update)
