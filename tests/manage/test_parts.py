"""A submodule that is called by itself computes on the device, what it makes of parameters alone included."""

import copy
import gc
import itertools
import statistics
import weakref
from collections import Counter
from typing import NamedTuple

import pytest
import torch
from accelerators import device
from loops import batch, mlp
from our_calls import our_calls
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from twins import assert_twins, managed, unmanaged

import hetero
from hetero.stm.interception import parts


class Tokens(nn.Module):
    """Begins with parameters alone, as vision transformers, low-rank adapters and merged weights do."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(1, 1, 16))
        self.down, self.up = nn.Parameter(torch.randn(16, 4)), nn.Parameter(torch.randn(4, 16))
        self.normed = parametrizations.weight_norm(nn.Linear(16, 16))
        self.limited = parametrizations.spectral_norm(nn.Linear(16, 16))

    def forward(self, x):
        first = self.first.expand(len(x), -1, -1)
        x = torch.cat([first, x.unsqueeze(1)], 1) @ self.down.t().contiguous().t()
        ones = torch.ones(16, device=self.up.device)
        return self.limited(self.normed(x @ self.up + ones.to(self.first)))


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Tokens(), nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))

    def forward(self, x):
        return self.decoder(self.encoder(x).mean(1))


def trained(loss_of, *, rows=8, width=16, steps=6):
    """A loop of these losses, clipped."""

    def loop(model, optimizer, device):
        losses = []
        for step in range(steps):
            loss = loss_of(model, torch.randn(rows, width).to(device), step)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss)
        return losses

    return loop


def by_parts(model, x, step):
    if step % 3 == 2:
        with torch.no_grad():
            x = x + model.decoder(model.encoder(x).mean(1))
    hidden = model.encoder(x)
    return (model.decoder(hidden.mean(1)) - x).square().mean() + model.encoder(x=x).mean()


def mixed(model, x, step):
    with torch.no_grad():
        target = model.encoder(x).mean(1)
    return (model(x) - target).square().mean()


def beside(model, x, step):
    """Parts before and after the model, all in one backward."""
    hidden = model.encoder(x).mean(1)
    return (model(hidden) - model.decoder(hidden)).square().mean()


@pytest.mark.parametrize("loss_of", [by_parts, mixed, beside])
@pytest.mark.parametrize("share", [0.8, 3.0])
def test_a_part_makes_of_parameters_what_the_model_makes(loss_of, share):
    assert_twins(Autoencoder, trained(loss_of), share=share)


class Coder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(128, 128), nn.GELU()) for _ in range(8)]
        self.down, self.up = nn.Sequential(*layers[:4]), nn.Sequential(*layers[4:])
        self.shift = nn.Parameter(torch.randn(128))

    def encode(self, x):
        return self.down(x) + self.shift

    def decode(self, z):
        return self.up(z)

    def forward(self, x):
        return self.decode(self.encode(x))


def by_methods(model, x, step):
    return (model.decode(model.encode(x)) - x).square().mean()


def by_the_model(model, x, step):
    return (model(x) - x).square().mean()


def test_methods_train_in_less_memory_than_the_weights_take():
    weights = sum(p.nbytes for p in Coder().parameters())
    assert_twins(Coder, trained(by_methods, width=128, steps=8), budget=weights * 2 // 3)


def test_what_parts_save_for_backward_leaves_as_well():
    wide = trained(lambda model, x, step: (model.up(model.down(x)) - x).square().mean(), rows=512, width=128)
    _, _, peak = unmanaged(Coder, wide)
    with pytest.raises(torch.OutOfMemoryError):
        managed(Coder, wide, peak // 2, activations=False)
    assert_twins(Coder, wide, share=0.5)


@pytest.mark.parametrize("share", [0.8, 3.0])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_counts_what_a_part_saves_as_it_does_when_it_is_recomputed(use_reentrant, share):
    def loss_of(model, x, step):
        def with_an_operator(x):
            return model.decode(x) @ model.up[0][0].weight

        x.requires_grad_()
        x = checkpoint(model.down, x, use_reentrant=use_reentrant)
        # Told by its first operator, and called again before it is recomputed.
        x = model.up[0][0](checkpoint(model.up[0][0], x, use_reentrant=use_reentrant))
        return checkpoint(with_an_operator, x, use_reentrant=use_reentrant).square().mean()

    assert_twins(Coder, trained(loss_of, width=128), share=share)


def calls_of_ours(model):
    return [name for name, part in model.named_modules() if "_compiled_call_impl" in vars(part)]


def test_calls_are_replaced_where_parts_are_called_and_as_long_as_that_is_needed():
    torch.manual_seed(0)
    model = Coder()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    target = device()
    with hetero.manage(model, optimizer, device=target, device_budget="64MiB") as manager:
        assert calls_of_ours(model) == ["", "down", "up"]
        model.down[1](torch.randn(2, 128).to(target))  # nobody could know
        assert calls_of_ours(model) == ["", "down", "down.1", "up"]
        trained(by_the_model, width=128, steps=8)(model, optimizer, target)
        assert manager.plan.everything_fits
        assert calls_of_ours(model) == ["", "down.1"]  # is checked
        manager.trim("1MiB")
        assert calls_of_ours(model) == ["", "down", "down.1", "up"]
        assert calls_of_ours(copy.deepcopy(model)) == []
    assert calls_of_ours(model) == []


def test_what_methods_call_moves_no_more_than_the_model():
    moved = []
    for loss_of in (by_methods, by_the_model):
        torch.manual_seed(0)
        model = Coder()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        target = device()
        with hetero.manage(
            model, optimizer, device=target, device_budget="800KiB", device_homes=False
        ) as manager:
            trained(loss_of, width=128, steps=8)(model, optimizer, target)
            seen = [manager.stats]
            for _ in range(5):
                trained(loss_of, width=128, steps=1)(model, optimizer, target)
                seen.append(manager.stats)
        fetched = [stats.total_fetched_bytes for stats in seen]
        # The median, because on a busy machine one more is there ahead of the next iteration now and then.
        moved.append(statistics.median(after - before for before, after in itertools.pairwise(fetched)))
        assert seen[-1].unplanned_fetches == seen[0].unplanned_fetches
    assert 0 < moved[0] <= moved[1]


def test_elsewhere_and_for_inputs_on_the_host_parameters_alone_stay_at_home():
    model = Autoencoder()
    with hetero.manage(model, device=device(), device_budget="16MiB"):
        assert model.encoder.first.norm().is_cpu
        assert model.encoder.first.device.type == "cpu"
        assert model.decoder(torch.randn(2, 16)).is_cpu  # a module is called, with nothing on the device
        seen = []
        outer = nn.Module()
        outer.model = model
        outer.forward = lambda x: seen.append(
            model.encoder.first.norm()
        )  # called, and no part of what is managed
        outer(torch.randn(2, 16).to(device()))
        assert seen[0].is_cpu


class Features(nn.Module):
    """Of vision transformers: `features` is a method, and makes of parameters alone what it puts beside its input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.places = nn.Parameter(torch.randn(1, 1, 16)), nn.Parameter(torch.randn(1, 9, 16))
        self.mix = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
        self.head = nn.Linear(16, 16)

    def features(self, x):
        first = self.first.expand(2, -1, -1)
        x = torch.cat([first, x.view(2, 8, 16)], 1) + self.places.softmax(-1).to(torch.float32)
        return self.mix(x * torch.ones(16, device=self.first.device))

    def forward(self, x):
        return self.head(self.features(x))


def by_features(model, x, step):
    with torch.no_grad():
        x = x + model.features(x).mean()
    return model.head(model.features(x[:16])).square().mean() + model(x).mean()


@pytest.mark.parametrize("share", [0.8, 3.0])
def test_a_method_makes_of_parameters_what_the_model_makes(share):
    assert_twins(Features, trained(by_features, rows=16), share=share)


class Looking(Features):
    def __init__(self) -> None:
        super().__init__()
        self.average = self.first.detach().clone()

    def look(self, x):
        """Of what it was given, nothing depends."""
        self.average.lerp_(self.first.detach(), 0.1)
        return self.average.is_cpu, self.first.detach().is_cpu, self.norm(), self.first.norm()

    def norm(self):
        return self.first.norm()

    def held(self, x):
        """How long what it had in a variable is there."""
        x = x + 1
        reference = weakref.ref(x)
        assert self.first.norm().device == x.device
        x = x.sum()
        return reference()

    def step(self, x):
        class Step:
            def __init__(self, of):
                self.of = of

            def take(self, x):
                return self.of.first.norm()

        return Step(self).take(x)


def test_a_method_looks_at_parameters_as_the_loop_does():
    model = Looking()
    with hetero.manage(model, device=device(), device_budget="16MiB"), torch.no_grad():
        x = torch.randn(16, 16).to(device())
        average_at_home, at_home, of_a_method_without_input, norm = model.look(x)
        assert average_at_home
        assert at_home
        assert (
            of_a_method_without_input.device == device()
        )  # it is the method that called it that was given something
        assert model.norm().is_cpu
        assert norm.device == device()
        assert model.look(x.cpu())[-1].is_cpu
        assert model.step(x).is_cpu  # another's method, which the model calls
        assert model.held(x) is None


class Batch(NamedTuple):
    rows: torch.Tensor


class Given(nn.Module):
    """Methods that are given something in many ways, and have a parameter on its side alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16))

    def forward(self, x):
        return x @ self.weight

    def by_keyword(self, *, y):
        return y @ self.weight.t()

    def by_place(self, *ys):
        return ys[0] @ self.weight.t()

    def by_name(self, **ys):
        return ys["y"] @ self.weight.t()

    def in_a_tuple(self, batch):
        return batch.rows @ self.weight.t()

    def from_a_helper(self, y):
        return y @ self.turned()

    def from_a_property(self, y):
        return y @ self.also_turned

    def turned(self):
        return self.weight.t()

    @property
    def also_turned(self):
        return self.turned()


def test_methods_are_given_something_by_place_by_keyword_and_by_who_called_them():
    model = Given()
    expected = None
    with hetero.manage(model, device=device(), device_budget="16MiB"), torch.no_grad():
        y = torch.randn(4, 16).to(device())
        for call in (
            lambda: model.by_keyword(y=y),
            lambda: model.by_place(y),
            lambda: model.by_name(y=y),
            lambda: model.in_a_tuple(Batch(y)),
            lambda: model.from_a_helper(y),
            lambda: model.from_a_property(y),
        ):
            found = call()
            expected = found if expected is None else expected
            assert torch.equal(found, expected)
        assert model.turned().is_cpu
        assert model.also_turned.is_cpu


# -- where everything fits -----------------------------------------------------------------------------


@pytest.mark.usefixtures("homes_on_device")
@pytest.mark.parametrize(
    ("build", "loss_of", "width"),
    [(Autoencoder, by_parts, 16), (Autoencoder, beside, 16), (Coder, by_methods, 128)],
)
def test_loops_of_parts_settle(build, loss_of, width):
    manager = assert_twins(build, trained(loss_of, width=width, steps=9), budget=64 << 20)
    assert manager.stats.settled_forwards > 6


@pytest.mark.usefixtures("homes_on_device")
def test_what_an_earlier_part_has_saved_is_not_counted_twice():
    """Where saved tensors are most of it, a loop of parts stays settled under a budget in which the model's does."""
    settled = []
    for loss_of in (by_the_model, by_methods):
        loop = trained(loss_of, rows=600, width=128, steps=9)
        settled.append(assert_twins(Coder, loop, share=1.2).stats.settled_forwards)
    whole, parts = settled
    assert whole > 0
    assert parts == 2 * whole


@pytest.mark.usefixtures("homes_on_device")
@pytest.mark.parametrize("settles_by", [by_methods, by_the_model])
def test_a_larger_batch_through_a_method_ends_it_before_the_budget_is_passed(settles_by):
    budget = 3 << 20
    settled = []

    def loop(model, optimizer, target):
        with torch.no_grad():
            model.encode(torch.randn(8, 128).to(target))  # is known to be called from now on
        seen = trained(settles_by, width=128, steps=8)(model, optimizer, target)
        settled.append(model.up[0][0].weight.device == target)
        for rows in (600, 8):
            seen += trained(by_methods, rows=rows, width=128, steps=4)(model, optimizer, target)
        return seen

    _, _, peak = unmanaged(Coder, loop)
    assert peak > budget
    settled.clear()
    assert_twins(Coder, loop, budget=budget)
    assert settled[-1]


@pytest.mark.usefixtures("homes_on_device")
def test_what_is_called_by_itself_costs_one_check_and_the_rest_nothing():
    torch.manual_seed(0)
    model = Coder()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    target = device()
    x = torch.randn(8, 128).to(target)
    with hetero.manage(model, optimizer, device=target, device_budget="64MiB") as manager:
        model.down(x)
        trained(by_the_model, width=128, steps=8)(model, optimizer, target)
        assert manager.plan.everything_fits
        trained(lambda m, x, step: m.down(x).square().mean(), width=128, steps=8)(model, optimizer, target)
        assert manager.plan.everything_fits
        assert not our_calls(lambda: model.up(x))
        by_itself = our_calls(lambda: model.down(x))
        assert by_itself["state.Settled.enter"] == 1
        within = our_calls(lambda: model(x))
        assert within["state.Settled.enter"] == 1
        # Eight for the model; one for the part, which sees that the model runs.
        assert sum(within.values()) == 9
        assert sum(by_itself.values()) <= 16


@pytest.mark.usefixtures("homes_on_device")
def test_a_look_between_two_parts_keeps_parameters_at_home():
    torch.manual_seed(0)
    model = Coder()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    target = device()
    before = torch.ones(128, 128)

    def loss_of(model, x, step):
        hidden = model.encode(x)
        with torch.no_grad():
            (model.up[0][0].weight * before).sum()  # which is on the host
        return (model.decode(hidden) - x).square().mean()

    with hetero.manage(model, optimizer, device=target, device_budget="64MiB") as manager:
        trained(loss_of, width=128, steps=8)(model, optimizer, target)
        assert not manager.plan.everything_fits


# -- which modules there are -----------------------------------------------------------------------------


class Wide(nn.Module):
    """Its method's operators are in no module of it."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(16, 16))
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers))

    def encode(self, x):
        return ((x @ self.w) @ self.w) @ self.w

    def forward(self, x):
        return self.encode(x)


class Around(nn.Module):
    def __init__(self, model: Wide) -> None:
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model.encode(x)


def test_an_operator_outside_of_a_forward_costs_the_same_however_many_modules_there_are():
    counts = []
    for layers in (4, 400):
        model, target = Wide(layers), device()
        around, x = Around(model), torch.randn(2, 16).to(target)
        with hetero.manage(model, device=target, device_budget="64MiB"), torch.no_grad():
            around(x)
            counts.append(our_calls(lambda: around(x)))  # noqa: B023
    assert counts[0] == counts[1] != Counter()


def test_modules_that_come_later_are_parts_and_those_that_they_replace_are_not_kept():
    class Inserted(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return nn.functional.linear(self.inner(x), self.inner.weight.t().contiguous())

    model, target = Autoencoder(), device()
    x = torch.randn(2, 16).to(target)
    with hetero.manage(model, device=target, device_budget="64MiB"):
        model.decoder[1](x)
        model.decoder[0] = Inserted(model.decoder[0])  # torch tells
        model.decoder[0](x).sum().backward()
        assert "decoder.0" in calls_of_ours(model)
        model.decoder._modules["2"] = Inserted(model.decoder[2])  # nobody does
        hidden = torch.randn(2, 64).to(target)
        model.decoder[2](hidden).sum().backward()
        assert "decoder.2" in calls_of_ours(model)
        reference = weakref.ref(model.decoder)
        model.decoder = nn.Sequential(model.decoder[0].inner)
        gc.collect()
        assert reference() is None
        model.decoder(x).sum().backward()
        assert "decoder" in calls_of_ours(model)


def test_a_module_that_another_thread_registers_meanwhile_is_found_and_disturbs_nobody(monkeypatch):
    model = mlp(depth=2)
    modules = parts._modules

    def interrupted(model):
        found = list(modules(model))
        if not hasattr(model, "late"):
            model.late = nn.Linear(2, 2)
        return found

    with hetero.manage(model, device=device(), device_budget="16MiB"):
        parts.look_again()
        monkeypatch.setattr(parts, "_modules", interrupted)
        assert parts._is_part(model[0])
        assert parts._is_part(model.late)
        monkeypatch.undo()
        going_through = parts._modules(model)
        next(going_through)
        model.later = nn.Linear(2, 2)
        assert model[0] in list(going_through)


class Scaled(nn.Module):
    """A part that is called with nothing, and mixes a parameter of its own with a buffer."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64) / 8)
        self.register_buffer("mask", (torch.arange(64) % 3 > 0).float())

    def forward(self):
        return self.weight.t().contiguous() * self.mask


class Normalized(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = mlp(depth=2)
        self.scaled = Scaled()
        self.last = nn.utils.parametrizations.spectral_norm(nn.Linear(64, 64))

    def forward(self, x):
        return self.last(self.body(x) @ self.scaled())


@pytest.mark.parametrize("share", [0.5, 0.8, 1.2])
@pytest.mark.parametrize("looks", ["alone", "in the loss", "in evaluation"])
def test_what_a_parametrization_makes_of_a_parameter_and_its_own_buffers(looks, share):
    """Power iteration, in each look while training: with buffers on the device, whoever looks."""

    def loop(model, optimizer, target):
        seen = []
        for _ in range(8):
            loss = model(batch(target)).square().mean()
            if looks == "in the loss":
                loss = loss + model.last.weight.abs().mean() + model.scaled().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if looks == "in evaluation":
                model.eval()
            with torch.no_grad():
                seen += [loss.detach(), model.last.weight.norm(), model.scaled().sum()]
            model.train()
        return seen

    assert_twins(Normalized, loop, share=share)
