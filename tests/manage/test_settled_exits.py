"""Out of the settled state, in the middle of training: the same numbers, and back into it where that is right."""

import copy
import functools
import gc
import io
import os
import pickle

import pytest
import torch
from accelerators import GAPS, ON_CUDA, ON_HOST, STEPS_AT_HOME, clear_races, races, set_memory_limit
from backward_ends import wait_for_backward_ends
from loops import batch, losses, mlp, square_loss
from torch import nn
from twins import adamw, assert_same, assert_twins, device, managed, plain, unmanaged

import hetero
from hetero.stm.interception.intercept import ManagedParameter

pytestmark = pytest.mark.usefixtures("homes_on_device")

PLENTY = 64 << 20
BLOCKS = "a real allocator serves small tensors from blocks that it has, whatever the limit"


def managed_mlp(budget="64MiB", build=mlp, make_optimizer=adamw, **keywords):
    target = device()
    gc.collect()
    clear_races()
    torch.manual_seed(0)
    model = build()
    optimizer = make_optimizer(model)
    manager = hetero.manage(model, optimizer, device=target, device_budget=budget, **keywords)
    return model, optimizer, manager, target


def step(model, optimizer, target, rows=8):
    loss = model(batch(target, rows)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def settle(model, optimizer, manager, target, steps=6):
    for _ in range(steps):
        step(model, optimizer, target)
    assert manager.plan.everything_fits


def is_intercepted(model):
    return {type(p) is ManagedParameter for p in model.parameters()} == {True}


def assert_leaves_and_comes_back(loop, *, build=mlp, make_optimizer=adamw):
    """``loop(model, optimizer, target, note)``: it calls ``note(expected)`` where it is to be settled or not."""
    noted = []

    def silent(model, optimizer, target):
        return loop(model, optimizer, target, lambda expected: None)

    def noting(model, optimizer, target):
        return loop(
            model, optimizer, target, lambda expected: noted.append((expected, not is_intercepted(model)))
        )

    def either(model, optimizer, target):
        managed = type(next(model.parameters())) is ManagedParameter
        return (noting if managed else silent)(model, optimizer, target)

    assert_twins(build, either, budget=PLENTY, make_optimizer=make_optimizer)
    assert noted
    assert all(expected == settled for expected, settled in noted), noted


# -- other inputs --------------------------------------------------------------------------------------


@pytest.mark.skipif(ON_CUDA, reason=BLOCKS)
def test_what_a_graph_of_before_holds_is_there_without_it_as_well():
    """Else what was measured beside it would be too little once it is gone."""
    model, optimizer, manager, target = managed_mlp()
    with manager:
        settle(model, optimizer, manager, target)
        loss = step(model, optimizer, target)
        step(model, optimizer, target, rows=16)
        assert is_intercepted(model)
        gc.collect()
        value, before = loss.detach(), torch.accelerator.memory_allocated()
        del loss
        assert torch.accelerator.memory_allocated() == before
        del value


def test_a_batch_of_another_size():
    def loop(model, optimizer, target, note):
        seen = losses(model, optimizer, target, 6)
        note(True)
        for rows in (5, 8, 5, 5, 8, 8):
            seen.append(step(model, optimizer, target, rows))
            if len(seen) == 7:
                note(False)
        note(True)  # both sizes are known now
        seen.append(step(model, optimizer, target, 5))
        note(True)
        return seen

    assert_leaves_and_comes_back(loop)


def test_evaluation_between_steps_and_in_the_middle_of_one():
    def build():
        return nn.Sequential(mlp(), nn.Dropout(0.5), nn.BatchNorm1d(64))

    def loop(model, optimizer, target, note):
        seen = losses(model, optimizer, target, 6)
        note(True)
        for number in range(4):
            model.eval()
            with torch.no_grad():
                seen.append(model(batch(target)))
            model.train()
            if number == 0:
                note(False)
            loss = square_loss(model, target)
            with torch.no_grad():
                seen.append(model(batch(target)))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen += losses(model, optimizer, target, 2)
        note(True)
        return seen

    assert_leaves_and_comes_back(loop, build=build)


def test_a_graph_of_the_settled_state_is_gone_through_after_it_has_ended():
    def loop(model, optimizer, target, note):
        seen = losses(model, optimizer, target, 6)
        # Each by itself: which of two parameters is first is left to autograd's threads. In another type: what might be
        # a gradient would keep the parameters at home.
        hooked, after = [], []
        list(model.parameters())[2].register_hook(lambda g: hooked.append(g.double()))
        list(model.parameters())[3].register_post_accumulate_grad_hook(
            lambda p: after.append(p.grad.double())
        )
        for number in range(2):
            first = square_loss(model, target)
            note(True)
            second = model(batch(target, 5)).square().mean()
            note(number > 0)  # after that, its size is known
            second.backward()
            first.backward()
            seen.append([first, second, *[p.grad.double() for p in model.parameters()]])
            optimizer.step()
            optimizer.zero_grad()
        return [*seen, *losses(model, optimizer, target, 4), *hooked, *after]

    assert_leaves_and_comes_back(loop)


@pytest.mark.parametrize(
    "fused", [None, False]
)  # None: hetero chooses the kernels, by a step of its own around torch's
@pytest.mark.skipif(ON_CUDA, reason=STEPS_AT_HOME)
def test_a_closure_with_a_batch_of_another_size(fused):
    """It is called by torch's own step, which goes on with parameters and states where they were."""
    settled = []

    def loop(model, optimizer, target):
        seen = []

        def closure(rows):
            optimizer.zero_grad()
            loss = model(batch(target, rows)).square().mean()
            loss.backward()
            return loss

        for rows in (8, 8, 8, 8, 8, 8):
            seen.append(step(model, optimizer, target, rows))
        settled.append(not is_intercepted(model))
        calls, inner = [], optimizer.step

        def wrapped(*args, **kwargs):  # a user's own: an average, a counter
            calls.append(None)
            return inner(*args, **kwargs)

        optimizer.step = wrapped
        for rows in (8, 5, 8, 5, 5, 8):
            seen.append(optimizer.step(functools.partial(closure, rows)))
            settled.append(not is_intercepted(model))
        assert len(calls) == 6
        model(batch(target)).square().mean().backward()
        optimizer.step(None)
        optimizer.step(closure=None)
        return [*seen, *(step(model, optimizer, target, rows) for rows in (8, 5, 8))]

    def make_optimizer(model):
        return torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=fused, fused=fused)

    def make_plain(model):
        return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

    make_twin = make_plain if fused is None else make_optimizer
    expected, parameters, _ = unmanaged(mlp, loop, make_twin)
    settled.clear()
    got, state, _ = managed(mlp, loop, PLENTY, make_optimizer)
    assert_same(got, expected, "losses")
    assert_same(state, parameters, "parameters")
    assert settled[:3] == [True, True, False]  # ended by the first closure with other inputs


@pytest.mark.skipif(ON_CUDA, reason=STEPS_AT_HOME)
@pytest.mark.parametrize("schedules", [False, True])  # a scheduler wraps the method that it finds
@pytest.mark.parametrize("kept", [0, 6, 9])  # before it settles, settled, and when it has left again
def test_a_step_method_that_was_kept_steps_with_the_same_kernels(kept, schedules):
    settled = []

    def loop(model, optimizer, target):
        seen, run = [], optimizer.step
        for number, rows in enumerate((8, 8, 8, 8, 8, 8, 8, 5, 5, 8, 8, 8, 5, 8, 8, 8)):
            if number == kept:
                if schedules:
                    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n))
                run = optimizer.step
            loss = model(batch(target, rows)).square().mean()
            settled.append(not is_intercepted(model))
            loss.backward()
            (run if number >= kept else optimizer.step)()
            if schedules and number >= kept:
                scheduler.step()
            optimizer.zero_grad()
            seen.append(loss)
        return seen

    def make_fused(model):
        return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

    def make_optimizer(model):
        return torch.optim.AdamW(model.parameters(), lr=1e-2)

    expected, parameters, _ = unmanaged(mlp, loop, make_fused)
    settled.clear()
    got, state, _ = managed(mlp, loop, PLENTY, make_optimizer)
    assert_same(got, expected, "losses")
    assert_same(state, parameters, "parameters")
    assert (settled[6], settled[7], settled[-1]) == (True, False, True)


@pytest.mark.skipif(ON_CUDA, reason=STEPS_AT_HOME)
@pytest.mark.parametrize("fused", [None, False])
def test_closures_alone_settle_as_well(fused):
    """All forwards are within a step, as in a framework's loop."""

    def loop(model, optimizer, target):
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: 1 / (1 + number))

        def closure(rows):
            loss = model(batch(target, rows)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            return loss

        seen = []
        for rows in (8, 8, 8, 8, 8, 8, 5, 8, 8, 8):
            seen.append(optimizer.step(functools.partial(closure, rows)))
            scheduler.step()
        return seen

    def make_optimizer(model):
        return torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=fused, fused=fused)

    def make_plain(model):
        return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

    expected, parameters, _ = unmanaged(mlp, loop, make_plain if fused is None else make_optimizer)
    got, state, manager = managed(mlp, loop, PLENTY, make_optimizer)
    assert_same(got, expected, "losses")
    assert_same(state, parameters, "parameters")
    assert manager.stats.settled_forwards > 3


def test_micro_batches_of_which_one_is_new():
    def loop(model, optimizer, target, note):
        seen = losses(model, optimizer, target, 6)
        note(True)
        for rows in ((8, 8), (8, 5, 8), (8, 8)):
            for count in rows:
                loss = model(batch(target, count)).square().mean()
                loss.backward()
                seen.append(loss)
            note(rows == (8, 8))
            seen.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-2))
            optimizer.step()
            optimizer.zero_grad()
        return seen + losses(model, optimizer, target, 5)

    assert_leaves_and_comes_back(loop)


@pytest.mark.parametrize("share", [1.14, 1.16, 1.18])
def test_of_several_forwards_for_one_backward_all_fit_if_the_first_does(share):
    """Less is free as they begin. To leave between two of them would add up gradients in another order."""

    def penalised(model, optimizer, target):
        seen = []
        for _ in range(16):
            x, real, made = (batch(target) for _ in range(3))
            x.requires_grad_()
            slope = torch.autograd.grad(model(x).sum(), x, create_graph=True)[0]
            optimizer.zero_grad()
            loss = model(made).mean() - model(real).mean() + (slope.norm(dim=1) - 1).square().mean()
            loss.backward()
            optimizer.step()
            seen.append(loss.detach())
        return seen

    manager = assert_twins(lambda: mlp(depth=2), penalised, share=share)
    assert manager.stats.settled_forwards > 30


def test_a_larger_batch_that_does_not_fit_beside_everything():
    model, optimizer, manager, target = managed_mlp("2200KiB")
    torch.accelerator.reset_peak_memory_stats()
    torch.manual_seed(1)
    rows = [8] * 7 + [300] + [8] * 3
    with manager:
        seen = []
        for count in rows:
            seen.append(step(model, optimizer, target, count))
            if len(seen) == 7:
                assert manager.plan.everything_fits
        assert torch.accelerator.max_memory_allocated() <= (2200 << 10) + GAPS
        got = plain([*seen, *model.parameters()])
    assert races() == []
    torch.manual_seed(0)
    twin = mlp().to(target)
    plain_optimizer = adamw(twin)
    torch.manual_seed(1)
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    expected = [step(twin, plain_optimizer, target, count) for count in rows]
    assert torch.accelerator.max_memory_allocated() - before > 2200 << 10  # it would not have fitted
    assert_same(got, plain([*expected, *twin.parameters()]), "seen")


def test_memory_that_somebody_else_takes_ends_it_before_the_budget_is_passed():
    model, optimizer, manager, target = managed_mlp("4MiB")
    with manager:
        settle(model, optimizer, manager, target)
        free = (4 << 20) - torch.accelerator.memory_allocated()
        gradients = sum(p.nbytes for p in model.parameters())
        taken = torch.empty(free - gradients, dtype=torch.uint8, device=target)
        torch.accelerator.reset_peak_memory_stats()
        for _ in range(3):
            step(model, optimizer, target)
            assert is_intercepted(model)
        assert torch.accelerator.max_memory_allocated() <= (4 << 20) + GAPS
        del taken


@pytest.mark.skipif(ON_CUDA, reason=BLOCKS)
@pytest.mark.parametrize("where", ["forward", "backward", "step"])
def test_running_out_of_memory_ends_it_for_good(where):
    model, optimizer, manager, target = managed_mlp()
    with manager:
        settle(model, optimizer, manager, target)
        x = batch(target)
        run = functools.partial(model, x)
        if where != "forward":
            run = run().square().mean().backward
        if where == "step":
            run()
            run = optimizer.step
        set_memory_limit(torch.accelerator.memory_allocated())
        with pytest.raises(torch.OutOfMemoryError):
            run()
        del run
        wait_for_backward_ends(target)
        assert not is_intercepted(model)  # nobody of ours was called
        optimizer.zero_grad()
        model(x)  # leaving takes no memory, and what is managed needs less
        assert is_intercepted(model)
        set_memory_limit(256 << 20)
        for _ in range(5):
            step(model, optimizer, target)
            assert is_intercepted(model)


@pytest.mark.skipif(ON_CUDA, reason=BLOCKS)
def test_errors_that_another_manager_has_answered_do_not_end_it():
    model, optimizer, manager, target = managed_mlp()
    with manager:
        settle(model, optimizer, manager, target)
        torch.manual_seed(0)
        other = mlp()
        second = adamw(other)
        budget = torch.accelerator.memory_allocated() + (300 << 10)
        with hetero.manage(other, second, device=target, device_budget=budget):
            before = torch.accelerator.memory_stats()["num_ooms"]
            for rows in (8, 64, 8, 100, 100):
                step(other, second, target, rows)
                step(model, optimizer, target)
                assert manager.plan.everything_fits
            assert torch.accelerator.memory_stats()["num_ooms"] > before
        torch.accelerator.reset_accumulated_memory_stats()
        step(model, optimizer, target)
        assert manager.plan.everything_fits


# -- the user changes something ------------------------------------------------------------------------


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
        step(model, optimizer, target, rows=5)  # of a new size: but what is held would be left behind
        assert manager.plan.everything_fits
        assert all(torch.equal(held[name], p) for name, p in model.named_parameters())
        del held
        step(model, optimizer, target, rows=6)
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
