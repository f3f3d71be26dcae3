"""Updates that are done later, and nobody can tell.

Every run here has a queue that is late on purpose, and in some tests stopped altogether until somebody waits: whoever
does not wait for an update sees it missing.
"""

import contextlib
import copy
import gc
import re
import threading
import time

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from test_semantics_autograd import batch, mlp, train
from torch import nn
from twins import adamw, assert_same, assert_twins, device, plain, unmanaged

import hetero
from hetero.devices import virtual
from hetero.stm.deferred import Update, UpdateQueue
from hetero.stm.hoststep import HostStep
from hetero.stm.manager import StatefulTensorMgr


@pytest.fixture(autouse=True)
def late_queue(monkeypatch):
    original = UpdateQueue._run

    def late(self, update):
        time.sleep(3e-4)
        original(self, update)

    monkeypatch.setattr(UpdateQueue, "_run", late)


def managed_mlp(make_optimizer=adamw, *, depth=2, **keywords):
    target = device()
    gc.collect()
    virtual.clear_races()
    torch.manual_seed(0)
    model = mlp(depth=depth)
    optimizer = make_optimizer(model)
    manager = hetero.manage(model, optimizer, device=target, device_budget="4MiB", **keywords)
    return model, optimizer, manager, target


def backward(model, target, rows=8):
    model(batch(target, rows)).square().mean().backward()


def pending(manager):
    return [tensor.name for tensor in manager._stm.tensors if tensor.pending is not None]


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


# -- who waits, and who does not ---------------------------------------------------------------------------------------


def two_steps(model, optimizer, target):
    """After them, everything is queued that can be."""
    for _ in range(2):
        backward(model, target)
        optimizer.step()
        optimizer.zero_grad()


def test_step_and_zero_grad_do_not_wait():
    model, optimizer, manager, target = managed_mlp()
    with manager:
        two_steps(model, optimizer, target)
        backward(model, target)
        with stopped(manager) as waited:
            optimizer.step()
            assert set(pending(manager)) == {name for name, _ in model.named_parameters()}
            optimizer.zero_grad()
            model.zero_grad()
            model[0].zero_grad()
            assert all(p.grad is None for p in model.parameters())
            assert model[0].weight.shape == (128, 64)
            assert model[0].weight.requires_grad
            assert waited == []
        assert manager._host_step.queued > 0


def test_a_use_waits_for_its_own_parameters_update_alone():
    model, optimizer, manager, target = managed_mlp()
    with manager:
        two_steps(model, optimizer, target)
        backward(model, target)
        with stopped(manager) as waited:
            optimizer.step()
            model[2].weight.sum()
            assert set(waited) == {"2.weight"}
            model[2](torch.randn(8, 128).to(target))
            assert set(waited) == {"2.weight", "2.bias"}


READS = {
    "operator at home": lambda m, o: m[2].weight.sum().item(),
    "print": lambda m, o: re.findall(r"-?\d\.\d+e[-+]\d+", repr(m[2].weight)),
    "numpy": lambda m, o: m[2].weight.detach().numpy().copy(),
    "asarray": lambda m, o: np.asarray(m[2].weight.data).copy(),
    "data": lambda m, o: m[2].weight.data.clone(),
    "tolist": lambda m, o: m[2].weight.tolist(),
    "grad": lambda m, o: m[2].weight.grad.clone(),
    "deepcopy": lambda m, o: copy.deepcopy(m[2].weight),
    "state_dict": lambda m, o: copy.deepcopy(m.state_dict()),
    "optimizer state": lambda m, o: {k: v.clone() for k, v in o.state[m[2].weight].items()},
    "optimizer state_dict": lambda m, o: copy.deepcopy(o.state_dict()),
    "deepcopy of the optimizer": lambda m, o: copy.deepcopy(o).state_dict()["state"][0]["exp_avg"],
    "version": lambda m, o: m[2].weight._version,
    "vector": lambda m, o: torch.nn.utils.parameters_to_vector(m.parameters()),
    "dict of the state": lambda m, o: [v["step"].clone() for v in dict(o.state).values()],
}


@pytest.mark.parametrize("name", READS)
def test_every_way_of_reading_waits(name):
    read = READS[name]

    def run(manage):
        torch.manual_seed(0)
        model = mlp(depth=2)
        optimizer = adamw(model)
        target = device()
        manager = None
        if manage:
            manager = hetero.manage(model, optimizer, device=target, device_budget="4MiB")
        generator = torch.Generator().manual_seed(3)
        for _ in range(3):
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            if manager is not None and _ == 2:
                with stopped(manager) as waited:
                    optimizer.step()
                    seen = read(model, optimizer)
                    assert waited or not pending(manager)
                assert manager._host_step.queued > 0
                manager.close()
            else:
                optimizer.step()
        return seen if manage else read(model, optimizer)

    got, expected = run(manage=True), run(manage=False)
    assert _text(got) == _text(expected)


def _text(value):
    if isinstance(value, torch.Tensor):
        return value.detach().tolist()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return [(str(k), _text(v)) for k, v in value.items()]
    if isinstance(value, list | tuple):
        return [_text(v) for v in value]
    return value


def holders():
    """Aliases taken before the step and read after it: nothing tells when."""
    return {
        "state_dict": lambda m, o: (s := m.state_dict(), lambda: s["2.weight"].clone())[1],
        "data": lambda m, o: (d := m[2].weight.data, lambda: d.clone())[1],
        "numpy": lambda m, o: (n := m[2].weight.detach().numpy(), lambda: torch.from_numpy(n.copy()))[1],
        "view": lambda m, o: (v := m[2].weight.detach().view(-1)[3:9], lambda: v.clone())[1],
        "exp_avg": lambda m, o: (e := o.state[m[2].weight]["exp_avg"], lambda: e.clone())[1],
        "entry": lambda m, o: (e := o.state[m[2].weight], lambda: e["exp_avg"].clone())[1],
        "optimizer state_dict": lambda m, o: (
            s := o.state_dict(),
            lambda: s["state"][2]["step"].clone(),
        )[1],
        "pointer": lambda m, o: (
            p := m[2].weight.data_ptr(),
            lambda: _floats_at(p, 5),
        )[1],
    }


def _floats_at(address, count):
    import ctypes

    return torch.tensor(list((ctypes.c_float * count).from_address(address)))


@pytest.mark.parametrize("name", holders())
def test_an_alias_taken_before_the_step_is_never_stale(name):
    def loop(model, optimizer, target):
        two_steps(model, optimizer, target)
        look = holders()[name](model, optimizer)
        seen = []
        for _ in range(2):
            backward(model, target)
            optimizer.step()
            seen.append(look())
            optimizer.zero_grad()
        return seen

    def home_loop(model, optimizer, target):
        return loop(model, optimizer, torch.device("cpu"))

    torch.manual_seed(0)
    model = mlp(depth=2)
    optimizer = adamw(model)
    torch.manual_seed(1)
    expected = plain(home_loop(model, optimizer, None))
    model, optimizer, manager, target = managed_mlp()
    with manager:
        torch.manual_seed(1)
        got = plain(loop(model, optimizer, target))
        assert manager._host_step.queued > 0
    assert_same(got, expected, name)


def test_a_gradient_that_the_user_holds_may_be_changed_after_the_step():
    def loop(model, optimizer, target):
        two_steps(model, optimizer, target)
        seen = []
        for _ in range(3):
            backward(model, target)
            gradients = [p.grad for p in model.parameters()]
            views = [g.view(-1) for g in gradients[:2]]
            del gradients[:2]
            optimizer.step()
            torch._foreach_zero_(gradients)
            for view in views:
                view.fill_(7.0)
            optimizer.zero_grad()
            seen.append([p.detach().clone() for p in model.parameters()])
        return seen

    assert_twins(mlp, loop, share=0.9)


# -- exactness of whole loops ------------------------------------------------------------------------------------------


def test_clipping_accumulation_and_a_scheduler():
    def loop(model, optimizer, target):
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=20)
        seen = []
        for _ in range(4):
            for _ in range(4):
                (model(batch(target)).square().mean() / 4).backward()
            seen.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        return seen

    assert_twins(mlp, loop)


@pytest.fixture
def norms_taken(monkeypatch):
    """For each clipping, whether it got by without reading gradients."""
    original = StatefulTensorMgr.take_norms
    answers = []

    def take_norms(self, tensors, norm_type):
        norms = original(self, tensors, norm_type)
        answers.append(norms is not None)
        return norms

    monkeypatch.setattr(StatefulTensorMgr, "take_norms", take_norms)
    return answers


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf"), 3.0])
def test_clipping_reads_no_gradient_and_has_the_same_bits(norm_type, norms_taken):
    def loop(model, optimizer, target):
        seen = []
        for step in range(6):
            backward(model, target)
            most = 1e-3 if step < 4 else 100.0
            seen.append(torch.nn.utils.clip_grad_norm_(model.parameters(), most, norm_type))
            if step == 3:
                seen.append([p.grad.clone() for p in model.parameters()])
            optimizer.step()
            if step == 2:
                seen.append([p.grad.clone() for p in model.parameters()])
            optimizer.zero_grad()
            with torch.no_grad():  # with gradients, autograd might reach the weight by this path too
                seen.append(model[0].weight.clone())
        return seen

    assert_twins(mlp, loop)
    assert norms_taken == [False, True, True, True, True, True]


def test_clipping_does_not_wait(norms_taken):
    model, optimizer, manager, target = managed_mlp()
    with manager:
        for _ in range(2):
            backward(model, target)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()
            optimizer.zero_grad()
        backward(model, target)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                manager._stm.gradients, "wait", lambda tensor: pytest.fail("a gradient was waited for")
            )
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()
        assert pending(manager)
    assert norms_taken == [False, True, True]


def test_a_gradient_that_was_looked_at_changed_or_added_to_is_read_again(norms_taken):
    def loop(model, optimizer, target):
        seen = []
        weight = model[2].weight
        for step in range(8):
            backward(model, target)
            if step == 1:
                weight.grad.mul_(100.0)
            elif step == 2:
                weight.grad = weight.grad * 50
            elif step == 3:
                weight.grad = None
            elif step == 4:
                backward(model, target)
            elif step == 5:
                held = weight.grad.numpy()
                held[0, 0] = 3.0
            elif step == 6:
                (g,) = torch.autograd.grad(model(batch(target)).square().mean(), [weight])
                seen.append(g)
            seen.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3))
            seen.append(torch.nn.utils.clip_grad_norm_(list(model.parameters())[:3], 1e-4))
            optimizer.step()
            optimizer.zero_grad()
        return seen

    def home_loop(model, optimizer, target):
        return loop(model, optimizer, torch.device("cpu"))

    torch.manual_seed(0)
    model = mlp(depth=2)
    optimizer = adamw(model)
    torch.manual_seed(1)
    expected = plain([home_loop(model, optimizer, None), list(model.parameters())])
    model, optimizer, manager, target = managed_mlp()
    with manager:
        torch.manual_seed(1)
        got = plain([loop(model, optimizer, target), list(model.parameters())])
    assert_same(got, expected, "seen")
    # Without a gradient (3) the rest is still true; the second of each pair comes after a scaling.
    assert norms_taken[::2] == [False, False, False, True, False, False, False, True]
    assert not any(norms_taken[1::2])


def test_a_held_gradient_is_scaled_at_once_and_norms_apart_from_scaling(norms_taken):
    def loop(model, optimizer, target):
        seen = []
        for step in range(4):
            backward(model, target)
            held = [model[0].weight.grad, model[2].weight.grad.view(-1)] if step % 2 else []
            total = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
            torch.nn.utils.clip_grads_with_norm_(model.parameters(), 1e-3, total)
            seen.append([total, [h.clone() for h in held]])
            optimizer.step()
            optimizer.zero_grad()
        return seen

    assert_twins(mlp, loop)


def test_clipping_raises_on_what_is_not_finite(norms_taken):
    def loop(model, optimizer, target):
        for _ in range(3):
            backward(model, target)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()
            optimizer.zero_grad()
        (model(batch(target)).square().mean() * float("inf")).backward()
        with pytest.raises(RuntimeError, match="non-finite"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        return [p.grad.clone() for p in model.parameters()]

    assert_twins(mlp, loop)
    assert norms_taken[-1]


def test_clipping_is_torchs_own_again_after_close():
    before = torch.nn.utils.clip_grad_norm_.__closure__[0].cell_contents
    _, _, manager, _ = managed_mlp()
    assert torch.nn.utils.clip_grad_norm_.__closure__[0].cell_contents is not before
    manager.close()
    assert torch.nn.utils.clip_grad_norm_.__closure__[0].cell_contents is before


def test_grad_scaler_with_a_forced_inf():
    def loop(model, optimizer, target):
        scaler = torch.amp.GradScaler("virtual", init_scale=2.0**10, growth_interval=2)
        seen = []
        for step in range(7):
            loss = model(batch(target)).square().mean()
            scaler.scale(loss).backward()
            if step in (3, 4):
                next(model.parameters()).grad.view(-1)[0] = float("inf")
            if step % 2:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            seen.append([loss, scaler.get_scale()])
        return seen

    assert_twins(mlp, loop)


def test_grad_scaler_with_a_fused_optimizer_that_unscales_by_itself():
    def run(manage):
        torch.manual_seed(0)
        target = torch.device("cpu")
        model = mlp(depth=2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        manager = None
        if manage:
            target = device()
            manager = hetero.manage(model, optimizer, device=target, device_budget="4MiB")
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        torch.manual_seed(1)
        seen = []
        for step in range(6):
            loss = model(batch(target)).square().mean().cpu()
            scaler.scale(loss).backward()
            if step == 3:
                next(model.parameters()).grad.view(-1)[0] = float("inf")
            scaler.step(optimizer)
            scaler.update()
            if step == 4:
                seen.append([p.grad for p in model.parameters()])
            optimizer.zero_grad()
            seen.append([loss, scaler.get_scale()])
        if manager is not None:
            assert manager._host_step.queued > 0
            manager.close()
        return plain([*seen, list(model.parameters())])

    expected = run(manage=False)
    assert_same(run(manage=True), expected, "seen")


def test_two_optimizers_on_one_model():
    def make(model):
        first = torch.optim.AdamW(list(model.parameters())[:4], lr=1e-2, foreach=False)
        first.other = torch.optim.SGD(list(model.parameters())[4:], lr=1e-1, momentum=0.9, foreach=False)
        return first

    def loop(model, optimizer, target):
        seen = []
        for step in range(6):
            loss = model(batch(target)).square().mean()
            loss.backward()
            optimizer.step()
            if step % 2:
                optimizer.other.step()
                optimizer.other.zero_grad()
            optimizer.zero_grad()
            seen.append(loss)
        return seen

    assert_twins(mlp, loop, make_optimizer=make)


def test_two_optimizers_on_the_same_parameters():
    def make(model):
        optimizer = adamw(model)
        optimizer.other = torch.optim.SGD(model.parameters(), lr=1e-2, fused=True)
        return optimizer

    def loop(model, optimizer, target):
        seen = []
        for _ in range(5):
            loss = model(batch(target)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.other.step()
            optimizer.zero_grad()
            seen.append(loss)
        return seen

    assert_twins(mlp, loop, make_optimizer=make)


def test_frozen_then_unfrozen_layers_and_parameters_without_gradient():
    class Partial(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = mlp(depth=3)
            self.unused = nn.Linear(4, 4)

        def forward(self, x):
            return self.body(x)

    def loop(model, optimizer, target):
        seen = []
        for step in range(9):
            if step % 3 == 0:
                for p in model.body[2].parameters():
                    p.requires_grad_(step == 3)
            loss = model(batch(target)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss)
        return seen

    def make(model):
        return torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)

    assert_twins(Partial, loop, make_optimizer=make)


def test_a_graph_from_before_the_step_is_refused_after_it_as_ever():
    def loop(model, optimizer, target):
        two_steps(model, optimizer, target)
        loss = model(batch(target)).square().mean()
        backward(model, target)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        optimizer.zero_grad()
        penalty = sum(p.square().sum() for p in model.parameters())
        backward(model, target)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            penalty.backward()
        return []

    assert_twins(lambda: mlp(depth=2), loop, share=0.9)


def test_step_hooks_run_once_on_the_users_thread_and_see_the_finished_step():
    def loop(model, optimizer, target):
        seen = []
        me = threading.get_ident()

        def before(optimizer, args, kwargs):
            assert threading.get_ident() == me
            assert len(optimizer.param_groups[0]["params"]) == len(list(model.parameters()))
            for p in model.parameters():
                p.grad.mul_(0.5)
            seen.append([p.grad for p in model.parameters()])

        def after(optimizer, args, kwargs):
            assert threading.get_ident() == me
            assert len(optimizer.param_groups[0]["params"]) == len(list(model.parameters()))
            seen.append([p.detach().clone() for p in model.parameters()])

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)
        two_steps(model, optimizer, target)
        two_steps(model, optimizer, target)
        assert len(seen) == 8
        return seen

    assert_twins(mlp, loop, share=0.9)


def test_load_state_dict_between_steps():
    def loop(model, optimizer, target):
        two_steps(model, optimizer, target)
        saved = copy.deepcopy(optimizer.state_dict())
        weights = copy.deepcopy(model.state_dict())
        two_steps(model, optimizer, target)
        optimizer.load_state_dict(saved)
        two_steps(model, optimizer, target)
        model.load_state_dict(weights)
        optimizer.state.clear()
        two_steps(model, optimizer, target)
        return [optimizer.state[p]["step"] for p in model.parameters()]

    assert_twins(mlp, loop, share=0.9)


# -- errors ------------------------------------------------------------------------------------------------------------


class Fragile(torch.optim.Optimizer):
    """Fails for one parameter, in the middle of writing."""

    steps_parameters_independently = True

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["sum"] = torch.zeros_like(p)
                state["sum"] += p.grad
                p.add_(state["sum"], alpha=-group["lr"])
                if p.grad.isnan().any():
                    state["spoilt"] = True
                    raise ValueError("half-way")


def host_step_of(optimizer):
    cells = [cell.cell_contents for cell in optimizer.__dict__["step"].__func__.__closure__]
    return next(cell for cell in cells if isinstance(cell, HostStep))


def manager_of(optimizer):
    return host_step_of(optimizer)._note_states.__self__


WAITS = {
    "forward": lambda m, o, t: m(batch(t)),
    "the parameter": lambda m, o, t: m[2].weight.sum(),
    "another parameter": lambda m, o, t: m[0].bias.sum(),
    "step": lambda m, o, t: o.step(),
    "state": lambda m, o, t: o.state_dict(),
    "stats": lambda m, o, t: manager_of(o).stats,
    "load": lambda m, o, t: o.load_state_dict({}),
}


@pytest.mark.parametrize("way", WAITS)
def test_an_error_in_the_queue_is_raised_by_the_next_wait_and_has_written_nothing(way):
    model, optimizer, manager, target = managed_mlp(lambda m: Fragile(m.parameters()))
    with manager:
        two_steps(model, optimizer, target)
        backward(model, target)
        model[2].weight.grad[0, 0] = float("nan")
        before = model[2].weight.detach().clone()
        summed = optimizer.state[model[2].weight]["sum"].clone()
        others = model[0].weight.detach().clone()
        optimizer.step()
        assert "2.weight" in pending(manager)
        optimizer.zero_grad()
        manager._stm.updates.finish_all()
        with pytest.raises(ValueError, match="half-way"):
            WAITS[way](model, optimizer, target)
        assert torch.equal(model[2].weight, before)
        assert optimizer.state[model[2].weight].keys() == {"sum"}
        assert torch.equal(optimizer.state[model[2].weight]["sum"], summed)
        assert not torch.equal(model[0].weight, others)
        two_steps(model, optimizer, target)  # it goes on
    assert not any(p.isnan().any() for p in model.parameters())


def test_an_error_that_nobody_waited_for_is_raised_by_close_which_gives_everything_back():
    model, optimizer, manager, target = managed_mlp(lambda m: Fragile(m.parameters()))
    two_steps(model, optimizer, target)
    backward(model, target)
    model[2].weight.grad[0, 0] = float("nan")
    optimizer.step()
    with pytest.raises(ValueError, match="half-way"):
        manager.close()
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert type(optimizer.state) is not type(manager)
    manager.close()


def test_an_error_within_the_step_leaves_nothing_queued():
    def loop(model, optimizer, target):
        two_steps(model, optimizer, target)
        backward(model, target)
        kept = optimizer.state[model[0].weight]
        kept["step"] = "nonsense"
        with pytest.raises(Exception):  # noqa: B017, PT011 - whatever AdamW makes of it
            optimizer.step()
        kept["step"] = torch.tensor(2.0)
        optimizer.zero_grad()
        assert optimizer.param_groups[0]["params"]
        two_steps(model, optimizer, target)
        return [p.detach().clone() for p in list(model.parameters())[:1]]

    model, optimizer, manager, target = managed_mlp()
    with manager:
        loop(model, optimizer, target)
        assert not manager._host_step._captured


# -- optimizers of unknown kinds -----------------------------------------------------------------------------------


class Lion(torch.optim.Optimizer):
    steps_parameters_independently = True  # said of this class, not of those that inherit from it

    def __init__(self, parameters, lr=1e-3, betas=(0.9, 0.99)):
        super().__init__(parameters, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                p.add_(m.lerp(p.grad, 1 - b1).sign_(), alpha=-group["lr"])
                m.lerp_(p.grad, 1 - b2)


class ClipsByTheGlobalNorm(Lion):
    @torch.no_grad()
    def step(self, closure=None):
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        torch._foreach_mul_(gradients, torch.clamp(1e3 / norm, max=1.0))
        super().step()


class CountsInTheGroup(Lion):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        super().step()


class CountsOnItself(Lion):
    count = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.count += 1
        super().step()


class Noisy(Lion):
    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(torch.randn_like(p), alpha=1e-4)


class SharesAverages(Lion):
    """Like SOAP's or Muon's variants that keep one statistic for all."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        mean = torch.stack([self.state[p]["m"].mean() for g in self.param_groups for p in g["params"]]).mean()
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(mean)


@pytest.mark.parametrize(
    ("kind", "alone"),
    [
        (Lion, True),
        (ClipsByTheGlobalNorm, False),
        (CountsInTheGroup, False),
        (CountsOnItself, False),
        (Noisy, False),
        (SharesAverages, False),
    ],
)
def test_only_a_class_that_says_so_is_stepped_parameter_by_parameter(kind, alone):
    def make(model):
        return kind(model.parameters())

    queued = []

    def loop(model, optimizer, target):
        for _ in range(5):
            two_steps(model, optimizer, target)
        if "step" in optimizer.__dict__:
            queued.append(host_step_of(optimizer).queued)
        return [p.detach() for p in model.parameters()]

    assert_twins(mlp, loop, make_optimizer=make)
    assert (queued[-1] > 0) is alone


def test_lbfgs_and_closures_are_stepped_whole():
    def make(model):
        return torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def loop(model, optimizer, target):
        x = batch(target)
        seen = []
        for _ in range(3):

            def closure():
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                return loss

            seen.append(optimizer.step(closure))
        return seen

    target = torch.device("cpu")
    torch.manual_seed(0)
    model = mlp(depth=2)
    optimizer = make(model)
    torch.manual_seed(1)
    expected = plain(loop(model, optimizer, target))
    model, optimizer, manager, target = managed_mlp(make)
    with manager:
        torch.manual_seed(1)
        assert_same(plain(loop(model, optimizer, target)), expected, "loss")
        assert manager._host_step.queued == 0


def test_adamw_with_a_closure_between_deferred_steps():
    def loop(model, optimizer, target):
        seen = []
        for step in range(6):
            x = batch(target)

            def closure(x=x):
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                return loss

            if step % 2:
                seen.append(optimizer.step(closure))
            else:
                seen.append(closure())
                optimizer.step()
        return seen

    assert_twins(mlp, loop)


# -- the queue itself --------------------------------------------------------------------------------------------------


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
    with hetero.manage(model, optimizer, device=target, device_budget="4MiB") as manager:
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
    gate = threading.Event()
    done = []
    updates = [Update(lambda: gate.wait() and None)]
    updates += [Update(lambda number=number: done.append(number)) for number in range(5)]
    queue.submit(updates)
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
    import os

    model, optimizer, manager, target = managed_mlp()
    with manager:
        two_steps(model, optimizer, target)
        backward(model, target)
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


# -- any loop ------------------------------------------------------------------------------------------------------

ACTIONS = (
    *("micro-batch", "micro-batch", "step", "step", "clip", "zero", "zero in place", "read", "read gradient"),
    *(
        "write",
        "write data",
        "eval",
        "state",
        "hold",
        "let go",
        "freeze",
        "other step",
        "lr",
        "scale gradients",
    ),
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(actions=st.lists(st.sampled_from(ACTIONS), min_size=4, max_size=24), share=st.sampled_from([0.5, 0.9]))
def test_any_loop(actions, share):
    def make(model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
        optimizer.other = torch.optim.SGD(list(model.parameters())[:3], lr=1e-2, foreach=False)
        return optimizer

    def loop(model, optimizer, target):
        seen = []
        held = []
        two_steps(model, optimizer, target)
        parameters = list(model.parameters())
        for number, action in enumerate(actions):
            chosen = parameters[number % len(parameters)]
            with torch.no_grad():
                if action == "micro-batch":
                    with torch.enable_grad():
                        loss = model(batch(target)).square().mean()
                        loss.backward()
                    seen.append(loss)
                elif action == "step":
                    optimizer.step()
                elif action == "clip":
                    seen.append(torch.nn.utils.clip_grad_norm_(parameters, 1e-2))
                elif action == "zero":
                    optimizer.zero_grad()
                elif action == "zero in place":
                    optimizer.zero_grad(set_to_none=False)
                elif action == "read":
                    seen.append(chosen.detach().clone())
                elif action == "read gradient":
                    seen.append(None if chosen.grad is None else chosen.grad.clone())
                elif action == "write":
                    chosen.mul_(0.9)
                elif action == "write data":
                    chosen.data.add_(0.01)
                elif action == "eval":
                    seen.append(model(batch(target, 4)))
                elif action == "state":
                    seen.append(optimizer.state[chosen].get("step", torch.zeros(())).clone())
                elif action == "hold":
                    held.append((chosen.data, chosen.grad))
                elif action == "let go":
                    seen += [[d.clone(), None if g is None else g.clone()] for d, g in held]
                    held.clear()
                elif action == "freeze":
                    chosen.requires_grad_(not chosen.requires_grad)
                elif action == "other step":
                    optimizer.other.step()
                elif action == "lr":
                    optimizer.param_groups[0]["lr"] *= 0.7
                elif action == "scale gradients":
                    for p in parameters:
                        if p.grad is not None:
                            p.grad.mul_(0.5)
        return seen

    assert_twins(lambda: mlp(depth=2), loop, share=share, make_optimizer=make)


def test_the_same_without_deferral():
    """The switch that benchmarks use."""
    expected, _, _ = unmanaged(mlp, lambda m, o, t: train(m, o, t, 4))
    target = device()
    torch.manual_seed(0)
    model = mlp()
    optimizer = adamw(model)
    with hetero.manage(model, optimizer, device=target, device_budget="4MiB") as manager:
        manager._host_step.defers = False
        torch.manual_seed(1)
        assert_same(plain(train(model, optimizer, target, 4)), expected, "loss")
        assert manager._host_step.queued == 0


def test_a_state_held_across_close_is_not_stale_under_the_next_manager():
    target = device()
    torch.manual_seed(0)
    model = mlp()
    optimizer = adamw(model)
    with hetero.manage(model, optimizer, device=target, device_budget="4MiB"):
        two_steps(model, optimizer, target)
        held = optimizer.state
    with hetero.manage(model, optimizer, device=target, device_budget="4MiB"):
        two_steps(model, optimizer, target)
        two_steps(model, optimizer, target)
        assert optimizer.state[model[0].weight]["step"] == 6
    assert len(held) == len(list(model.parameters()))


def test_a_step_while_the_interpreter_goes_down_is_done_at_once():
    queue = UpdateQueue()
    queue._worker.shutdown()
    done = []
    updates = [Update(lambda: done.append(1)), Update(lambda: done.append(2))]
    queue.submit(updates)
    assert done == [1, 2]
    for update in updates:
        queue.finish(update)
