"""Python's collector finds a managed model that nobody holds: on any thread, in the middle of anything."""

import contextlib
import gc
import threading
import time
import weakref

import pytest
import torch
from accelerators import device
from backward_ends import wait_for_backward_ends
from lateness import managed_mlp
from loops import batch, two_steps
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import hetero
from hetero.stm import patches
from hetero.stm.deferred import Update
from hetero.stm.interception.parameter import is_managed
from hetero.stm.manager import StatefulTensorMgr

# Who hangs fails, and does not stop the suite.
PATIENCE = 60.0


def dropped_model():
    """A weak reference to a managed model that only Python's collector can find, and its manager's lower part."""
    model, optimizer, manager, target = managed_mlp()
    two_steps(model, optimizer, target)
    manager.stats  # noqa: B018  # nothing is queued
    model.__dict__["everything"] = [model, optimizer, manager]
    return weakref.ref(model), manager._stm


def test_a_part_that_is_kept_keeps_no_model():
    target = device()
    model = nn.ModuleDict({"kept": nn.Sequential(nn.Linear(8, 8)), "dropped": nn.Linear(8, 8)})
    manager = hetero.manage(model, device=target, device_budget="4MiB")
    model["kept"](torch.randn(2, 8).to(target)).sum().backward()
    wait_for_backward_ends(target)  # its thread had our guard around operators, and keeps that for a while
    kept, dropped = model["kept"], weakref.ref(model["dropped"].weight)
    del model, manager
    gc.collect()
    gc.collect()  # the first lets go of the manager
    assert dropped() is None
    assert type(kept[0].weight) is nn.Parameter
    assert vars(kept).get("_compiled_call_impl") is None
    assert kept(torch.randn(2, 8)).is_cpu


class KeepsWhatItSaw(nn.Sequential):
    def forward(self, x):
        self.seen = self[0](x)  # with its graph
        return self[1](self.seen)


def trained(part, target, budget, *, closes):
    """Weak references to a model whose optimizer has a hook that knows it, and to a weight."""
    model = part(nn.Linear(64, 64), nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    optimizer.register_step_post_hook(lambda *_: model)  # to average it, say
    manager = hetero.manage(model, optimizer, device=target, device_budget=budget)
    for _ in range(3):
        two_steps(model, optimizer, target)
    assert manager.plan.everything_fits == (budget > 1 << 20)
    model(batch(target))  # copies are there now, which a step may have sent for or not yet
    if closes:
        manager.close()
    return weakref.ref(model), weakref.ref(model[0].weight)


@pytest.mark.parametrize("closes", [False, True])
@pytest.mark.parametrize("budget", [60 << 10, 4 << 20], ids=["moves", "fits"])
@pytest.mark.parametrize("part", [nn.Sequential, KeepsWhatItSaw])
def test_an_optimizers_hook_that_knows_the_model_keeps_nothing(part, budget, closes):
    target = device()
    gc.collect()
    before = torch.accelerator.memory_allocated()
    gone = trained(part, target, before + budget, closes=closes)
    wait_for_backward_ends(target)
    for _ in range(3):  # the first lets go of the manager
        gc.collect()
    assert [there() for there in gone] == [None, None]
    assert torch.accelerator.memory_allocated() == before


@pytest.mark.parametrize("budget", [60 << 10, 4 << 20], ids=["moves", "fits"])
@pytest.mark.usefixtures("late_queue")
def test_one_collection_gives_the_device_back(budget):
    target = device()
    for _ in range(3):
        gc.collect()
    before = torch.accelerator.memory_allocated()
    gc.disable()
    try:
        trained(nn.Sequential, target, before + budget, closes=False)
        wait_for_backward_ends(target)
        assert torch.accelerator.memory_allocated() > before
        gc.collect()
        assert torch.accelerator.memory_allocated() == before
    finally:
        gc.enable()


@pytest.fixture
def closings(monkeypatch):
    """The threads that end management."""
    original, threads, ended = StatefulTensorMgr.close, [], threading.Event()

    def close(self):
        threads.append(threading.get_ident())
        original(self)
        ended.set()

    monkeypatch.setattr(StatefulTensorMgr, "close", close)
    gc.collect()
    gc.disable()
    yield threads, ended
    gc.enable()


def test_the_collector_ends_management_not_on_the_queues_thread(closings):
    # Which may be in the middle of an addition, and has its lock.
    threads, ended = closings
    model, stm = dropped_model()
    queues = []

    def collect():
        queues.append(threading.get_ident())
        gc.collect()

    update = Update(collect)
    stm.updates.submit([update])
    stm.updates.finish(update)
    assert ended.wait(PATIENCE)
    assert model() is None
    assert len(threads) == 1
    assert threads != queues


def test_the_collector_waits_for_no_lock(closings):
    # Whoever has it may wait for the thread that the collector runs on: before a fork, for the queue's.
    _, ended = closings
    model, stm = dropped_model()
    with stm.lock:
        thread = threading.Thread(target=gc.collect, daemon=True)
        thread.start()
        thread.join(PATIENCE)
        assert not thread.is_alive()
        assert model() is None
        assert not ended.is_set()
    assert ended.wait(PATIENCE)


def test_a_backward_is_announced_to_all_though_one_of_them_is_let_go_meanwhile(monkeypatch):
    first, second = (managed_mlp() for _ in range(2))
    segments = first[2]._stm.segments
    announced = []

    @contextlib.contextmanager
    def leaving(**told):
        patches.rest(segments)
        yield
        patches.wake(segments)

    original = second[2]._stm.segments.backward

    def noting(*, captures, **told):
        announced.append(captures)
        return original(captures=captures, **told)

    monkeypatch.setattr(segments, "backward", leaving)
    monkeypatch.setattr(second[2]._stm.segments, "backward", noting)
    with first[2], second[2]:
        second[0](batch(second[3])).sum().backward()
    assert announced == [False]


def test_what_the_collector_finds_within_a_compilers_mode_is_let_go_of_unseen():
    """Its mode refuses tensors with values."""
    gone, stm = dropped_model()
    parameters = [tensor.parameter for tensor in stm.tensors]
    with FakeTensorMode():
        gc.collect()
        gc.collect()
        assert gone() is None
        for _ in range(600):
            if not any(map(is_managed, parameters)):
                break
            time.sleep(0.1)
    assert {type(parameter) for parameter in parameters} == {nn.Parameter}
    assert all(torch.isfinite(parameter.detach().cpu()).all() for parameter in parameters)
