"""Everything fits: parameters become ordinary ones on the device, and nothing of ours runs beside them."""

import copy
import gc
import itertools
import sys

import pytest
import small_transformers
import torch
from accelerators import GAPS, ON_CUDA, ON_HOST, STEPS_AT_HOME, clear_races, races
from loops import batch, losses, mlp, square_loss, train
from our_calls import our_calls
from test_optimizer_db import batch as database_batch
from test_optimizer_db import configurations, make, model_for
from torch import nn
from torch.nn.utils import clip_grad_norm_
from twins import adamw, assert_same, assert_twins, device, plain

import hetero
from hetero.stm import Kind, Tier
from hetero.stm.step.watched import WatchedState

pytestmark = pytest.mark.usefixtures("homes_on_device")

PLENTY = 64 << 20


def managed_mlp(depth=4, budget="64MiB", make_optimizer=adamw):
    target = device()
    gc.collect()
    clear_races()
    torch.manual_seed(0)
    model = mlp(depth=depth)
    optimizer = make_optimizer(model)
    return model, optimizer, hetero.manage(model, optimizer, device=target, device_budget=budget), target


def step(model, optimizer, target, rows=8):
    square_loss_of(model, batch(target, rows)).backward()
    optimizer.step()
    optimizer.zero_grad()


def square_loss_of(model, x):
    return model(x).square().mean()


def settle(model, optimizer, manager, target, steps=6):
    for _ in range(steps):
        step(model, optimizer, target)
    assert manager.plan.everything_fits


# -- nothing of ours runs ------------------------------------------------------------------------------


def test_parameters_are_ordinary_ones_on_the_device():
    originals = torch.autograd._engine_run_backward, torch.optim.Optimizer.zero_grad
    model, optimizer, manager, target = managed_mlp()
    with manager:
        before = [id(p) for p in model.parameters()]
        settle(model, optimizer, manager, target)
        assert [id(p) for p in model.parameters()] == before
        for p in model.parameters():
            assert type(p) is nn.Parameter
            assert p.device == target
            assert not p.__dict__
            assert all(v.device == target for k, v in optimizer.state[p].items() if k != "step")
        assert type(optimizer.state) is not WatchedState
        assert optimizer.step.__func__ is torch.optim.AdamW.step
        assert "step" not in vars(optimizer)
        assert "interception off" in str(manager.plan)
        assert set(manager.plan.lives_on_device) == {name for name, _ in model.named_parameters()}
        square_loss(model, target).backward()
        assert all(p.grad.device == target for p in model.parameters())
        assert originals == (torch.autograd._engine_run_backward, torch.optim.Optimizer.zero_grad)
    assert originals == (torch.autograd._engine_run_backward, torch.optim.Optimizer.zero_grad)
    assert all(p.device.type == "cpu" and type(p) is nn.Parameter for p in model.parameters())
    assert races() == []


def hooks(model, optimizer):
    """How many of torch's hooks a step would call: of modules, parameters, saved tensors and optimizers."""
    homes = [sys.modules["torch.nn.modules.module"], sys.modules["torch.optim.optimizer"], optimizer]
    homes += model.modules()
    kinds = [
        v for home in homes for k, v in vars(home).items() if k.endswith("_hooks") and "registration" not in k
    ]
    kinds += [v for p in model.parameters() for v in (p._backward_hooks, p._post_accumulate_grad_hooks)]
    assert len(kinds) > 40
    saving = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return sum(len(each or ()) for each in kinds) + (saving is not None)


@pytest.mark.skipif(ON_CUDA, reason=STEPS_AT_HOME)
def test_no_hook_is_set():
    model, optimizer, manager, target = managed_mlp()
    with manager:
        step(model, optimizer, target)
        assert hooks(model, optimizer) > 0
        settle(model, optimizer, manager, target)
        assert hooks(model, optimizer) == 0


def test_no_operator_is_hooked_and_what_is_left_is_one_check_of_the_forward():
    checks = []
    for depth in (1, 6):
        model, optimizer, manager, target = managed_mlp(depth)
        x = batch(target)
        with manager:
            managed = our_calls(lambda: step(model, optimizer, target))  # noqa: B023
            assert managed["parameter.ManagedParameter.__torch_function__"] > 6 * depth
            settle(model, optimizer, manager, target)
            # From its output on: backward, clipping, step, zero_grad, and all that they call.
            loss = square_loss_of(model, x)

            def after_forward():
                loss.backward()  # noqa: B023
                clip_grad_norm_(model.parameters(), 1.0)  # noqa: B023
                optimizer.step()  # noqa: B023
                optimizer.zero_grad()  # noqa: B023

            assert not our_calls(after_forward)
            checks.append(our_calls(lambda: square_loss_of(model, x)))  # noqa: B023
    assert checks[0] == checks[1]  # whatever the number of operators and parameters
    assert {name.split(".")[0] for name in checks[0]} <= {
        "modelcalls",
        "signatures",
        "state",
        "check",
        "accelerator",
    }
    assert checks[0]["state.Settled.enter"] == checks[0]["check.Check.admits"] == 1
    # The call, its signature (two), the check (three) and the counters it reads, the user's forward.
    assert sum(checks[0].values()) == 8


def test_statistics_count_the_forwards_that_ran_settled():
    model, optimizer, manager, target = managed_mlp()
    with manager:
        settle(model, optimizer, manager, target)
        before = manager.stats
        for _ in range(3):
            step(model, optimizer, target)
        after = manager.stats
    assert after.settled_forwards == before.settled_forwards + 3
    assert after.total_fetched_bytes == before.total_fetched_bytes
    assert after.total_written_bytes == before.total_written_bytes
    assert after.by_kind["device"]["parameter"] >= sum(p.nbytes for p in model.parameters())


def test_another_manager_that_intercepts_keeps_the_patches_and_the_first_stays_settled():
    model, optimizer, manager, target = managed_mlp()
    other = mlp(depth=1)
    other_optimizer = adamw(other)
    with manager:
        settle(model, optimizer, manager, target)
        with hetero.manage(
            other, other_optimizer, device=target, device_budget="64MiB", device_homes=False
        ) as second:
            for _ in range(5):
                step(other, other_optimizer, target)
                step(model, optimizer, target)
            assert not second.plan.everything_fits
            assert manager.plan.everything_fits
            with pytest.raises(hetero.ManageError, match="managed already"):
                hetero.manage(model, device=target, device_budget="64MiB")


# -- the same numbers ----------------------------------------------------------------------------------


def assert_settled_twins(build, loop, make_optimizer=adamw, least=3):
    manager = assert_twins(build, loop, budget=PLENTY, make_optimizer=make_optimizer)
    assert manager.stats.settled_forwards >= least


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(32, 64)
        self.middle = nn.Linear(64, 64)
        self.register_parameter("again", self.middle.weight)

    def forward(self, x):
        hidden = torch.tanh(self.middle(self.words((x.abs() * 7).long() % 32).mean(1)))
        return nn.functional.linear(hidden, self.words.weight) @ self.words.weight


def convolutions():
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        *(nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU()),
        *(nn.Conv2d(6, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 10)),
    )


@pytest.mark.parametrize("build", [mlp, Tied, convolutions])
def test_a_training_loop(build):
    assert_settled_twins(build, lambda m, o, t: losses(m, o, t, 10))


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_transformers(name):
    def build():
        if name == "gpt2":
            return small_transformers.gpt2(width=32, layers=2, heads=2, vocabulary=64, length=32)
        return small_transformers.llama(width=32, inner=64, layers=2, heads=4, groups=2, vocabulary=64)

    def loop(model, optimizer, target):
        seen = []
        for _ in range(8):
            tokens = torch.randint(0, 64, (2, 16)).to(target)
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            seen.append([loss, clip_grad_norm_(model.parameters(), 1.0)])
            optimizer.step()
            optimizer.zero_grad()
        return seen

    assert_settled_twins(build, loop)


def test_accumulation_and_gradients_that_are_kept():
    def loop(model, optimizer, target):
        seen = []
        for number in range(12):
            for _ in range(4):
                square_loss(model, target).backward()
            seen.append(clip_grad_norm_(model.parameters(), 1e-2))
            optimizer.step()
            optimizer.zero_grad(set_to_none=number > 5)
        return seen

    assert_settled_twins(mlp, loop, least=20)


SCHEDULERS = {
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 1e-2, total_steps=20),
    "CosineAnnealingLR": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 5),
    "ReduceLROnPlateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0),
}


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("born", [0, 6])  # before it settles, and in that state, which ends again
def test_schedulers(name, born):
    def loop(model, optimizer, target):
        seen, scheduler = [], None
        for number in range(14):
            if number == born:
                scheduler = SCHEDULERS[name](optimizer)
            loss = model(batch(target, 11 if number == 9 else 8)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if scheduler is not None:
                scheduler.step(*[loss.item()] if name == "ReduceLROnPlateau" else [])
            seen.append([loss, optimizer.param_groups[0]["lr"]])
        return seen

    assert_settled_twins(mlp, loop, least=5)


def test_gradient_scaler_with_an_infinity():
    def loop(model, optimizer, target):
        scaler = torch.amp.GradScaler(target.type, init_scale=256.0, growth_interval=2)
        seen = []
        for number in range(12):
            loss = square_loss(model, target) * (float("inf") if number in (3, 8) else 1.0)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), 1e-2)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            seen.append([loss, scaler.get_scale()])
        return seen

    assert_settled_twins(mlp, loop)


def test_hooks_of_the_users_own_see_the_same():
    def loop(model, optimizer, target):
        # Each by itself: autograd's threads keep no order between parameters at home and on the device.
        first, second, parameters = [], [], list(model.parameters())
        parameters[0].register_hook(lambda g: g * 0.5)
        # By the id: a hook that led back to its parameter would keep all of them, which Python's collector cannot see.
        hooked = id(parameters[1])
        parameters[1].register_post_accumulate_grad_hook(lambda p: first.append([p.grad, id(p) == hooked]))
        for number in range(12):
            x = batch(target, 11 if number == 8 else 8)
            if number == 6:
                parameters[2].register_post_accumulate_grad_hook(lambda p: second.append(p.grad.clone()))
                parameters[3].register_hook(lambda g: g + 1)
            square_loss_of(model, x).backward()
            optimizer.step()
            optimizer.zero_grad()
        return first, second

    assert_twins(mlp, loop, budget=PLENTY)


SAMPLE = [
    *("Adadelta-0-forloop", "Adagrad-0-open", "Adagrad-0-forloop", "Adam-0-open", "Adam-3-forloop"),
    *("Adam-0-fused", "Adam-4-foreach", "AdamW-0-open", "AdamW-4-forloop", "Adamax-0-forloop"),
    *("ASGD-0-forloop", "NAdam-0-foreach", "RAdam-0-forloop", "RMSprop-3-forloop", "Rprop-0-forloop"),
    *("SGD-0-open", "SGD-1-open", "SGD-3-forloop", "SGD-4-foreach", "SGD-2-fused"),
    *("Adafactor-0-forloop", "Adafactor-1-foreach", "Muon-0-forloop"),
]
BY_NAME = {parameter.id: parameter.values for parameter in configurations()}


@pytest.mark.skipif(ON_CUDA, reason=ON_HOST)
@pytest.mark.parametrize("name", SAMPLE)
def test_optimizers(name):
    info, keywords = BY_NAME[name]
    if name.endswith("forloop") and "foreach" in info.supported_impls:  # which a device takes by itself
        keywords = {**keywords, "foreach": False}

    def loop(model, optimizer, target):
        seen = []
        for number in range(10):
            loss = (model(database_batch(info, target, number)) - 1).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss)
            if number == 8:
                seen += [value for entry in optimizer.state.values() for value in entry.values()]
        return seen

    chosen = {**keywords, "fused": True} if name.endswith("open") else keywords
    torch.manual_seed(1)
    expected_model = model_for(info)
    expected = plain(loop(expected_model, make(info, expected_model, chosen), torch.device("cpu")))
    target = device()
    model = model_for(info)
    optimizer = make(info, model, keywords)
    with hetero.manage(model, optimizer, device=target, device_budget="16MiB") as manager:
        got = plain(loop(model, optimizer, target))
        assert manager.stats.settled_forwards >= 3
    assert_same(got, expected, name)
    assert_same([*model.parameters()], [p.detach() for p in expected_model.parameters()], "parameters")
    assert races() == []


def test_gradients_laid_out_otherwise_are_not_given_to_fused_kernels():
    def loop(model, optimizer, target):
        seen = []
        for _ in range(8):
            loss = square_loss(model, target)
            loss.backward()
            for p in model.parameters():
                if p.dim() == 2:
                    p.grad = p.grad.t().contiguous().t()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss)
        return seen

    def left_open(model):
        return torch.optim.Adam(model.parameters(), lr=1e-2)

    def settling_first(model, optimizer, target):
        seen = losses(model, optimizer, target, 5)
        return seen + loop(model, optimizer, target)

    # The reference follows the rule of kernels.py by itself: a managed run that never settles.
    results = []
    for device_homes in (True, False):
        target = device()
        torch.manual_seed(0)
        model = mlp(depth=1)
        optimizer = left_open(model)
        with hetero.manage(
            model, optimizer, device=target, device_budget="16MiB", device_homes=device_homes
        ) as manager:
            torch.manual_seed(1)
            results.append(plain(settling_first(model, optimizer, target)))
            assert manager.plan.everything_fits == device_homes
    assert_same(results[0], results[1], "losses")


# -- without an optimizer, frozen ----------------------------------------------------------------------


@pytest.mark.parametrize("frozen", [True, False])
def test_inference_settles(frozen):
    target = device()
    torch.manual_seed(0)
    model = mlp().requires_grad_(not frozen)
    x = torch.randn(4, 64)
    with torch.no_grad():
        expected = copy.deepcopy(model).to(target)(x.to(target)).cpu()
    with hetero.manage(model, device=target, device_budget="64MiB") as manager:
        with torch.no_grad():
            outputs = [model(x.to(target)).cpu() for _ in range(4)]
            assert manager.plan.everything_fits
            assert not any("intercept" in name for name in our_calls(lambda: model(x.to(target))))
        assert all(torch.equal(output, expected) for output in outputs)
        if not frozen:  # whoever consumes gradients expects them at home
            model(x.to(target)).sum().backward()
            assert not manager.plan.everything_fits
            assert all(p.grad.device.type == "cpu" for p in model.parameters())


def test_it_settles_although_norms_of_parameters_at_home_were_logged():
    model, optimizer, manager, target = managed_mlp()
    with manager:
        for _ in range(3):  # each of them makes a graph, for a moment
            assert all(p.norm().item() >= 0.0 for p in model.parameters())
            step(model, optimizer, target)
        settle(model, optimizer, manager, target)


def test_frozen_parameters_settle_beside_trained_ones_and_alone():
    def loop(model, optimizer, target):
        seen = losses(model, optimizer, target, 7)
        list(model.parameters())[1].requires_grad_(True)
        return seen + losses(model, optimizer, target, 7)

    def build():
        model = mlp()
        for p in list(model.parameters())[:4]:
            p.requires_grad_(False)
        return model

    def make_all(model):
        return torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)

    assert_settled_twins(build, loop, make_all, least=6)


# -- memory --------------------------------------------------------------------------------------------


def unmanaged_peak(make_optimizer, rows, steps=6):
    target = device()
    gc.collect()
    torch.manual_seed(0)
    model = mlp().to(target)
    optimizer = make_optimizer(model)
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated() - sum(-(-p.nbytes // 512) * 512 for p in model.parameters())
    for _ in range(steps):
        step(model, optimizer, target, rows)
    return torch.accelerator.max_memory_allocated() - before


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.01)


def adafactor(model):
    return torch.optim.Adafactor(model.parameters())


# On CUDA a step's temporaries would be no part of the unmanaged peak.
@pytest.mark.skipif(ON_CUDA, reason=STEPS_AT_HOME)
# With 512 rows activations are most of the peak: they are gone when gradients are there. Adafactor has no states as big
# as the parameters, so that room for the update of one of the eight layers' weights is more of its peak.
@pytest.mark.parametrize(
    ("make_optimizer", "rows", "enough"),
    [
        *((adamw, 8, 1.1), (sgd, 8, 1.1), (adafactor, 8, 1.3)),
        *((adamw, 512, 1.1), (sgd, 512, 1.1), (adafactor, 512, 1.1)),
    ],
)
def test_it_settles_close_to_the_unmanaged_peak_and_never_passes_the_budget(make_optimizer, rows, enough):
    peak = unmanaged_peak(make_optimizer, rows)
    settled = {}
    for share in (0.8, 0.95, 1.1, 1.3, 2.0):
        target = device()
        gc.collect()
        before = torch.accelerator.memory_allocated()
        budget = before + int(share * peak)
        model, optimizer, manager, target = managed_mlp(budget=budget, make_optimizer=make_optimizer)
        torch.accelerator.reset_peak_memory_stats()
        with manager:
            for _ in range(9):
                step(model, optimizer, target, rows)
            settled[share] = manager.plan.everything_fits
            assert torch.accelerator.max_memory_allocated() <= budget + GAPS
        del model, optimizer, manager
    assert not settled[0.8]
    assert settled[enough]
    # Once it does, it does with more.
    assert [value for value, _ in itertools.groupby(settled.values())] == [False, True]


def test_bytes_by_kind_are_those_on_the_device():
    model, optimizer, manager, target = managed_mlp()
    with manager:
        settle(model, optimizer, manager, target)
        ledger = manager._stm.ledger
        parameters = sum(-(-p.nbytes // 512) * 512 for p in model.parameters())
        assert ledger.nbytes(Tier.DEVICE, Kind.PARAMETER) == parameters
        assert ledger.nbytes(Tier.DEVICE, Kind.OPTIMIZER_STATE) == 2 * parameters


class OfTheUsersOwn(torch.optim.AdamW):
    """Of which it is not known what it allocates."""

    steps_parameters_independently = True


def test_what_keeps_parameters_at_home_keeps_them_from_settling():
    def loop(model, optimizer, target):
        return losses(model, optimizer, target, 7)

    for keywords in ({"device_homes": False}, {"precision": torch.bfloat16}):
        target = device()
        model = mlp()
        optimizer = adamw(model)
        with hetero.manage(model, optimizer, device=target, device_budget="64MiB", **keywords) as manager:
            loop(model, optimizer, target)
            assert manager.stats.settled_forwards == 0
    model = mlp()
    optimizer = OfTheUsersOwn(model.parameters(), lr=1e-3, foreach=False)
    with hetero.manage(model, optimizer, device=device(), device_budget="64MiB") as manager:
        loop(model, optimizer, manager.device)
        assert manager.stats.settled_forwards == 0


def test_gradients_that_are_read_in_each_iteration():
    assert_twins(mlp, lambda m, o, t: train(m, o, t, 8), budget=PLENTY)


@pytest.mark.parametrize("share", [0.9, 0.94, 0.98])
def test_gradients_that_are_there_now_and_then_need_room_as_well(share):
    """Beside what a backward takes first, which is the most that it takes: without them everything would fit."""

    def chain():
        return nn.Sequential(*[module for _ in range(3) for module in (nn.Linear(64, 64), nn.Tanh())][:-1])

    def loop(model, optimizer, target):
        seen = []
        for number in range(10):
            loss = square_loss_of(model, batch(target, 128))
            loss.backward()
            optimizer.step()
            if number % 2:
                optimizer.zero_grad()
            seen.append(loss.detach())
        return seen

    assert_twins(
        chain, loop, share=share, make_optimizer=lambda m: torch.optim.SGD(m.parameters(), foreach=False)
    )
