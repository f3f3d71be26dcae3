"""Several threads: each of them leaves the others alone, and may look at what another trains."""

import contextlib
import threading
import time

import pytest
import torch
from accelerators import clear_races, races
from lateness import managed_mlp
from loops import backward, mlp, two_steps
from torch import nn
from twins import adamw, device

import hetero
from hetero.devices import Accelerator
from hetero.stm.homeaccess import HomeAccess
from hetero.stm.step import devicesteps
from hetero.stm.step.devicehomes import DeviceHomes
from hetero.stm.tensors.managed import ManagedTensor

# Who hangs fails, and does not stop the suite.
PATIENCE = 60.0


def is_locked_for_others(lock):
    """Another thread could not have it now."""
    got = []

    def ask():
        got.append(lock.acquire(blocking=False))
        if got[0]:
            lock.release()

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    return not got[0]


class Pausing(torch.autograd.Function):
    """In the thread of that name, it runs until it may go on."""

    began, may_go_on = threading.Event(), threading.Event()

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        if threading.current_thread().name == "pausing":
            Pausing.began.set()
            assert Pausing.may_go_on.wait(PATIENCE)
        return x * w

    @staticmethod
    def backward(ctx, gradient):
        x, w = ctx.saved_tensors
        return gradient * w, (gradient * x).sum(0)


def failing(gradient=None):
    if threading.current_thread().name != "pausing":
        raise ValueError("of the other thread")


class Net(nn.Module):
    def __init__(self, fails_in):
        super().__init__()
        self.first, self.scale, self.last = nn.Linear(64, 64), nn.Parameter(torch.ones(64)), nn.Linear(64, 64)
        self.fails_in = fails_in

    def forward(self, x):
        x = Pausing.apply(self.first(x), self.scale)
        if self.fails_in == "forward":
            failing()
        elif self.fails_in == "backward":
            x.register_hook(failing)
        return self.last(x)


def run_beside(pausing, other):
    """``other()`` runs, from begin to end, in the middle of an operator of ``pausing()``. Returns what that does."""
    Pausing.began.clear()
    Pausing.may_go_on.clear()
    found = []

    def run():
        try:
            found.append(pausing())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run, name="pausing")
    thread.start()
    assert Pausing.began.wait(PATIENCE), found
    try:
        other()
    finally:
        Pausing.may_go_on.set()
        thread.join()
    return found[0]


def fails(other):
    with pytest.raises(ValueError, match="of the other thread"):
        other()


def test_a_forward_that_fails_does_not_disturb_another_threads():
    target = device()
    model = Net("forward")
    x = torch.randn(4, 64)

    def infer():
        with torch.no_grad():
            return model(x.to(target)).cpu()

    # Room for the workspace of the other thread's cuBLAS, too.
    with hetero.manage(model, device=target, device_budget="1MiB"):
        result = run_beside(infer, lambda: fails(infer))
    model.fails_in = None
    with torch.no_grad():
        assert torch.equal(result, model.to(target)(x.to(target)).cpu())


# Bytes. CUDA's allocator does not say how large what it refuses below 20 MiB was to be.
WIDE = 24 << 20


class Greedy(nn.Module):
    """It takes `WIDE`, and as much again; in that thread, only the first, until some operator lacks room."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(256))

    def forward(self, x):
        wide = (x * self.scale).repeat(6144, 1)
        if threading.current_thread().name == "pausing":
            accelerator = Accelerator(wide.device)
            failures, until = accelerator.failures(), time.monotonic() + PATIENCE
            Pausing.apply(x, self.scale)
            while accelerator.failures() == failures and time.monotonic() < until:
                time.sleep(1e-3)
            time.sleep(0.1)  # who lacks room looks whether anybody runs, and is refused where nobody does
            return wide.mean(0)
        Pausing.may_go_on.set()
        return wide.square().mean(0)


@pytest.mark.parametrize("models", [1, 2])
def test_who_lacks_room_waits_for_what_another_thread_has(models):
    target = device()
    nets = [Greedy() for _ in range(models)]
    x = torch.randn(4, 256)

    def infer(net):
        with torch.no_grad():
            return net(x.to(target)).cpu()

    before = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    budget = 5 * WIDE // 2
    with contextlib.ExitStack() as managed:
        for net in nets:
            managed.enter_context(hetero.manage(net, device=target, device_budget=budget))
        results = []
        run_beside(lambda: infer(nets[0]), lambda: results.append(infer(nets[-1])))
        assert torch.accelerator.max_memory_allocated() <= before + budget
    with torch.no_grad():
        assert torch.equal(results[0], nets[-1].to(target)(x.to(target)).cpu())


def test_a_backward_that_fails_does_not_disturb_another_threads_model():
    target = device()
    model, other = Net(None), Net("backward")
    x = torch.randn(4, 64)

    def train(net):
        net(x.to(target)).sum().backward()
        return net.scale.grad

    with (
        hetero.manage(model, torch.optim.SGD(model.parameters()), device=target, device_budget="1MiB"),
        hetero.manage(other, torch.optim.SGD(other.parameters()), device=target, device_budget="1MiB"),
    ):
        result = run_beside(lambda: train(model), lambda: fails(lambda: train(other)))
        assert isinstance(result, torch.Tensor), result
    model.zero_grad()
    model.to(target)(x.to(target)).sum().backward()
    assert torch.equal(result, model.scale.grad.cpu())


@pytest.mark.usefixtures("speculating")
def test_nobody_can_wait_for_an_update_that_is_announced_and_not_queued(monkeypatch):
    # Who waits has the lock, which whoever queues it needs.
    original, locked = HomeAccess.await_updates, []

    def asking(self, updates):
        locked.append(is_locked_for_others(self._lock))
        original(self, updates)

    monkeypatch.setattr(HomeAccess, "await_updates", asking)
    model, optimizer, manager, target = managed_mlp(device_homes=False)
    with manager:
        for _ in range(3):
            two_steps(model, optimizer, target)
    assert locked
    assert all(locked)


@pytest.mark.usefixtures("homes_on_device")
@pytest.mark.parametrize("place", [(devicesteps, "run_together"), (DeviceHomes, "bring_states_home")])
def test_what_lives_on_the_device_is_stepped_and_brought_home_by_one_thread_at_a_time(monkeypatch, place):
    original, locked = getattr(*place), []

    def asking(*args, **kwargs):
        locked.append(is_locked_for_others(manager._stm.lock))
        return original(*args, **kwargs)

    monkeypatch.setattr(*place, asking)
    target = device()
    clear_races()
    model = mlp()
    optimizer = adamw(model)
    manager = hetero.manage(model, optimizer, device=target, device_budget="512KiB")
    with manager:
        for _ in range(4):
            two_steps(model, optimizer, target)
        assert manager._host_step.on_device
        locked.clear()
        backward(model, target)
        optimizer.step()
        optimizer.state_dict()
    assert locked
    assert all(locked)
    assert not races()


@pytest.mark.usefixtures("homes_on_device")
def test_the_version_that_is_saved_is_the_same_while_another_thread_brings_home_up_to_date(monkeypatch):
    """Home's counter and the copy's are set one after the other."""
    target = device()
    model = mlp()
    optimizer = adamw(model)
    note_loaded, brings, goes_on = ManagedTensor.note_loaded, threading.Event(), threading.Event()

    def slowly(self):
        if threading.current_thread() is looker:
            brings.set()
            goes_on.wait(0.2)  # all of it, where the other one has to wait
        note_loaded(self)

    with hetero.manage(model, optimizer, device=target, device_budget="512KiB") as manager:
        for _ in range(4):
            two_steps(model, optimizer, target)
        tensor = next(t for t in manager._stm.tensors if t.stays)
        # A write that the counters see: fused kernels move none.
        with torch.no_grad():
            tensor.data.add_(0)
        version = tensor.version
        monkeypatch.setattr(ManagedTensor, "note_loaded", slowly)
        looker = threading.Thread(target=lambda: tensor.parameter.detach())
        looker.start()
        assert brings.wait(PATIENCE)
        assert tensor.version == version
        goes_on.set()
        looker.join()
        assert tensor.version == version


def test_whoever_looks_at_home_waits_for_all_copies_of_it():
    """Two may be on their way, where one was dropped before it had arrived."""
    target = device(latency="50ms")
    clear_races()
    model = nn.Linear(64, 64)
    with hetero.manage(model, device=target, device_budget="1MiB") as manager:
        residency, tensor = manager._stm.residency, manager._stm.tensors[0]
        for _ in range(2):
            with manager._stm.lock:
                residency.require([tensor], limit=1 << 20, operator=lambda: "twice")
                residency.drop(tensor)
        model.weight.detach()
    assert races() == []


def test_statistics_that_are_asked_for_amid_a_step_do_not_end_it():
    model, optimizer, manager, target = managed_mlp()
    segments = []

    def look(*_):
        before = manager._stm.executor.segment
        thread = threading.Thread(target=lambda: manager.stats)
        thread.start()
        thread.join()
        segments.append((before, manager._stm.executor.segment))

    optimizer.register_step_post_hook(look)
    with manager:
        two_steps(model, optimizer, target)
    assert len(segments) == 2
    assert all(before is after is not None for before, after in segments)


@pytest.mark.parametrize("budget", ["64KiB", "2MiB"])  # everything fits the larger
def test_a_thread_that_looks_amid_a_step_sees_the_users_groups(monkeypatch, budget):
    target = device()
    torch.manual_seed(0)
    model = mlp(width=32)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9, foreach=False)
    seen, saved, threads, init_group = [], [], [], torch.optim.SGD._init_group

    def look():
        groups = optimizer.param_groups
        found = [len(group["params"]) for group in groups]
        assert [len(group["params"]) for group in reversed(groups)] == found[::-1]
        seen.append((found, len(groups), groups[0]["weight_decay"], groups[-1]["weight_decay"]))

    def save():
        saved.append([len(group["params"]) for group in optimizer.state_dict()["param_groups"]])

    def looked_at(stepped, *args):
        if stepped is optimizer:
            looking, saving = (threading.Thread(target=way) for way in (look, save))
            looking.start()
            saving.start()
            looking.join(PATIENCE)
            saving.join(0.1)  # it waits for what this step does
            threads.append(saving)
        return init_group(stepped, *args)

    with hetero.manage(model, optimizer, device=target, device_budget=budget):
        for step in range(8):
            model(torch.randn(4, 32).to(target)).square().mean().backward()
            if step == 6:
                held = decayed[0].grad  # else all is done later, and nothing in the step itself
                monkeypatch.setattr(torch.optim.SGD, "_init_group", looked_at)
            optimizer.step()
            optimizer.zero_grad()
        for thread in threads:
            thread.join(PATIENCE)
    del held
    sizes = [len(decayed), len(others)]
    assert len(saved) == len(seen) > 0
    assert all(each == (sizes, 2, 0.1, 0) for each in seen)
    assert all(each == sizes for each in saved)
