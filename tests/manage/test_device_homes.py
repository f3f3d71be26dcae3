"""Parameters that live on the device: same numbers, within the budget, nothing moves that need not."""

import gc
import importlib
import threading
import weakref

import pytest
import torch
from accelerators import GAPS, ON_CUDA, ON_HOST, clear_races, races
from backward_ends import wait_for_backward_ends
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from loops import ACTIONS, backward, batch, losses, mixed_loop, mlp, square_loss, train, two_optimizers
from test_optimizer_db import both, configurations
from torch import nn
from torch.utils.checkpoint import checkpoint
from twins import adamw, assert_same, assert_twins, device

import hetero
from hetero.stm import Kind, Tier
from hetero.stm.plans.timings import Timings
from hetero.stm.step.devicehomes import DeviceHomes, can_step_on_device

pytestmark = pytest.mark.usefixtures("homes_on_device", "late_queue")


def living(manager):
    return {tensor.name for tensor in manager._stm.tensors if tensor.stays}


def managed_mlp(budget="4MiB", make_optimizer=adamw, *, activations=True):
    target = device()
    gc.collect()
    clear_races()
    torch.manual_seed(0)
    model = mlp()
    optimizer = make_optimizer(model)
    manager = hetero.manage(model, optimizer, device=target, device_budget=budget, activations=activations)
    return model, optimizer, manager, target


def step(model, optimizer, target):
    backward(model, target)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("share", [0.5, 0.8, 1.5])
def test_a_training_loop(share):
    manager = assert_twins(mlp, lambda m, o, t: losses(m, o, t, 8), share=share)
    assert share < 1 or manager._stm.plans.device_homes


def test_gradients_that_somebody_holds_are_stepped_and_then_planned_at_home():
    manager = assert_twins(mlp, lambda m, o, t: train(m, o, t, 8), share=1.5)
    assert not manager._stm.plans.device_homes


def test_where_everything_fits_nothing_moves():
    model, optimizer, manager, target = managed_mlp("64MiB")
    with manager:
        for _ in range(5):
            step(model, optimizer, target)
        assert living(manager) == {name for name, _ in model.named_parameters()}
        before = manager.stats
        for _ in range(3):
            x = torch.ones(8, 64, device=target)
            model(x).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()
            optimizer.zero_grad()
        after = manager.stats
    assert after.total_fetched_bytes == before.total_fetched_bytes
    assert after.total_written_bytes == before.total_written_bytes


def look_at_norms(model):
    return [p.norm().item() for p in model.parameters()]  # with a graph, for a moment


def test_parameters_whose_norms_were_logged_live_there_all_the_same():
    target = device()
    gc.collect()
    torch.manual_seed(0)
    model = mlp()
    optimizer = adamw(model)
    with hetero.manage(model, optimizer, device=target, device_budget="1300KiB") as manager:
        look_at_norms(model)
        losses(model, optimizer, target, 16)
        here = living(manager)
        assert here
        look_at_norms(model)
        losses(model, optimizer, target, 2)
        assert living(manager) == here
        before = manager.stats
        losses(model, optimizer, target, 2)
        after = manager.stats
    others = sum(p.nbytes for name, p in model.named_parameters() if name not in here)
    assert after.total_written_bytes - before.total_written_bytes == 2 * others  # their gradients


def test_parameters_of_a_penalty_at_home_live_there():
    def loop(model, optimizer, target):
        seen = []
        for _ in range(12):
            penalty = torch.stack([p.square().sum() for p in model.parameters()]).sum()
            (square_loss(model, target) + penalty.to(target)).backward()
            seen.append(look_at_norms(model))
            optimizer.step()
            optimizer.zero_grad()
            seen.append(look_at_norms(model))
        return seen

    manager = assert_twins(mlp, loop, budget=64 << 20)
    assert manager.stats.settled_forwards == 0
    assert manager.stats.bytes_moved > 0


class Recomputed(nn.Module):
    """``layers``, each of which runs again in backward, where operators are outside of the model's forward."""

    def __init__(self, layers, *, use_reentrant):
        super().__init__()
        self.layers = layers
        self.use_reentrant = use_reentrant

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.use_reentrant)
        return x


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum(0)


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))

    def forward(self, x):
        return Scaled.apply(x, self.weight)


@pytest.mark.parametrize("share", [0.5, 0.8, 1.5])
@pytest.mark.parametrize("first", [1, 2, 7])
def test_parameters_are_taken_out_of_the_optimizer(share, first):
    def loop(model, optimizer, target):
        seen = losses(model, optimizer, target, first)
        group = optimizer.param_groups[0]
        taken, group["params"] = group["params"][:5], group["params"][5:]
        seen += losses(model, optimizer, target, 6)
        optimizer.add_param_group({"params": taken, "lr": 1e-3})
        return seen + losses(model, optimizer, target, 6)

    assert_twins(mlp, loop, share=share)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_what_lives_there_does_not_move_when_layers_are_recomputed(use_reentrant):
    target = device()
    gc.collect()
    torch.manual_seed(0)
    layers = nn.Sequential(*mlp(), Scale())
    model = Recomputed(layers, use_reentrant=use_reentrant)
    optimizer = adamw(model)
    with hetero.manage(model, optimizer, device=target, device_budget="1000KiB") as manager:
        for _ in range(10):
            x = batch(target).requires_grad_()
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        here = living(manager)
        assert 0 < len(here) < len(list(model.parameters()))
        before = manager.stats.total_written_bytes
        for _ in range(2):
            x = batch(target).requires_grad_()
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert living(manager) == here
        stats = manager.stats
    others = sum(p.nbytes for name, p in model.named_parameters() if name not in here)
    assert stats.total_written_bytes - before == 2 * others  # their gradients
    assert stats.unplanned_fetches == 0  # not even in the forward before the step with which they move
    # Parameters move whole, for which the bound need not pay.
    assert stats.bytes_moved <= 1.05 * stats.lower_bound_bytes


def test_casts_of_what_lives_there_are_not_kept_until_backward():
    kept = {}
    for allowed in (False, True):
        target = device()
        gc.collect()
        torch.manual_seed(0)
        model = mlp()
        optimizer = adamw(model)
        with hetero.manage(
            model, optimizer, device=target, device_budget="1000KiB", device_homes=allowed
        ) as manager:

            def forward(model=model, target=target):
                with torch.autocast(target.type, torch.bfloat16):
                    return model(batch(target))

            for _ in range(10):
                forward().float().square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            assert bool(living(manager)) is allowed
            output = forward()
            kept[allowed] = manager.stats.by_kind["device"]["activation"]
            del output
    assert kept[True] == kept[False] > 0


def test_fewer_live_there_under_a_smaller_budget_and_the_peak_keeps_to_it():
    counts = []
    for budget in (900 << 10, 1300 << 10):
        model, optimizer, manager, target = managed_mlp(budget)
        with manager:
            torch.accelerator.reset_peak_memory_stats()
            for _ in range(8):
                step(model, optimizer, target)
            assert torch.accelerator.max_memory_allocated() <= budget + GAPS
            counts.append(len(living(manager)))
        assert races() == []
    assert 0 < counts[0] < counts[1]


def test_one_call_steps_those_that_there_is_room_for_side_by_side(monkeypatch):
    module = importlib.import_module("torch.optim.adam")  # torch.optim has no attribute for it
    stepped, adam = [], module.adam

    def counting(params, *args, **keywords):
        if params and (
            ON_CUDA or params[0].device.type != "cpu"
        ):  # there a copy on the host stands in for it
            stepped.append(len(params))
        return adam(params, *args, **keywords)

    monkeypatch.setattr(module, "adam", counting)
    model, optimizer, manager, target = managed_mlp(1300 << 10)
    with manager:
        for _ in range(6):
            step(model, optimizer, target)
        stepped.clear()
        step(model, optimizer, target)
        there = len(living(manager))
    assert sum(stepped) == there > len(stepped)


def test_the_books_follow_what_comes_to_the_device_at_once(monkeypatch):
    taken, take = [], DeviceHomes.take

    def noting(self, candidates):
        before = self._stm.collector.non_model_bytes()
        here = take(self, candidates)
        taken.append((len(here), before, self._stm.collector.non_model_bytes()))
        return here

    monkeypatch.setattr(DeviceHomes, "take", noting)
    model, optimizer, manager, target = managed_mlp(900 << 10)
    with manager:
        for _ in range(4):
            step(model, optimizer, target)
    assert taken[0][0] == 0 < taken[-1][0]
    assert all(after <= before for _, before, after in taken)  # else states would count as the operators' own


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_clipping_accumulation_and_reading(norm_type):
    def loop(model, optimizer, target):
        seen = []
        for number in range(8):
            for rows in (8, 5, 3):
                backward(model, target, rows)
            seen.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-2, norm_type))
            if number == 5:
                seen.append([p.grad.clone() for p in model.parameters()])
            optimizer.step()
            if number == 6:
                seen.append([p.grad.clone() for p in model.parameters()])
            optimizer.zero_grad(set_to_none=number % 3 > 0)
        return seen

    assert_twins(mlp, loop, share=1.2)


def test_clipping_twice_and_gradients_shared_by_two_parameters():
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = (nn.Parameter(torch.ones(64)) for _ in range(2))
            self.last = nn.Linear(64, 64)

        def forward(self, x):
            return self.last(x + (self.first + self.second))

    def loop(model, optimizer, target):
        seen = []
        for _ in range(7):
            backward(model, target)
            for part in (list(model.parameters())[:1], list(model.parameters())):
                seen.append(torch.nn.utils.clip_grad_norm_(part, 1e-2))
            optimizer.step()
            optimizer.zero_grad()
        return seen

    assert_twins(Sum, loop, budget=4 << 20)


def test_values_states_and_gradients_are_seen_as_they_are():
    def loop(model, optimizer, target):
        seen = []
        held = None
        for number in range(12):
            backward(model, target)
            if number == 4:
                seen.append([p.detach().clone() for p in model.parameters()])
            elif number == 5:
                seen.append([v.clone() for s in optimizer.state.values() for v in s.values()])
            elif number == 6:
                seen.append({k: v.clone() for k, v in model.state_dict().items()}["0.weight"])
            elif number == 7:
                with torch.no_grad():
                    model[0].weight.mul_(0.5)
                    model[2].bias.data.add_(1.0)
            elif number == 8:
                optimizer.state[model[0].weight]["exp_avg"].mul_(0.5)
            elif number == 9:
                model.eval()
                with torch.no_grad():
                    seen.append(model(batch(target, 4)))
                model.train()
            elif number == 10:
                held = model[0].weight.data  # seen to change with the step
            elif number == 11:
                seen.append(held.clone())
            optimizer.step()
            optimizer.zero_grad()
        seen.append(held.clone())
        return seen

    assert_twins(mlp, loop, share=1.2)


@pytest.mark.parametrize(
    ("info", "keywords"),
    [case for case in configurations() if can_step_on_device(object.__new__(case.values[0].optim_cls))],
)
def test_every_optimizer_and_configuration(info, keywords):
    both(info, keywords, steps=8)


def adafactor(model):
    return torch.optim.Adafactor(model.parameters(), lr=1e-2)


def muon(model):
    return torch.optim.Muon(model.parameters(), lr=1e-2)


def matrices():
    layers = (nn.Linear(width, 160 - width, bias=False) for width in (64, 96) * 4)
    return nn.Sequential(*(layer for linear in layers for layer in (linear, nn.GELU())))


@pytest.mark.parametrize("share", [0.8, 1.5])
@pytest.mark.parametrize(("build", "make_optimizer"), [(mlp, adafactor), (matrices, muon)])
def test_optimizers_of_whole_matrices(build, make_optimizer, share):
    """What their updates allocate depends on the shape; their norms and products on which numbers are together."""
    manager = assert_twins(
        build, lambda m, o, t: losses(m, o, t, 12), share=share, make_optimizer=make_optimizer
    )
    assert manager._stm.plans.device_homes


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    actions=st.lists(st.sampled_from(ACTIONS), min_size=6, max_size=24),
    share=st.sampled_from([0.6, 1.0, 1.6]),
)
def test_any_loop(actions, share):
    lead = ["micro-batch", "step", "zero"] * 3
    assert_twins(
        lambda: mlp(depth=2), mixed_loop([*lead, *actions]), share=share, make_optimizer=two_optimizers
    )


def test_an_unknown_shape_that_needs_the_memory_gets_it():
    def loop(model, optimizer, target):
        seen = []
        for number in range(12):
            rows = 600 if number in (6, 9) else 8
            loss = model(batch(target, rows)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss)
        return seen

    assert_twins(mlp, loop, share=0.95)


def test_grad_scaler_plain_and_with_a_fused_optimizer():
    def loop(model, optimizer, target):
        scaler = torch.amp.GradScaler(target.type, init_scale=256.0, growth_interval=2)
        seen = []
        for number in range(9):
            loss = model(batch(target)).square().mean()
            scaler.scale(loss * (float("inf") if number == 5 else 1.0)).backward()
            if number % 2:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            seen.append([loss, scaler.get_scale()])
        return seen

    assert_twins(mlp, loop, share=1.2)
    assert_twins(
        mlp, loop, share=1.2, make_optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True)
    )


def test_checkpoints_go_on_with_the_same_numbers():
    def loop(model, optimizer, target):
        seen = train(model, optimizer, target, 6)
        saved = [
            {k: v.clone() for k, v in model.state_dict().items()},
            torch.utils._pytree.tree_map(
                lambda v: v.clone() if isinstance(v, torch.Tensor) else v, optimizer.state_dict()
            ),
        ]
        train(model, optimizer, target, 2)
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        return [*seen, *train(model, optimizer, target, 4)]

    assert_twins(mlp, loop, share=1.2)


@pytest.mark.skipif(ON_CUDA, reason=ON_HOST)
def test_close_brings_everything_home():
    model, optimizer, manager, target = managed_mlp("64MiB")
    before = torch.accelerator.memory_allocated()
    twin = mlp()
    twin.load_state_dict(model.state_dict())
    plain = adamw(twin)
    torch.manual_seed(1)
    for _ in range(6):
        step(model, optimizer, target)
    assert manager._stm.ledger.nbytes(Tier.DEVICE, Kind.OPTIMIZER_STATE) > 0
    manager.close()
    assert torch.accelerator.memory_allocated() == before
    assert all(v.device.type == "cpu" for s in optimizer.state.values() for v in s.values())
    torch.manual_seed(1)
    for _ in range(6):
        step(twin, plain, torch.device("cpu"))
    assert_same([*model.parameters()], [p.detach() for p in twin.parameters()], "parameters")
    step(model, optimizer, torch.device("cpu"))


@pytest.mark.parametrize("keeps_optimizer", [False, True])
def test_a_manager_dropped_without_close_goes_with_its_model(keeps_optimizer):
    model, optimizer, manager, target = managed_mlp("64MiB")
    before = torch.accelerator.memory_allocated()
    for _ in range(6):
        step(model, optimizer, target)
    assert living(manager)
    gone = weakref.ref(manager)
    kept = optimizer if keeps_optimizer else None
    del model, manager, optimizer
    gc.collect()
    assert gone() is None
    del kept
    gc.collect()
    assert torch.accelerator.memory_allocated() == before


def test_trim_sends_home_what_has_no_room():
    model, optimizer, manager, target = managed_mlp("8MiB")
    with manager:
        for _ in range(6):
            step(model, optimizer, target)
        assert living(manager)
        manager.trim(600 << 10)
        step(model, optimizer, target)
        torch.accelerator.reset_peak_memory_stats()
        for _ in range(4):
            step(model, optimizer, target)
        assert torch.accelerator.max_memory_allocated() <= (600 << 10) + GAPS


def test_a_graph_from_before_a_step_is_refused_as_autograd_does():
    model, optimizer, manager, target = managed_mlp("64MiB")
    with manager:
        for _ in range(5):
            step(model, optimizer, target)
        loss = model(batch(target)).square().mean()
        loss.backward(retain_graph=True)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_deterministic_algorithms_and_the_switch_keep_everything_at_home():
    target = device()
    model = mlp()
    optimizer = adamw(model)
    with hetero.manage(model, optimizer, device=target, device_budget="64MiB", device_homes=False) as manager:
        for _ in range(6):
            step(model, optimizer, target)
        assert not living(manager)


def test_the_plan_says_where_parameters_live_and_what_moves():
    # Parameters alone: whether activations move as well is a matter of measured times.
    model, optimizer, manager, target = managed_mlp(1100 << 10, activations=False)
    with manager:
        assert manager.plan is None
        for _ in range(6):
            step(model, optimizer, target)
        plan = manager.plan
        names = {name for name, _ in model.named_parameters()}
        assert living(manager) == set(plan.lives_on_device)
        assert set(plan.lives_on_device) | set(plan.lives_at_home) == names
        assert set(plan.lives_at_home)
        fetched = [name for moment in plan.moments for name in moment.fetches]
        assert set(fetched) == set(plan.lives_at_home)
        sizes = {tensor.name: tensor.device_nbytes for tensor in manager._stm.tensors}
        assert sum(sizes[name] for name in fetched) == plan.fetched_bytes >= plan.lower_bound_bytes > 0
        assert {moment.phase for moment in plan.moments} == {"forward", "backward", "step"}
        assert "live on the device" in str(plan)
        (kernels,) = plan.host_kernels  # foreach=False: nothing to choose
        assert (kernels.fused, kernels.others, kernels.chosen) == (0, len(plan.lives_at_home), False)


def test_aliases_of_states_are_never_stale():
    def loop(model, optimizer, target):
        losses(model, optimizer, target, 5)
        first, second = (optimizer.state[p] for p in list(model.parameters())[:2])
        read, written = first["exp_avg"].detach(), second["exp_avg_sq"].view(-1)
        seen = []
        for _ in range(3):
            losses(model, optimizer, target, 1)
            written.mul_(0.5)
            seen.append([read.clone(), written.clone()])
        return seen

    assert_twins(mlp, loop, share=1.2)


def test_looking_at_states_brings_them_home_until_the_next_step():
    model, optimizer, manager, target = managed_mlp("64MiB")
    with manager:
        for _ in range(8):
            step(model, optimizer, target)
            assert {v.device.type for s in optimizer.state.values() for v in s.values()} == {"cpu"}
            assert manager._stm.ledger.nbytes(Tier.DEVICE, Kind.OPTIMIZER_STATE) == 0
        step(model, optimizer, target)
        assert living(manager) == {name for name, _ in model.named_parameters()}
        assert manager._stm.ledger.nbytes(Tier.DEVICE, Kind.OPTIMIZER_STATE) > 0


@pytest.mark.parametrize("goes_on", ["device", "home"])
def test_a_backward_that_fails_before_autograd_has_a_gradient_leaves_no_trace(goes_on):
    def fail(*gradients):
        raise ValueError("in between")

    model, optimizer, manager, target = managed_mlp("64MiB")
    manager._stm.settled.forbid()  # where everything fits, autograd has gradients of its own
    with manager:
        for _ in range(5):
            step(model, optimizer, target)
        last = model[-1].weight
        assert last._hetero.stays
        used = torch.accelerator.memory_allocated()
        x = batch(target)
        loss = model(x).square().mean()
        hook = last._hetero.identity.grad_fn.register_hook(fail)
        with pytest.raises(ValueError, match="in between"):
            loss.backward()
        hook.remove()
        del loss
        assert last.grad is None
        optimizer.zero_grad()
        wait_for_backward_ends(target)
        gc.collect()
        assert torch.accelerator.memory_allocated() == used + x.nbytes
        if goes_on == "home":  # the next gradient is not kept on the device
            last.register_hook(lambda gradient: None)
        model(x).square().mean().backward()
        got = [p.grad.clone() for p in model.parameters()]
        optimizer.zero_grad()
        expected = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
        assert all(map(torch.equal, got, expected))


def test_a_backward_that_fails_beside_gradients_of_an_earlier_one():
    """They come home, once, although nothing of ours asked for them."""

    def fail(gradient):
        raise ValueError("in between")

    model, optimizer, manager, target = managed_mlp("64MiB")
    manager._stm.settled.forbid()  # where everything fits, autograd has gradients of its own
    with manager:
        for _ in range(5):
            step(model, optimizer, target)
        x = batch(target)
        model(x).square().mean().backward()
        middle = model[:8](x)
        middle.register_hook(fail)
        with pytest.raises(ValueError, match="in between"):
            model[8:](middle).square().mean().backward()
        optimizer.zero_grad()
        assert living(manager)


def test_gradients_that_are_returned_while_another_thread_accumulates():
    """`keeps` is about all backwards that run: one that returns gradients must get them."""

    class Wait(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, here, there):
            ctx.here, ctx.there = here, there
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            ctx.here.set()
            assert ctx.there.wait(30)
            return gradient, None, None

    first, optimizer, manager, target = managed_mlp("64MiB")
    with manager:
        for _ in range(5):
            step(first, optimizer, target)
        x = batch(target)
        expected = torch.autograd.grad(first(x).square().mean(), list(first.parameters()))
        returns, accumulates, done = (threading.Event() for _ in range(3))

        def other():
            assert returns.wait(30)
            Wait.apply(torch.ones(3, requires_grad=True), accumulates, done).sum().backward()

        thread = threading.Thread(target=other)
        thread.start()
        loss = Wait.apply(first(x), returns, accumulates).square().mean()
        got = torch.autograd.grad(loss, list(first.parameters()))
        done.set()
        thread.join()
        assert all(map(torch.equal, got, expected))


def test_those_that_were_there_in_vain_leave_before_the_next_plan_is_followed(monkeypatch):
    judged = []

    def in_vain(timings, keys):
        judged.append(keys)
        return True

    monkeypatch.setattr(Timings, "was_in_vain", in_vain)
    model, optimizer, manager, target = managed_mlp("64MiB")
    manager._stm.settled.forbid()
    monkeypatch.setattr(manager._stm.home_choice, "everything_fits", lambda: False)
    lived = []
    with manager:
        for _ in range(8):
            before = len(judged)
            model(batch(target)).square().mean().backward()
            assert not (len(judged) > before and living(manager))
            optimizer.step()
            optimizer.zero_grad()
            lived.append(bool(living(manager)))
        assert any(lived)
        assert judged
        assert not living(manager)


@pytest.mark.parametrize("more", [4 << 10, 16 << 10, 28 << 10])
def test_gradients_that_stay_find_room_beside_what_the_caller_has_come_to_hold(more):
    """Everything lives there, so the schedule asks for nothing, and nobody looks at each moment."""
    model, optimizer, manager, target = managed_mlp(
        "1250KiB", lambda m: torch.optim.AdamW(m.parameters(), fused=True)
    )
    manager._stm.settled.forbid()
    with manager:
        losses(model, optimizer, target, 10)
        assert living(manager) == {name for name, _ in model.named_parameters()}
        torch.accelerator.reset_peak_memory_stats()
        losses(model, optimizer, target, 1)
        room = manager.config.device_budget - torch.accelerator.max_memory_allocated()
        held = torch.empty(room + more, dtype=torch.uint8, device=target)
        losses(model, optimizer, target, 1)
        assert torch.accelerator.max_memory_allocated() <= manager.config.device_budget + GAPS
        del held
