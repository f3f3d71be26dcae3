"""What the user changes, or looks at, while everything fits: the same numbers, and the settled state only where it is
right."""

import contextlib
import copy
import gc
import io
import os
import pickle

import pytest
import torch
from accelerators import GAPS, ON_CUDA, ON_HOST, STEPS_AT_HOME
from loops import batch, losses, mlp, square_loss
from settling import (
    PLENTY,
    assert_leaves_and_comes_back,
    is_intercepted,
    managed_mlp,
    settle,
    step,
)
from torch import nn
from twins import adamw, assert_same, assert_twins, device, managed, plain, unmanaged

import hetero

pytestmark = pytest.mark.usefixtures("homes_on_device")


# -- the user changes something ------------------------------------------------------------------------


def _skipping(failing, rows):
    """Of a batch that fits nowhere, at these iterations."""

    def loop(model, optimizer, target):
        seen = []
        for number in range(30):
            if number in failing:
                with pytest.raises(torch.OutOfMemoryError):
                    model(torch.zeros(rows, 64).to(target)).mean().backward()
                optimizer.zero_grad()
            seen.append(step(model, optimizer, target))
        return seen

    return loop


@pytest.mark.parametrize("failing", [[6], [6, 8, 9], [8, 14, 20, 26]])
def test_who_skips_a_batch_that_fits_nowhere_settles_again(failing):
    seen, _, manager = managed(mlp, _skipping(failing, 100_000), PLENTY)
    assert_same(seen, unmanaged(mlp, _skipping([], 0))[0], "losses")
    assert manager.stats.settled_forwards >= 30 - 4 - 2 * len(failing)


@pytest.mark.skipif(ON_CUDA, reason=STEPS_AT_HOME)
def test_layers_are_frozen_and_unfrozen():
    def loop(model, optimizer, target, note):
        seen, parameters = losses(model, optimizer, target, 6), list(model.parameters())
        for flag in (False, True, False):
            note(True)
            parameters[1].requires_grad_(flag)
            parameters[4].requires_grad_(not flag)
            seen += losses(model, optimizer, target, 7)
        return [*seen, *[p.detach().clone() for p in parameters], [p.requires_grad for p in parameters]]

    def build():
        model = mlp()
        list(model.parameters())[4].requires_grad_(False)
        return model

    def make_all(model):
        return torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)

    assert_leaves_and_comes_back(loop, build=build, make_optimizer=make_all)


def test_a_group_is_added():
    def make_part(model):
        return torch.optim.AdamW(list(model.parameters())[:5], lr=1e-2, foreach=False)

    def loop(model, optimizer, target, note):
        seen = losses(model, optimizer, target, 7)
        model.zero_grad()
        optimizer.add_param_group({"params": list(model.parameters())[5:], "lr": 1e-3})
        note(False)
        return seen + losses(model, optimizer, target, 8)

    assert_twins(mlp, lambda m, o, t: loop(m, o, t, lambda _: None), budget=PLENTY, make_optimizer=make_part)
    model, optimizer, manager, target = managed_mlp(make_optimizer=make_part)
    with manager:
        settle(model, optimizer, manager, target)
        loop(model, optimizer, target, lambda expected: None)
        assert manager.plan.everything_fits


def test_states_are_loaded():
    def loop(model, optimizer, target, note):
        seen = losses(model, optimizer, target, 6)
        note(True)
        buffer = io.BytesIO()
        torch.save([model.state_dict(), optimizer.state_dict()], buffer)
        seen += losses(model, optimizer, target, 3)
        buffer.seek(0)
        weights, states = torch.load(buffer, map_location="cpu")
        before = torch.accelerator.memory_allocated()
        torch.accelerator.reset_peak_memory_stats()
        model.load_state_dict(weights)
        optimizer.load_state_dict(states)
        spike = torch.accelerator.max_memory_allocated() - before
        note(False)
        assert (
            spike < sum(p.nbytes for p in model.parameters())
            or type(next(model.parameters())) is nn.Parameter
        )
        return seen + losses(model, optimizer, target, 8)

    assert_leaves_and_comes_back(loop)


@pytest.mark.skipif(ON_CUDA, reason=STEPS_AT_HOME)
def test_checkpoints_are_plain_and_those_who_hold_one_keep_it_settled():
    model, optimizer, manager, target = managed_mlp()
    with manager:
        settle(model, optimizer, manager, target)
        held = model.state_dict()
        assert all(type(value) is torch.Tensor and value.device == target for value in held.values())
        step(model, optimizer, target, rows=11)  # of a new size: but what is held would be left behind
        assert manager.plan.everything_fits
        assert all(torch.equal(held[name], p) for name, p in model.named_parameters())
        del held
        step(model, optimizer, target, rows=12)
        assert not manager.plan.everything_fits


def test_copies_and_pickles_are_plain():
    model, optimizer, manager, target = managed_mlp()
    with manager:
        settle(model, optimizer, manager, target)
        twin = copy.deepcopy(model)
        again = pickle.loads(pickle.dumps(model))
        for other in (twin, again):
            assert all(type(p) is nn.Parameter and not p.__dict__ for p in other.parameters())
            assert_same(plain([*other.parameters()]), plain([*model.parameters()]), "copy")
            other(batch(target)).sum().backward()
        step(model, optimizer, target)
        assert manager.plan.everything_fits


def test_conversions_and_replacements_are_refused_as_before():
    model, optimizer, manager, target = managed_mlp()
    with manager:
        settle(model, optimizer, manager, target)
        for convert in (model.half, lambda: model.to(target, torch.float64)):
            with pytest.raises(hetero.ManageError, match="while managed"):
                convert()
        with pytest.raises(hetero.ManageError, match="assign=True"):
            model.load_state_dict(model.state_dict(), assign=True)
        assert model.to(target) is model
        assert not is_intercepted(model)
        step(model, optimizer, target)


def test_a_smaller_share_of_the_device():
    model, optimizer, manager, target = managed_mlp("8MiB")
    with manager:
        settle(model, optimizer, manager, target)
        assert manager.trim() >= 0
        step(model, optimizer, target)
        assert manager.plan.everything_fits
        manager.trim(600 << 10)
        step(model, optimizer, target)
        torch.accelerator.reset_peak_memory_stats()
        for _ in range(4):
            step(model, optimizer, target)
            assert is_intercepted(model)
        assert torch.accelerator.max_memory_allocated() <= (600 << 10) + GAPS


@pytest.mark.parametrize("when", ["within forward", "beside an alias"])
def test_a_smaller_share_of_the_device_that_cannot_be_had_now(when, monkeypatch):
    """It is from the next forward on at which nothing stands against it."""
    managers, manage = [], hetero.manage
    monkeypatch.setattr(
        hetero, "manage", lambda *args, **kwargs: managers.append(manage(*args, **kwargs)) or managers[0]
    )

    def loop(model, optimizer, target):
        seen = losses(model, optimizer, target, 6)
        settled = [not is_intercepted(model)]

        def trim(*_):
            for manager in managers:
                manager.trim(torch.accelerator.memory_allocated() - (200 << 10))

        if when == "within forward":
            with model[2].register_forward_hook(trim):
                seen += losses(model, optimizer, target, 1)
        else:
            held = model.state_dict()
            trim()
            seen += losses(model, optimizer, target, 2)
            del held
        settled.append(not is_intercepted(model))
        seen += losses(model, optimizer, target, 2)
        settled.append(not is_intercepted(model))
        assert settled == ([True, True, False] if managers else [True] * 3)
        return seen

    assert_twins(mlp, loop, budget=PLENTY)


def test_what_is_saved_for_backward_is_no_longer_kept_on_the_host_by_the_caller():
    """The same inputs, and the same operators: what forward leaves on the device is many times as much."""
    budget = 16 << 20

    def train(model, optimizer, target, *, on_cpu):
        with torch.autograd.graph.save_on_cpu() if on_cpu else contextlib.nullcontext():
            loss = model(batch(target, rows=4096)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def loop(model, optimizer, target):
        return [train(model, optimizer, target, on_cpu=on) for on in (True, False, True) for _ in range(6)]

    assert_twins(mlp, loop, budget=budget)
    model, optimizer, manager, target = managed_mlp(budget)
    with manager:
        for on_cpu in (True, False):
            torch.accelerator.reset_peak_memory_stats()
            for _ in range(6):
                train(model, optimizer, target, on_cpu=on_cpu)
            assert manager.plan.everything_fits == on_cpu
            assert torch.accelerator.max_memory_allocated() <= budget + GAPS


@pytest.mark.parametrize("share", [0.92, 0.95, 0.98, 1.0, 1.02, 1.05, 1.2])
def test_what_the_callers_hooks_give_back_of_parameters_has_room(share):
    """Settled, they save parameters as well, and backward of a recurrent layer has a copy of each of its weights."""

    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.GRU(64, 64) for _ in range(3))

        def forward(self, x):
            for layer in self.layers:
                x = x + layer(x[None])[0][0]
            return x

    def loop(model, optimizer, target):
        def on_host(x):
            with torch.autograd.graph.save_on_cpu():
                return model(x)

        return losses(on_host, optimizer, target, 8, micro_batches=3)

    manager = assert_twins(Recurrent, loop, share=share)
    if share == 1.2:
        assert manager.stats.settled_forwards == 15


@pytest.mark.skipif(ON_CUDA, reason=ON_HOST)
def test_closing_gives_back_what_was_there_and_training_goes_on():
    model, optimizer, manager, target = managed_mlp()
    settle(model, optimizer, manager, target)
    loss = square_loss(model, target)
    manager.close()
    loss.backward()
    got = plain([p.grad for p in model.parameters()])
    assert all(p.grad.device.type == "cpu" for p in model.parameters())
    optimizer.step()
    assert all(v.device.type == "cpu" for s in optimizer.state.values() for v in s.values())
    torch.manual_seed(0)
    twin = mlp()
    other = adamw(twin)
    for _ in range(6):
        step(twin, other, torch.device("cpu"))
    square_loss(twin, torch.device("cpu")).backward()
    assert_same(got, plain([p.grad for p in twin.parameters()]), "gradients")
    other.step()
    assert_same(plain([*model.parameters()]), plain([*twin.parameters()]), "parameters")


def test_a_manager_that_is_dropped_leaves_nothing():
    target = device()
    gc.collect()
    before = torch.accelerator.memory_allocated()
    patched = torch.nn.Module._apply
    model, optimizer, manager, target = managed_mlp()
    settle(model, optimizer, manager, target)
    assert torch.nn.Module._apply is not patched
    del model, optimizer, manager
    gc.collect()
    gc.collect()  # what the manager's own end has let go
    assert torch.accelerator.memory_allocated() == before
    assert torch.nn.Module._apply is patched


# -- who looks at home ---------------------------------------------------------------------------------


def test_an_average_of_the_parameters_at_home_keeps_them_there():
    def averaged(make):
        def loop(model, optimizer, target):
            seen, average = [], make(model)
            for _ in range(9):
                seen.append(step(model, optimizer, target))
                with torch.no_grad():
                    for mean, p in zip(average, model.parameters(), strict=True):
                        mean.mul_(0.9).add_(p * 0.1)  # ``lerp_`` rounds otherwise on another device
            return [*seen, *average]

        return loop

    for make in (
        lambda model: [p.detach().clone() for p in model.parameters()],
        lambda model: list(copy.deepcopy(model).parameters()),
    ):
        manager = assert_twins(mlp, averaged(make), budget=PLENTY)
        assert manager.stats.settled_forwards == 0


def test_another_optimizer_over_the_same_parameters_keeps_them_at_home():
    def loop(model, optimizer, target):
        other = torch.optim.SGD(list(model.parameters())[:3], lr=1e-2, momentum=0.9, foreach=False)
        seen = []
        for number in range(12):
            seen.append(step(model, optimizer, target))
            if number % 8 == 7:
                square_loss(model, target).backward()
                other.step()
                model.zero_grad()
        return seen

    manager = assert_twins(mlp, loop, budget=PLENTY)
    assert manager.stats.settled_forwards == 0


def test_an_optimizer_that_comes_later_ends_it():
    model, optimizer, manager, target = managed_mlp()
    with manager:
        settle(model, optimizer, manager, target)
        other = torch.optim.SGD(list(model.parameters())[:3], lr=1e-2, momentum=0.9, foreach=False)
        for _ in range(4):
            square_loss(model, target).backward()
            assert is_intercepted(model)
            optimizer.step()
            other.step()
            optimizer.zero_grad()


def test_a_forked_child_neither_computes_nor_hangs():
    model, optimizer, manager, target = managed_mlp()
    x = batch(target)
    with manager:
        settle(model, optimizer, manager, target)
        child = os.fork()
        if child == 0:
            try:
                model(x)
            except hetero.ManageError:
                os._exit(0)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        step(model, optimizer, target)
        assert manager.plan.everything_fits


# torch 2.11 warns of its second cycle in the first.
@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events:UserWarning")
@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("way", ["close", "larger batch"])
@pytest.mark.parametrize("records", ["record_shapes", "with_stack"])
def test_a_profiler_that_has_seen_the_parameters_stands_in_nobodys_way(records, way, kept):
    """It has weak references to their implementations for as long as its results are there."""

    def profiled(model, optimizer, target):
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities, **{records: True}) as profiler:
            seen = [step(model, optimizer, target).detach() for _ in range(2)]
        square_loss(model, target).backward()  # there are gradients when it leaves
        return seen, profiler

    def finish(model, optimizer, target, rows):
        optimizer.step()
        optimizer.zero_grad()
        return [step(model, optimizer, target, rows).detach().cpu() for _ in range(3)]

    rows = 8 if way == "close" else 1024
    target = device()
    torch.manual_seed(0)
    expected_model = mlp().to(target)
    optimizer = adamw(expected_model)
    torch.manual_seed(1)
    for _ in range(6):
        step(expected_model, optimizer, target)
    expected, _ = profiled(expected_model, optimizer, target)
    expected += finish(expected_model, optimizer, target, rows)

    model, optimizer, manager, target = managed_mlp(budget="3MiB")
    torch.manual_seed(1)
    with manager:
        settle(model, optimizer, manager, target)
        seen, profiler = profiled(model, optimizer, target)
        if not kept:
            del profiler
        if way == "close":
            manager.close()
            assert {p.device.type for p in model.parameters()} == {"cpu"}
            assert all(p.grad.device.type == "cpu" for p in model.parameters())
            model.to(target)
            move_to(optimizer, target)
        passes = way == "larger batch" and kept  # an alias that nobody can tell from the user's own
        with pytest.warns(RuntimeWarning, match="was passed by") if passes else contextlib.nullcontext():
            seen += finish(model, optimizer, target, rows)
        if way == "larger batch" and not kept:
            assert is_intercepted(model)
    assert_same(plain(seen), plain(expected), "losses")
    assert_same(
        [p.detach().cpu() for p in model.parameters()],
        [p.detach().cpu() for p in expected_model.parameters()],
        "parameters",
    )


def move_to(optimizer, target):
    for state in optimizer.state.values():
        for key in ("exp_avg", "exp_avg_sq"):
            state[key] = state[key].to(target)


def test_parameters_that_have_become_parts_of_one_vector():
    """A copy on the device is known by its memory: as parts of one, all of them were taken for the last."""

    def loop(model, optimizer, target, note):
        seen = losses(model, optimizer, target, 6)
        note(True)
        vector = nn.utils.parameters_to_vector(model.parameters()).detach() * 0.9
        nn.utils.vector_to_parameters(vector, model.parameters())
        del vector
        seen.append(model(batch(target, 11)).square().mean())  # of a kind that is to be measured
        note(False)
        seen[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
        seen += losses(model, optimizer, target, 12)
        note(True)
        return seen

    assert_leaves_and_comes_back(loop)
