"""A submodule that is called by itself computes on the device, what it makes of parameters alone included."""

import copy

import pytest
import torch
from accelerators import device
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from twins import assert_twins, managed, unmanaged

import hetero


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
        assert calls_of_ours(model) == [""]
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
            before = manager.stats
            trained(loss_of, width=128, steps=3)(model, optimizer, target)
            after = manager.stats
        moved.append(after.total_fetched_bytes - before.total_fetched_bytes)
        assert after.unplanned_fetches == before.unplanned_fetches
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
