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
from hetero.stm.deferred import Attempt, Update, UpdateQueue

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


class Tried:
    """What an attempt does early: nothing, and at once."""

    def can_begin(self):
        return True

    def can_end(self):
        return True

    def perform(self):
        pass


def test_what_was_tried_is_uploaded_before_its_turn_unless_another_was_asked_for_first():
    """The thread is kept busy by one update; the two behind it have been tried already."""
    queue, uploaded = UpdateQueue(), []
    attempts = [Attempt(Tried(), rank) for rank in range(2)]
    for attempt in attempts:
        queue.try_early(attempt)
    while not all(attempt.was_tried for attempt in attempts):
        time.sleep(1e-4)
    begun, may_end = threading.Event(), threading.Event()

    def run():
        begun.set()
        may_end.wait()

    busy = Update(run)
    attempts[0].confirm(lambda: queue.upload_again(attempts[0]))  # its trial was wrong
    attempts[1].confirm(lambda: None)
    queue.submit([busy, *attempts])
    begun.wait()
    try:
        for name, update in ((0, attempts[0]), ("busy", busy), (1, attempts[1])):
            assert queue.upload_after(update, lambda name=name: uploaded.append(name) or "arrival")
        # At once: home is what it will be, if the trial is right.
        assert uploaded == [0]
    finally:
        may_end.set()
    queue.finish_all()
    assert uploaded == [0, "busy", 0, 1]
    queue.close()


def test_a_fork_finds_nothing_queued():
    model, optimizer, manager, target = managed_mlp(speculate=False)
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
    model, optimizer, manager, target = managed_mlp(speculate=False)
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


class TakesTheSum(torch.optim.Optimizer):
    """Its update depends on a reduction, and so on the number of threads among which that is divided."""

    steps_parameters_independently = True

    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.copy_(parameter.grad.sum().expand_as(parameter))


class Product(nn.Module):
    """The gradient of its weight is its input."""

    def __init__(self, shape):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape))

    def forward(self, x):
        return (self.weight * x).sum()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_updates_are_divided_among_as_many_threads_as_the_steps(threads):
    before = torch.get_num_threads()
    torch.manual_seed(0)
    # The sum is 0 but for what is rounded away, of which hardly two ways to add have the same.
    half = torch.randn(512 * 1500)
    gradient = torch.cat([half, -half])[torch.randperm(2 * len(half))].view(1024, 1500)
    torch.set_num_threads(threads)
    try:
        expected, others = gradient.sum(), []
        for other in {1, 2, 3} - {threads}:
            torch.set_num_threads(other)
            others.append(gradient.sum())
        assert all(not torch.equal(expected, other) for other in others)
        torch.set_num_threads(threads)
        model = Product(gradient.shape)
        optimizer = TakesTheSum(model.parameters())
        target = device()
        with hetero.manage(
            model, optimizer, device=target, device_budget="64MiB", device_homes=False
        ) as manager:
            for step in range(3):  # the first is done at once; the queue's thread begins with the second
                torch.set_num_threads(threads if step == 2 else threads % 3 + 1)
                optimizer.zero_grad()
                model(gradient.to(target)).backward()
                with stopped(manager):
                    optimizer.step()
                    assert bool(pending(manager)) == (step > 0)
            assert torch.equal(model.weight[0, 0].cpu(), expected)
    finally:
        torch.set_num_threads(before)
