"""What autograd allows with saved tensors it allows with those that have left: the same numbers or the same error."""

import gc

import pytest
import torch
import torch.nn.functional as F
from accelerators import clear_races, races
from backward_ends import wait_for_backward_ends
from blocks import ROWS, WIDTH, deep, manage_for, shed_all, steps
from test_semantics_autograd import mlp
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint
from twins import assert_same, assert_twins, device, plain

from hetero.msc import MemStatsCollector
from hetero.stm import Kind, Tier


def gradients_of(model):
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def unmanaged_gradients(build, run):
    target = device()
    torch.manual_seed(0)
    model = build().to(target)
    torch.manual_seed(1)
    return plain(run(model, target, lambda: None))


def same_with_everything_shed(build, run, **keywords):
    """``run(model, target, shed)`` -> observations; ``shed`` makes all saved tensors leave."""
    expected = unmanaged_gradients(build, run)
    wait_for_backward_ends(device())
    gc.collect()
    clear_races()
    torch.manual_seed(0)
    model = build()
    moved = []
    before = torch.accelerator.memory_allocated()
    with manage_for(model, **keywords) as manager:
        torch.manual_seed(1)
        got = plain(run(model, device(), lambda: moved.append(shed_all(manager))))
        manager._stm.activations.close_gone()
        ledger = manager._stm.ledger
        assert ledger.nbytes(Tier.DEVICE, Kind.ACTIVATION) == ledger.nbytes(Tier.HOST, Kind.ACTIVATION) == 0
    assert_same(got, expected, "observed")
    assert races() == []
    del model
    wait_for_backward_ends(device())
    gc.collect()
    assert torch.accelerator.memory_allocated() == before
    return sum(moved)


def test_retain_graph_and_a_second_backward():
    def run(model, target, shed):
        loss = model(torch.randn(ROWS, WIDTH).to(target)).square().mean()
        shed()
        loss.backward(retain_graph=True)
        shed()  # what was read once leaves again, without a copy
        first = gradients_of(model)
        loss.backward()
        return [loss, first, gradients_of(model)]

    assert same_with_everything_shed(deep, run) > 0


def test_double_backward():
    def run(model, target, shed):
        x = torch.randn(ROWS, WIDTH).to(target).requires_grad_()
        out = model(x).sum()
        shed()
        (gx,) = torch.autograd.grad(out, x, create_graph=True)
        shed()
        loss = (gx.norm() - 1).square()
        loss.backward()
        return [loss, gradients_of(model)]

    assert same_with_everything_shed(lambda: mlp(depth=2), run) > 0


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant):
        super().__init__()
        self.blocks = deep(4)
        self.reentrant = reentrant

    def forward(self, x):
        x = self.blocks[0](x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return F.gelu(x)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_of_both_kinds(reentrant):
    def run(model, target, shed):
        loss = model(torch.randn(ROWS, WIDTH).to(target)).square().mean()
        shed()
        loss.backward()
        return [loss, gradients_of(model)]

    def build():
        return Checkpointed(reentrant=reentrant)

    assert same_with_everything_shed(build, run) > 0
    assert_twins(build, steps, share=0.5)


class SavingOnHost(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = deep(4)

    def forward(self, x):
        x = self.blocks[0](x)
        with save_on_cpu():
            x = self.blocks[1](x)
        return self.blocks[2:](x)


def test_save_on_cpu_within_the_model_keeps_its_own():
    def run(model, target, shed):
        loss = model(torch.randn(ROWS, WIDTH).to(target)).square().mean()
        shed()
        loss.backward()
        return [loss, gradients_of(model)]

    assert same_with_everything_shed(SavingOnHost, run) > 0
    assert_twins(SavingOnHost, steps, share=0.5)


def test_save_on_cpu_around_the_model_takes_all_but_parameters():
    def run(model, target, shed):
        with save_on_cpu():
            out = model(torch.randn(ROWS, WIDTH).to(target))
        loss = out.square().mean()
        shed()
        loss.backward()
        return [loss, gradients_of(model)]

    assert same_with_everything_shed(deep, run) == 0


class Fused(torch.autograd.Function):
    """Saves an input, an output and an intermediate, and keeps one of them in ``ctx`` itself."""

    @staticmethod
    def forward(ctx, x, weight):
        inner = x @ weight
        out = inner.tanh()
        ctx.save_for_backward(x, weight, inner, out)
        ctx.inner_too = inner
        return out

    @staticmethod
    def backward(ctx, g):
        x, weight, inner, out = ctx.saved_tensors
        assert torch.equal(inner, ctx.inner_too)
        g = g * (1 - out * out)
        return g @ weight.t(), x.t() @ g


class WithFunction(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList([torch.randn(WIDTH, WIDTH) / 8 for _ in range(4)])

    def forward(self, x):
        for weight in self.weights:
            x = Fused.apply(x, weight)
        return x


def test_custom_functions():
    def run(model, target, shed):
        loss = model(torch.randn(ROWS, WIDTH).to(target)).square().mean()
        shed()
        loss.backward()
        return [loss, gradients_of(model)]

    assert same_with_everything_shed(WithFunction, run) > 0
    assert_twins(WithFunction, steps, share=0.7)


class Views(nn.Module):
    """Saves parts, transposes and other types of one storage, each several times."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        scores = (q @ k.t() / 8).softmax(-1)
        mixed = (scores @ v) * q.sigmoid() + v[::2].repeat(2, 1)
        spread = torch.view_as_complex(mixed.reshape(len(x), -1, 2)).abs()
        return self.out(mixed) * spread.sum(1, keepdim=True) * (mixed > 0)


def test_views_of_one_storage_move_once_and_come_back_as_they_were():
    def run(model, target, shed):
        loss = model(torch.randn(128, WIDTH).to(target)).square().mean()
        shed()
        loss.backward()
        return [loss, gradients_of(model)]

    assert same_with_everything_shed(Views, run) > 0
    model = Views()
    with manage_for(model) as manager:
        x = torch.randn(128, WIDTH).to(device())
        loss = model(x).square().mean()
        qkv = 128 * 3 * WIDTH * 4
        manager._stm.activations.close_gone()
        records = [account.device_nbytes for account in manager._stm.activations._live.values()]
        assert records.count(qkv) == 1
        shed_all(manager)
        assert manager._stm.activations.device_bytes == x.nbytes  # which is held here
        freed = manager.stats.activation_out_bytes
        assert freed == sum(records) - x.nbytes
        loss.backward()
        assert manager.stats.activation_in_bytes == freed


class Editing(nn.Module):
    """Edits, in place, what it has saved: ``illegal``, or only what nobody needs."""

    def __init__(self, *, illegal):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.illegal = illegal

    def forward(self, x):
        y = self.first(x)
        z = y.exp() if self.illegal else F.relu(y)  # both save their output; relu_ then leaves it as it is
        z = z.mul_(2) if self.illegal else z.relu_()
        return self.last(z)


@pytest.mark.parametrize("sheds", [False, True])
def test_an_illegal_edit_is_the_error_it_always_is(sheds):
    def run(model, target, shed):
        loss = model(torch.ones(ROWS, WIDTH).to(target)).square().mean()
        if sheds:
            shed()
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:
            loss.backward()
        return str(caught.value).split(";")[0].replace("[virtualFloatType", "[FloatTensor")

    def said(text):
        return text[text.index("is at version") :]

    target = device()
    expected = run(Editing(illegal=True).to(target), target, None) if not sheds else None
    model = Editing(illegal=True)
    with manage_for(model) as manager:
        got = run(model, target, lambda: shed_all(manager))
    if expected is not None:
        assert said(got) == said(expected)
    assert races() == []


def test_an_edit_of_a_saved_tensor_that_has_left_and_come_back_is_seen():
    target = device()
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    with manage_for(model) as manager:
        out = model(torch.randn(ROWS, WIDTH).to(target))
        node = out.grad_fn
        loss = out.square().mean()
        del out
        shed_all(manager)
        assert manager._stm.activations.device_bytes > 0  # the loss, made outside, holds the output as well
        del loss
        shed_all(manager)
        assert manager._stm.activations.device_bytes == 0
        node._saved_result.detach().mul_(2)
        with pytest.raises(RuntimeError, match="is at version 1; expected version 0"):
            _ = node._saved_result


def test_what_is_on_its_way_back_ahead_of_its_use_leaves_where_memory_is_short():
    target = device(bandwidth="64MiB/s", latency="20us")
    clear_races()
    model = deep(3)
    x = torch.randn(ROWS, WIDTH)
    with manage_for(model) as manager:
        activations = manager._stm.activations
        model(x.to(target)).square().mean().backward()
        expected = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        loss = model(x.to(target)).square().mean()
        shed_all(manager)
        there = activations.device_bytes  # held by the loss
        with manager._stm.lock:
            for record in [reference() for reference in activations._live]:
                if record.aliases is None:
                    activations._start_back(record)
        del record
        assert activations.device_bytes > there
        shed_all(manager)
        assert activations.device_bytes == there
        for _ in range(8):
            torch.ones(ROWS, 2 * WIDTH, device=target)  # written where they were to come
        loss.backward()
        assert_same(plain([p.grad for p in model.parameters()]), plain(expected), "gradients")
    assert races() == []


def test_what_is_needed_before_it_has_left_does_not_come_back(monkeypatch):
    spared = []
    monkeypatch.setattr(MemStatsCollector, "count_spared", lambda collector, nbytes: spared.append(nbytes))
    target = device(bandwidth="20MiB/s")
    model = deep()
    with manage_for(model) as manager:
        loss = model(torch.randn(ROWS, WIDTH).to(target)).square().mean()
        activations, before = manager._stm.activations, manager.stats
        with manager._stm.lock:
            activations.close_gone()
            idle = [
                r() for r in activations._live if r().aliases is not None and not activations._is_held(r())
            ]
            left = activations._leave(idle[0], at_once=False)
            activations._start_back(idle[0])
        del idle
        after = manager.stats
        assert spared == [left]
        assert after.activation_out_bytes == before.activation_out_bytes + left > before.activation_out_bytes
        assert after.activation_in_bytes == before.activation_in_bytes
        loss.backward()


def test_what_the_user_holds_stays_and_has_its_values():
    target = device()
    model = deep(2)
    with manage_for(model) as manager:
        x = torch.randn(ROWS, WIDTH).to(target)
        seen = []
        model[1].norm.register_forward_hook(lambda module, args, out: seen.append(out))
        loss = model(x).square().mean()
        address, values = seen[0].data_ptr(), seen[0].detach().clone()
        shed_all(manager)
        assert seen[0].data_ptr() == address
        assert torch.equal(seen[0], values)
        manager._stm.activations.close_gone()
        held = manager._stm.activations.held()
        assert len(held) >= 1
        loss.backward()


class Reading(torch.autograd.Function):
    """Its backward looks at what moves while it uses what it has saved."""

    @staticmethod
    def forward(ctx, x, weight, look):
        ctx.save_for_backward(x, weight)
        ctx.look = look
        return x @ weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        ctx.look()
        return gradient @ weight.t(), x.t() @ gradient, None


# Of what needs a gradient autograd gives out an alias, other saved tensors as they are.
@pytest.mark.parametrize("trains", [True, False])
def test_what_backward_uses_is_held(trains):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

        def forward(self, x):
            return Reading.apply(x, self.weight, look)

    looks = []

    def look():
        gc.collect()  # or what earlier tests have left might go in between
        before = torch.accelerator.memory_allocated()
        freed = shed_all(manager)
        looks.append((freed, before - torch.accelerator.memory_allocated(), len(held())))

    def held():
        return manager._stm.activations.held()

    model = Model()
    with manage_for(model) as manager:
        for _ in range(3):
            # More than its caller needs: nobody but the graph holds what forward has saved.
            model(torch.randn(ROWS, WIDTH, device=device()).requires_grad_(trains) * 1).sum().backward()
    assert looks == [(0, 0, 1)] * 3


def test_a_dropped_graph_frees_device_and_host():
    target = device()
    model = deep()
    with manage_for(model) as manager:
        activations = manager._stm.activations
        ledger = manager._stm.ledger
        loss = model(torch.randn(ROWS, WIDTH).to(target)).square().mean()
        shed_all(manager)
        loss.backward()
        slots = activations._slots.nbytes
        assert slots > 0
        del loss
        gc.collect()
        manager._stm.relief.relieve()
        base = torch.accelerator.memory_allocated()
        for sheds in (False, True, True):
            loss = model(torch.randn(ROWS, WIDTH).to(target)).square().mean()
            if sheds:
                shed_all(manager)
            del loss
            while manager._stm.relief.relieve():
                pass
            activations.close_gone()
            assert ledger.nbytes(Tier.DEVICE, Kind.ACTIVATION) == 0
            assert ledger.nbytes(Tier.HOST, Kind.ACTIVATION) == 0
            assert torch.accelerator.memory_allocated() == base
        assert activations._slots.nbytes == slots  # the same blocks, again and again
        assert activations._live == {}
        assert activations._by_storage == {}
        assert not activations._flights


def test_a_graph_dropped_while_a_copy_is_on_its_way_is_freed_after_it():
    target = device(bandwidth="64MiB/s", latency="1ms")
    clear_races()
    model = deep(2)
    with manage_for(model) as manager:
        activations = manager._stm.activations
        for brings in (False, True):
            before = manager._stm.ledger.nbytes(Tier.DEVICE, Kind.ACTIVATION)
            out = model(torch.randn(ROWS, WIDTH).to(target))
            with manager._stm.lock:
                records = [reference() for reference in activations._live]
                assert sum(activations._leave(record, at_once=False) for record in records) > 0
                if brings:
                    activations.reclaim(1 << 60)
                    for record in records:
                        if record.aliases is None:
                            activations._start_back(record)
            del out, records
            record = None
            activations.close_gone()
            assert activations._flights
            activations.reclaim(1 << 60)
            assert manager._stm.ledger.nbytes(Tier.DEVICE, Kind.ACTIVATION) == before
            assert not activations._flights
            torch.ones(1 << 20, device=target)  # writes where they were
    assert races() == []


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        raise KeyboardInterrupt


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_after_an_exception_nothing_is_left_and_training_goes_on(where):
    class Fails(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = deep()
            self.fails = False

        def forward(self, x):
            for index, block in enumerate(self.blocks):
                x = block(x)
                if self.fails and index == 3:
                    if where == "forward":
                        raise KeyboardInterrupt
                    x = Failing.apply(x)
            return x

    def loop(model, optimizer, target):
        seen = steps(model, optimizer, target, 2)
        model.fails = True
        with pytest.raises(KeyboardInterrupt):
            steps(model, optimizer, target, 1)
        wait_for_backward_ends(target)
        model.fails = False
        optimizer.zero_grad()
        return seen + steps(model, optimizer, target, 3)

    manager = assert_twins(Fails, loop, share=0.4)
    assert manager._stm.ledger.device_bytes == 0


def test_a_graph_that_outlives_its_manager_can_be_read():
    target = device()
    torch.manual_seed(0)
    model = deep(2)
    torch.manual_seed(0)
    twin = deep(2).to(target)
    x = torch.randn(ROWS, WIDTH).to(target)
    expected = torch.autograd.grad(twin(x).square().mean(), list(twin.parameters()))
    manager = manage_for(model)
    loss = model(x).square().mean()
    shed_all(manager)
    assert manager.stats.activation_out_bytes > 0
    manager.close()
    assert manager._stm.ledger.device_bytes == 0
    got = torch.autograd.grad(loss, list(model.parameters()))
    assert_same(plain(got), plain(expected), "gradients")
    del loss
    assert races() == []


def test_where_host_memory_is_short_saved_tensors_stay():
    model = deep(4)
    homes = sum(p.nbytes for p in model.parameters())
    budget = 2 * homes + (256 << 10)
    with manage_for(model, host_budget=budget) as manager:
        loss = model(torch.randn(ROWS, WIDTH).to(device())).square().mean()
        shed_all(manager)
        assert 0 < manager._stm.ledger.nbytes(Tier.HOST, Kind.ACTIVATION) <= budget - homes
        assert manager._stm.activations.device_bytes > 1 << 20
        loss.backward()


class Attending(nn.Module):
    """The node of its backward reads three large tensors, one after the other."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(64, 4, dropout=0.1)
        self.last = nn.Linear(64, 64)

    def forward(self, x):
        return self.last(x + self.attention(x, x, x, need_weights=False)[0])


@pytest.mark.parametrize("share", [0.6, 0.7, 0.8])
def test_others_leave_for_what_comes_back_by_surprise_and_for_who_reads_it(share):
    """The first graph that is kept follows the plan of those that were not, whose tensors were gone by then."""

    def loop(model, optimizer, target):
        seen = []
        for step in range(8):
            loss = model(torch.randn(256, 64).to(target)).square().mean()
            if step == 6:
                loss.backward(retain_graph=True)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.item())
        return seen

    assert_twins(Attending, loop, share=share, speculate=False)


def test_what_is_gone_is_not_taken_for_room():
    """It would count as model data that is there, and so much of what others have as nothing."""
    target, model = device(), deep(2)
    with manage_for(model) as manager:
        executor, x = manager._stm.executor, torch.randn(ROWS, WIDTH).to(target)
        for _ in range(3):
            loss = model(x).square().mean()
            loss.backward()
        loss = model(x).square().mean()
        kept = torch.empty(64 << 20, dtype=torch.uint8, device=target)
        assert executor._course.plan is not None
        del loss
        drift = executor._growth.measured(0)
        manager._stm.activations.close_gone()
        assert drift == executor._growth.measured(0) > 0
        del kept


class Decaying(nn.Module):
    """As lightning attention does: multiplies by a part of a large table of its own, which is saved for backward."""

    def __init__(self):
        super().__init__()
        self.table = nn.Buffer(torch.rand(512, WIDTH))
        self.layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(6)])

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x) * self.table[: len(x)])
        return x


def test_a_buffer_that_is_saved_for_backward_is_counted_once():
    def loop(model, optimizer, target):
        x, seen = torch.randn(16, WIDTH).to(target), []
        for _ in range(8):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.item())
        return seen

    manager = assert_twins(Decaying, loop, share=0.6)
    assert manager.plan is not None
    assert manager.stats.unplanned_fetches == 0
    assert min(period.device_non_model_bytes for period in manager.stats.periods) >= 0
