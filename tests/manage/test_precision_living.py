"""Under ``precision``, parameters that live on the device: stepped there in their own type, seen there in the other."""

import copy
import gc

import pytest
import torch
from accelerators import ON_CUDA, races
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from loops import ACTIONS, batch, losses, mixed_loop, mlp, two_optimizers
from sharded import assert_as_fsdp2
from torch import nn
from torch.utils.checkpoint import checkpoint
from twins import adamw, assert_same, device, managed

import hetero
from hetero.errors import ManageError
from hetero.stm import Kind, Tier
from hetero.stm.interception.parameter import managed_of

pytestmark = [
    pytest.mark.usefixtures("homes_on_device", "late_queue"),
    pytest.mark.skipif(ON_CUDA, reason="compares with updates on the CPU"),
]

LOW = torch.bfloat16
_PLENTY = 8 << 20


def assert_as_at_home(build, loop, *budgets, make_optimizer=adamw, precision=LOW):
    """Under each the same numbers as with ``device_homes=False``, which `test_precision` compares with FSDP2; returns
    the managers."""
    keywords = {"make_optimizer": make_optimizer, "precision": precision}
    expected, state, _ = managed(build, loop, _PLENTY, device_homes=False, **keywords)
    managers = []
    for budget in budgets:
        got, got_state, manager = managed(build, loop, budget, **keywords)
        assert_same(got, expected, f"observed under {budget}")
        assert_same(got_state, state, f"state under {budget}")
        managers.append(manager)
    return managers


def managed_mlp(budget=_PLENTY, make_optimizer=adamw, depth=4):
    target = device()
    torch.manual_seed(0)
    model = mlp(depth=depth)
    optimizer = make_optimizer(model)
    before = torch.accelerator.memory_allocated()
    manager = hetero.manage(model, optimizer, device=target, device_budget=before + budget, precision=LOW)
    return model, optimizer, manager, target


def low_losses(model, optimizer, target, count, *, micro_batches=1, clip=None):
    seen = []
    for _ in range(count):
        for _ in range(micro_batches):
            loss = model(batch(target)).float().square().mean()
            loss.backward()
            seen.append(loss)
        if clip is not None:
            seen.append(nn.utils.clip_grad_norm_(model.parameters(), clip))
        optimizer.step()
        optimizer.zero_grad()
    return seen


def living(manager):
    return {tensor.name for tensor in manager._stm.tensors if tensor.stays}


@pytest.mark.parametrize("budget", [320 << 10, 1 << 20, _PLENTY])
@pytest.mark.parametrize(("micro_batches", "clip"), [(1, None), (1, 1e-2), (3, 1e-2)])
@pytest.mark.parametrize("precision", [LOW, torch.float16])
def test_as_fsdp2(precision, micro_batches, clip, budget):
    manager = assert_as_fsdp2(
        mlp,
        lambda m, o, t: low_losses(m, o, t, 8, micro_batches=micro_batches, clip=clip),
        precision,
        budget=budget,
    )
    homes = manager._stm.plans.device_homes
    assert len(homes) == len(manager._stm.tensors) if budget == _PLENTY else homes


# Parts that are called by themselves compute with whole copies, the caller's, and so do operators beside them that read
# no parameter: nobody makes room for those.
_ROOMY = st.tuples(st.just(_PLENTY), st.lists(st.sampled_from(ACTIONS), min_size=6, max_size=24))
_TIGHT = st.tuples(
    st.sampled_from([256 << 10, 512 << 10]),
    st.lists(st.sampled_from(sorted(set(ACTIONS) - {"by parts"})), min_size=6, max_size=24),
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=st.one_of(_ROOMY, _TIGHT))
def test_any_loop(case):
    budget, actions = case
    loop = mixed_loop([*["micro-batch", "step", "zero"] * 3, *actions])
    assert_as_at_home(lambda: mlp(depth=2), loop, budget, make_optimizer=two_optimizers)


@pytest.mark.parametrize("fused", [None, True])
def test_scaled_gradients(fused):
    """Norms of gradients in low precision cast all of them on a CPU: measured before anybody has asked for one."""

    def loop(model, optimizer, target):
        scaler = torch.amp.GradScaler(target.type, init_scale=2.0**16, growth_interval=3)
        seen = []
        for number in range(10):
            loss = model(batch(target)).float().square().mean() * (float("inf") if number == 5 else 1.0)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            seen += [loss, nn.utils.clip_grad_norm_(model.parameters(), 1e-2), scaler.get_scale()]
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return seen

    managers = assert_as_at_home(
        mlp,
        loop,
        300 << 10,
        500 << 10,
        _PLENTY,
        make_optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, fused=fused),
        precision=torch.float16,
    )
    assert all(manager._stm.plans.device_homes for manager in managers)


# Dynamo of torch 2.15 looks at all there is of what it is given.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("compiled", [False, True])
def test_recomputed_and_compiled_layers(compiled):
    class Layers(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(mlp(depth=1) for _ in range(3))
            if compiled:
                for layer in self.layers:
                    layer.compile(backend="aot_eager")

        def forward(self, x):
            for layer in self.layers:
                x = layer(x) if compiled else checkpoint(layer, x, use_reentrant=False)
            return x

    budgets = (700 << 10, _PLENTY)
    managers = assert_as_at_home(Layers, lambda m, o, t: low_losses(m, o, t, 8, clip=1e-2), *budgets)
    assert all(manager._stm.plans.device_homes for manager in managers)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.AdamW(p, lr=1e-2),
        lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True, amsgrad=True),
        lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
        lambda p: torch.optim.SGD(p, lr=1e-2),
        lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
        lambda p: torch.optim.Adafactor(p, lr=1e-2),
        lambda p: torch.optim.RMSprop(p, lr=1e-2, centered=True, maximize=True),
    ],
)
def test_optimizers(make):
    def loop(model, optimizer, target):
        return losses(model, optimizer, target, 8)

    managers = assert_as_at_home(mlp, loop, 1 << 20, _PLENTY, make_optimizer=lambda m: make(m.parameters()))
    assert all(manager._stm.plans.device_homes for manager in managers)


def test_where_everything_fits_nothing_moves_and_all_is_counted():
    model, optimizer, manager, target = managed_mlp()
    with manager:
        low_losses(model, optimizer, target, 5)
        assert living(manager) == {name for name, _ in model.named_parameters()}
        before, ledger = manager.stats, manager._stm.ledger
        x = torch.ones(8, 64, device=target)
        model(x).float().square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        values = 4 * sum(p.numel() for p in model.parameters())
        rounding = 512 * len(manager._stm.tensors)
        # A copy in two bytes a number beside each value.
        assert 0 <= ledger.nbytes(Tier.DEVICE, Kind.PARAMETER) - values * 3 // 2 <= 2 * rounding
        assert 0 <= ledger.nbytes(Tier.DEVICE, Kind.GRADIENT) - values <= rounding
        optimizer.step()
        optimizer.zero_grad()
        after = manager.stats
        assert after.total_fetched_bytes == before.total_fetched_bytes
        assert after.total_written_bytes == before.total_written_bytes
    assert races() == []


def test_close_and_trim_bring_everything_home():
    target = device()
    gc.collect()
    before = torch.accelerator.memory_allocated()
    model, optimizer, manager, target = managed_mlp()
    low_losses(model, optimizer, target, 5)
    assert living(manager)
    manager.trim(before + (300 << 10))
    low_losses(model, optimizer, target, 3)
    assert len(living(manager)) < len(manager._stm.tensors)
    assert torch.accelerator.memory_allocated() <= before + (300 << 10)
    manager.close()
    gc.collect()
    assert torch.accelerator.memory_allocated() == before
    assert all(value.device.type == "cpu" for state in optimizer.state.values() for value in state.values())
    assert races() == []


class Writes(nn.Module):
    """Writes in place within forward when told to, also through a view that it keeps."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.weight = nn.Parameter(torch.full((64,), 1 / 3))
        self.how = None

    def forward(self, x):
        with torch.no_grad():
            if self.how == "in place":
                self.weight.mul_(0.9)
            elif self.how == "data":
                self.weight.data.mul_(0.9)
        return self.linear(x) * self.weight


@pytest.mark.parametrize("how", ["in place", "data"])
def test_a_write_in_forward_is_refused_and_what_was_stepped_stays(how):
    def run(**keywords):
        target = device()
        torch.manual_seed(0)
        model = Writes()
        optimizer = adamw(model)
        seen = []
        with hetero.manage(
            model, optimizer, device=target, device_budget="8MiB", precision=LOW, **keywords
        ) as manager:
            torch.manual_seed(1)
            seen += low_losses(model, optimizer, target, 4)
            assert keywords or "weight" in living(manager)
            model.how = how
            with pytest.raises(ManageError, match=r"weight was written in place.*torch\.bfloat16.*outside"):
                model(batch(target))
            model.how = None
            seen.append(model.weight.detach().clone())
            seen += low_losses(model, optimizer, target, 4)
            assert keywords or "weight" in living(manager)
        return [*seen, *(p.detach() for p in model.parameters())]

    for got, expected in zip(run(), run(device_homes=False), strict=True):
        assert torch.equal(got.cpu(), expected.cpu())
    assert races() == []


def test_checkpoints_in_the_middle():
    living_again = []

    def loop(model, optimizer, target):
        seen = low_losses(model, optimizer, target, 5)
        kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        first = low_losses(model, optimizer, target, 3)
        model.load_state_dict(kept[0])
        optimizer.load_state_dict(copy.deepcopy(kept[1]))
        last = low_losses(model, optimizer, target, 4)
        living_again.append(managed_of(next(model.parameters())).stays)
        return [*seen, *first, *last, *kept[0].values()]

    assert_as_at_home(mlp, loop, _PLENTY)
    assert living_again == [False, True]


def test_what_is_taken_out_of_the_model_and_put_back():
    def loop(model, optimizer, target):
        seen = low_losses(model, optimizer, target, 4)
        last = list(model.parameters())[-2:]
        for p in last:
            p.requires_grad_(False)
        seen += low_losses(model, optimizer, target, 3)
        for p in last:
            p.requires_grad_(True)
        with torch.no_grad():
            seen.append(model(batch(target)))
        optimizer.add_param_group({"params": [], "lr": 1e-3})
        return [*seen, *low_losses(model, optimizer, target, 4)]

    assert_as_at_home(mlp, loop, _PLENTY)


def test_a_view_that_the_model_keeps_sees_every_step():
    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(64, 64)
            self.seen = None

        def forward(self, x):
            if self.seen is None:
                self.seen = self.linear.weight.detach()
            return self.linear(x) + self.seen.sum()

    def loop(model, optimizer, target):
        seen = low_losses(model, optimizer, target, 5)
        with torch.no_grad():
            model.linear.weight.mul_(0.5)  # at home: the copy follows, and so does what it is made of
        return [*seen, *low_losses(model, optimizer, target, 4)]

    assert_as_at_home(Keeps, loop, _PLENTY)


def test_memory_that_runs_short_sends_values_home():
    """A batch that needs the memory gets it, and nothing that was stepped is lost."""

    def loop(model, optimizer, target):
        seen = []
        for number in range(12):
            rows = 1500 if number in (6, 9) else 8
            loss = model(batch(target, rows)).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss)
        return seen

    assert_as_at_home(mlp, loop, 4 << 20)
