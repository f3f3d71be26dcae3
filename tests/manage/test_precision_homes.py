"""Under ``precision``: what moves, what is kept where, and parameters outside the model's forward."""

import copy
import threading

import pytest
import torch
from accelerators import GAPS, ON_CUDA, clear_races, races
from torch import nn
from torch.utils.checkpoint import checkpoint
from twins import adamw, assert_same, assert_twins, device

import hetero
from hetero.devices import Wait, virtual
from hetero.errors import BudgetError, ConfigError, ManageError, StreamRaceError
from hetero.stm.tensors.precision import LowTwin

WIDTH, DEPTH = 256, 12
WEIGHT = WIDTH * WIDTH  # numbers; in either type a whole number of what devices allocate
LOW = torch.bfloat16


def mlp(depth=DEPTH):
    torch.manual_seed(0)
    return nn.Sequential(
        *[layer for _ in range(depth) for layer in (nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh())]
    )


def train(model, optimizer, target, count, clip=None):
    losses = []
    for _ in range(count):
        loss = model(torch.randn(4, WIDTH).to(target)).float().square().mean()
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [loss.item() for loss in losses]


def managed_mlp(precision=LOW, *, budget="64MiB", depth=DEPTH, **keywords):
    target = device(bandwidth="100GiB/s", latency="1us")
    clear_races()
    model = mlp(depth)
    optimizer = adamw(model)
    # Without precision, what stays on the device would not move at all.
    manager = hetero.manage(
        model,
        optimizer,
        device=target,
        device_budget=budget,
        precision=precision,
        device_homes=False,
        **keywords,
    )
    return model, optimizer, manager


# -- bytes -------------------------------------------------------------------------------------------


def test_half_the_bytes_move_up_and_down():
    for precision, nbytes in ((None, 4), (LOW, 2)):
        model, optimizer, manager = managed_mlp(precision)
        each = DEPTH * WEIGHT * nbytes
        with manager:
            # Until times are known, which say how much of an iteration is ordered at the end of the one before.
            train(model, optimizer, manager.device, 16, clip=1.0)
            before = manager.stats
            for _ in range(5):
                train(model, optimizer, manager.device, 1, clip=1.0)
                stats = manager.stats
                # How many weights are ordered ahead may change, where the machine is busy.
                now, then = (at.by_kind["device"]["parameter"] for at in (stats, before))
                # Everything fits: each weight goes up once an iteration, each gradient down once.
                assert stats.total_fetched_bytes - before.total_fetched_bytes == each + now - then
                assert stats.total_written_bytes - before.total_written_bytes == each
                assert stats.bytes_moved == 2 * each + now - then
                assert stats.lower_bound_bytes <= stats.bytes_moved
                before = stats
    assert races() == []


def test_under_a_budget_in_which_half_the_low_precision_copies_fit():
    target = device()
    budget = DEPTH * WEIGHT + (704 << 10)  # their copies take 2 bytes each; the rest is for everything else
    before = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    model, optimizer, manager = managed_mlp(budget=before + budget)
    with manager:
        torch.manual_seed(1)
        losses = train(model, optimizer, target, 6)
        assert torch.accelerator.max_memory_allocated() <= before + budget + GAPS
        stats = manager.stats
        assert stats.unplanned_fetches == 0
        assert stats.bytes_moved <= 2 * stats.lower_bound_bytes
    roomy, optimizer, manager = managed_mlp()
    with manager:
        torch.manual_seed(1)
        assert train(roomy, optimizer, target, 6) == losses
    assert_same(list(model.parameters()), list(roomy.parameters()), "parameters")
    assert races() == []


def test_a_parameter_is_cast_once_for_each_time_that_it_was_written(monkeypatch):
    casts = []
    refresh = LowTwin.refresh
    monkeypatch.setattr(
        LowTwin, "refresh", lambda *a: (casts.append(threading.current_thread()), refresh(*a))
    )
    target = device()
    budget = torch.accelerator.memory_allocated() + DEPTH * WEIGHT + (704 << 10)
    model, optimizer, manager = managed_mlp(budget=budget)
    with manager:
        train(model, optimizer, target, 3)
        manager.stats  # noqa: B018 - waits for the step
        casts.clear()
        fetched = manager.stats.total_fetched_bytes
        train(model, optimizer, target, 4)
        manager.stats  # noqa: B018
        assert manager.stats.total_fetched_bytes - fetched > 4 * DEPTH * WEIGHT * 2  # some twice
        assert len(casts) == 4 * DEPTH
        # By the step's own thread, while the values are in its cache.
        assert threading.main_thread() not in casts
        with torch.no_grad():
            model[0].weight.mul_(2)
            model(torch.randn(4, WIDTH, device=target))
        assert len(casts) == 4 * DEPTH + 1


def test_model_data_are_counted_once_and_twins_as_copies_at_home():
    found = {}
    for precision in (None, LOW):
        model, optimizer, manager = managed_mlp(precision)
        with manager:
            train(model, optimizer, manager.device, 3)
            found[precision] = manager.stats
    assert found[LOW].model_data_bytes == found[None].model_data_bytes
    assert found[LOW].host_model_bytes == found[None].host_model_bytes + 2 * DEPTH * WEIGHT


def test_budgets_know_of_low_precision():
    target = device()
    model = nn.Linear(1024, 1024, bias=False)  # 4 MiB, or 2
    with pytest.raises(BudgetError, match="4194304 bytes"):
        hetero.manage(model, device=target, device_budget="3MiB")
    hetero.manage(model, device=target, device_budget="3MiB", precision=LOW).close()
    with pytest.raises(BudgetError, match=r"2\.0 MiB for them in torch.bfloat16"):
        hetero.manage(model, device=target, host_budget=(6 << 20) - 1, precision=LOW)
    hetero.manage(model, device=target, host_budget=6 << 20, precision=LOW).close()


@pytest.mark.parametrize("value", ["bf16", torch.float32, torch.float8_e4m3fn, torch.int16, 16, True])
def test_other_precisions_are_refused(value):
    model = nn.Linear(4, 4)
    with pytest.raises(ConfigError, match=r"precision=.*torch\.bfloat16 or torch\.float16"):
        hetero.manage(model, device=device(), precision=value)
    assert type(model.weight) is nn.Parameter


def test_norms_are_taken_on_the_device(monkeypatch):
    model, optimizer, manager = managed_mlp()
    with manager:
        train(model, optimizer, manager.device, 2, clip=1.0)
        read = []
        monkeypatch.setattr(torch.nn.utils.clip_grad, "_get_total_norm", lambda *a, **k: read.append(a))
        train(model, optimizer, manager.device, 3, clip=1.0)
        assert read == []
        assert manager._host_step.queued >= 3 * DEPTH


# -- what users see ----------------------------------------------------------------------------------


def test_parameters_gradients_and_states_are_float32_and_plain_afterwards():
    model, optimizer, manager = managed_mlp(depth=2)
    seen = []
    model[0].register_forward_pre_hook(
        lambda module, _: seen.append((module.weight.dtype, module.weight.nbytes))
    )
    loss = model(torch.randn(4, WIDTH, device=manager.device)).float().sum()
    loss.backward()
    weight = model[0].weight
    assert seen == [(LOW, 2 * WEIGHT)]
    assert weight.dtype is weight.grad.dtype is torch.float32
    assert weight.nbytes == 4 * WEIGHT
    optimizer.step()
    assert all(v.dtype is torch.float32 for v in optimizer.state[weight].values())
    assert all(v.dtype is torch.float32 for v in model.state_dict().values())
    assert copy.deepcopy(model)[0].weight.dtype is torch.float32
    manager.close()
    assert weight is model[0].weight
    assert type(weight) is nn.Parameter
    assert weight.dtype is weight.grad.dtype is torch.float32
    assert model(torch.randn(4, WIDTH)).dtype is torch.float32


class WritesInForward(nn.Module):
    def __init__(self, how, frozen):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.full((WIDTH,), 1 / 3), requires_grad=not frozen)
        self.how = how

    def forward(self, x):
        with torch.no_grad():
            match self.how:
                case "in place":
                    self.weight.mul_(0.9)
                case "out":
                    torch.mul(self.weight, 0.9, out=self.weight)
                case "data":
                    self.weight.data.mul_(0.9)
        return self.linear(x) * self.weight


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("how", ["in place", "out", "data"])
def test_a_write_in_forward_is_refused_and_changes_nothing(how, frozen):
    target = device()
    model = WritesInForward(how, frozen)
    before = model.weight.detach().clone()
    with hetero.manage(model, device=target, device_budget="8MiB", precision=LOW):
        x = torch.randn(4, WIDTH, device=target)
        for _ in range(2):
            with pytest.raises(ManageError, match=r"weight was written in place.*torch\.bfloat16.*outside"):
                model(x)
            assert torch.equal(model.weight, before)
        model.how = "not"
        expected = x.bfloat16() @ model.linear.weight.to(target).bfloat16().t()
        expected = (expected.float() + model.linear.bias.to(target).bfloat16().float()).bfloat16()
        assert model(x).dtype is LOW
        model(x).float().sum().backward()
    assert races() == []


def test_writes_at_home_reach_the_next_forward():
    model, _, manager = managed_mlp(depth=2)
    with manager:
        x = torch.randn(4, WIDTH, device=manager.device)
        model.requires_grad_(False)
        weight = model[0].weight

        def output():
            with torch.no_grad():
                return model(x)

        def expected():
            low = [model[0].weight.detach().to(manager.device), model[2].weight.detach().to(manager.device)]
            y = x.to(LOW)
            for w in low:
                y = torch.tanh(y @ w.to(LOW).t())
            return y

        with torch.no_grad():
            assert torch.equal(output(), expected())
            weight.mul_(0.5)
            assert torch.equal(output(), expected())
            weight.data.add_(0.25)
            assert torch.equal(output(), expected())
            weight.data = torch.randn(WIDTH, WIDTH).t()  # another memory, another layout
            assert torch.equal(output(), expected())
            weight.copy_(torch.randn(WIDTH, WIDTH))
            assert torch.equal(output(), expected())
            other = model[2].weight
            other.data.add_(0.25)
            assert torch.equal(output(), expected())
            other.set_(
                torch.randn(WIDTH, WIDTH)
            )  # whose version is what that of the old memory's aliases was
            assert torch.equal(output(), expected())
            array = weight.detach().numpy()
            output()
            manager._stm.residency.evict_idle()
            array *= 2  # which moves no version: seen when the copy is fetched anew
            assert torch.equal(output(), expected())
            model.load_state_dict({k: torch.ones_like(v) for k, v in model.state_dict().items()})
            assert torch.equal(output(), expected())
    assert races() == []


def test_outside_the_forward_a_parameter_computes_in_its_own_type():
    model, _, manager = managed_mlp(depth=2)
    plain = copy.deepcopy(model)
    with manager:
        weight, other = model[0].weight, plain[0].weight
        mask = torch.randn(WIDTH, WIDTH)
        on_device = mask.to(manager.device)
        for w, m in ((weight, on_device), (other, mask)):
            product = w * m
            assert product.dtype is torch.float32
            assert product.device == m.device
            product.square().sum().backward()
            with torch.no_grad():
                w.add_(m)
                w[0] = m[0]
        assert_same(weight.grad.clone(), other.grad, "gradient")
        assert_same(weight.detach().clone(), other.detach(), "parameter")
        with pytest.raises(RuntimeError, match="leaf"):
            weight.add_(on_device)
        assert_same(weight.detach().clone(), other.detach(), "parameter")

        class Scale(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, w):
                ctx.save_for_backward(x)
                return x * w

            @staticmethod
            def backward(ctx, grad):
                return None, grad * ctx.saved_tensors[0]

        weight.grad = other.grad = None
        Scale.apply(on_device, weight).sum().backward()
        Scale.apply(mask, other).sum().backward()
        assert_same(weight.grad.clone(), other.grad, "gradient")
        # A regulariser beside the model's own forward.
        weight.grad = None
        loss = model(torch.randn(4, WIDTH, device=manager.device)).float().sum() + (weight * on_device).sum()
        loss.backward()
        assert weight.grad.dtype is torch.float32
    assert races() == []


def test_gradients_by_autograd_grad_and_double_backward():
    model, _, manager = managed_mlp(depth=2)
    with manager:
        x = torch.randn(4, WIDTH, device=manager.device)
        weights = list(model.parameters())
        first = torch.autograd.grad(model(x).float().square().sum(), weights)
        model(x).float().square().sum().backward()
        for gradient, w in zip(first, weights, strict=True):
            assert gradient.dtype is torch.float32
            assert torch.equal(gradient, w.grad)
            w.grad = None
        again = torch.autograd.grad(model(x).float().square().sum(), weights, create_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))
        sum(g.square().sum() for g in again).backward()
        assert all(w.grad.dtype is torch.float32 and w.grad.abs().sum() > 0 for w in weights)
    assert races() == []


def test_hooks_see_float32_gradients_at_home():
    model, optimizer, manager = managed_mlp(depth=2)
    seen = []
    with manager:
        model[0].weight.register_hook(
            lambda g: seen.append((g.dtype, g.device.type, bool(g.isfinite().all())))
        )
        model[2].weight.register_post_accumulate_grad_hook(
            lambda p: seen.append((p.grad.dtype, p.dtype, bool(p.grad.isfinite().all())))
        )
        train(model, optimizer, manager.device, 2)
    assert seen == 2 * [(torch.float32, torch.float32, True), (torch.float32, "cpu", True)]


def test_sparse_gradients():
    target = device()
    model = nn.Sequential(nn.Embedding(50, WIDTH, sparse=True), nn.Tanh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hetero.manage(model, optimizer, device=target, device_budget="8MiB", precision=LOW):
        for _ in range(3):
            model(torch.randint(0, 50, (4, 7), device=target)).float().square().sum().backward()
            gradient = model[0].weight.grad
            assert gradient.is_sparse
            assert gradient.dtype is torch.float32
            optimizer.step()
            optimizer.zero_grad()


def test_two_managed_models_of_different_precision():
    target = device()
    one, two = mlp(2), mlp(2)
    optimizer = adamw(nn.ModuleList([one, two]))
    with (
        hetero.manage(one, device=target, device_budget="8MiB", precision=LOW),
        hetero.manage(two, device=target, device_budget="8MiB"),
    ):
        y = one(torch.randn(4, WIDTH, device=target))
        z = two(y.float())
        assert (y.dtype, z.dtype) == (LOW, torch.float32)
        z.sum().backward()
        optimizer.step()
        assert one[0].weight.grad.dtype is two[0].weight.grad.dtype is torch.float32
    assert races() == []


@pytest.mark.skipif(ON_CUDA, reason="only the virtual accelerator detects races")
@pytest.mark.parametrize("prefetch", [False, True])
def test_no_races_on_a_slow_link(prefetch):
    target = device(bandwidth="256MiB/s", latency="50us")
    virtual.clear_races()
    model = mlp(6)
    optimizer = adamw(model)
    budget = torch.accelerator.memory_allocated() + 3 * 2 * WEIGHT + (1 << 20)
    with hetero.manage(
        model, optimizer, device=target, device_budget=budget, precision=LOW, prefetch=prefetch
    ):
        train(model, optimizer, target, 5, clip=1.0)
    assert virtual.races() == []


@pytest.mark.skipif(ON_CUDA, reason="only the virtual accelerator detects races")
@pytest.mark.parametrize("left_out", [False, True])
def test_a_twin_is_not_written_while_a_copy_reads_it(left_out):
    target = device(bandwidth="64MiB/s", latency="1ms")
    virtual.clear_races()
    model = mlp(1)
    manager = hetero.manage(model, device=target, device_budget="8MiB", precision=LOW)
    stm = manager._stm
    alias = model[0].weight.detach()  # through which home may be written without a sign
    assert stm.residency.prefetch(stm.tensors[0], limit=8 << 20)
    assert stm.residency.evict(stm.tensors[0])
    if left_out:
        stm.engine.left_out = frozenset({Wait.HOST_AFTER_UP})
        with pytest.raises(StreamRaceError, match="host"):
            stm.residency.prefetch(stm.tensors[0], limit=8 << 20)
        stm.engine.left_out = frozenset()
    else:
        assert stm.residency.prefetch(stm.tensors[0], limit=8 << 20)
        assert races() == []
    torch.accelerator.synchronize()
    virtual.clear_races()
    manager.close()
    del alias


@pytest.mark.parametrize("reentrant", [False, True])
def test_without_precision_a_checkpoint_around_the_model(reentrant):
    def loop(model, optimizer, target):
        seen = []
        for _ in range(3):
            x = torch.randn(4, WIDTH).to(target).requires_grad_()
            checkpoint(model, x, use_reentrant=reentrant).square().mean().backward()
            seen.append([x.grad, *[p.grad for p in model.parameters()]])
            optimizer.step()
            optimizer.zero_grad()
        return seen

    assert_twins(mlp, loop)


@pytest.mark.parametrize("where", ["read", "clip", "step"])
def test_gradients_are_touched_within_inference_mode(where):
    """What is made of them there at home is used outside of it as well."""

    def within(here):
        return torch.inference_mode(where == here)

    def loop(infers):
        model, optimizer, manager = managed_mlp()
        seen = []
        with manager:
            torch.manual_seed(1)
            for _ in range(4):
                loss = model(torch.randn(4, WIDTH).to(device())).float().square().mean()
                loss.backward()
                with within("read" if infers else None):
                    seen += [p.grad.norm() for p in model.parameters() if where == "read"]
                with within("clip" if infers else None):
                    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
                with within("step" if infers else None):
                    optimizer.step()
                optimizer.zero_grad()
                seen.append(loss.detach().cpu())
        return [value.item() for value in seen]

    assert loop(True) == loop(False)
