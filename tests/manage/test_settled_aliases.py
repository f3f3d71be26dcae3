"""What the user holds of an optimizer's states while settled is true after it has ended as well."""

import functools

import pytest
import torch
from bits import bits_of
from loops import backward, batch, mlp
from settling import managed_mlp, settle, step
from torch import nn
from twins import adamw, assert_twins

pytestmark = pytest.mark.usefixtures("homes_on_device")

SIZES = (11, 12, 11, 12, 8, 8, 8, 8)


def held_parts(model, optimizer):
    first, second = list(model.parameters())[:2]
    return {
        "view": optimizer.state[first]["exp_avg"].view(-1),
        "count": optimizer.state[second]["step"].view(1),
    }


@pytest.mark.parametrize("part", ["view", "count"])
def test_whoever_holds_an_alias_of_a_state_keeps_it_settled(part):
    model, optimizer, manager, target = managed_mlp()
    with manager:
        settle(model, optimizer, manager, target)
        held = held_parts(model, optimizer)[part]
        before = held.clone()
        for rows in SIZES:
            step(model, optimizer, target, rows)
            assert manager.plan.everything_fits
        assert not torch.equal(held, before)
        now = held_parts(model, optimizer)[part]
        assert now.data_ptr() == held.data_ptr()
        del held, now
        step(model, optimizer, target, 13)
        assert not manager.plan.everything_fits


def test_an_alias_taken_after_it_has_ended_from_an_entry_held_before_stays_true():
    model, optimizer, manager, target = managed_mlp()
    first = next(model.parameters())
    with manager:
        settle(model, optimizer, manager, target)
        entry = optimizer.state[first]
        model(batch(target, 11)).square().mean().backward()
        assert not manager.plan.everything_fits
        held = entry["exp_avg"].view(-1)
        before = held.clone()
        optimizer.step()
        for rows in SIZES:
            step(model, optimizer, target, rows)
            assert torch.equal(held, optimizer.state[first]["exp_avg"].view(-1))
        assert not torch.equal(held, before)


def test_a_state_dict_of_the_optimizer_that_is_held_goes_with_the_states():
    model, optimizer, manager, target = managed_mlp()
    with manager:
        settle(model, optimizer, manager, target)
        held = optimizer.state_dict()
        for rows in SIZES:
            step(model, optimizer, target, rows)
        present = optimizer.state_dict()
        for number, entry in held["state"].items():
            for name, value in entry.items():
                assert value is present["state"][number][name]


@pytest.mark.parametrize("way", ["look", "leave", "close"])
def test_what_was_written_to_frozen_parameters_through_their_data_stays_written(way):
    """As adapters are merged into weights: neither a version nor a hook tells."""

    def build():
        model = mlp()
        model[0].requires_grad_(False)
        return model

    model, optimizer, manager, target = managed_mlp(
        build=build, make_optimizer=lambda model: adamw(model[1:])
    )
    with manager:
        settle(model, optimizer, manager, target)
        frozen = model[0].weight
        frozen.data.mul_(2.0)
        model[0].bias.data = model[0].bias.data + 1.0
        expected = [p.detach().cpu() for p in model[0].parameters()]
        with torch.no_grad():
            x = batch(target, 11)  # of another kind
            result = model(x).cpu()
        assert not manager.plan.everything_fits
        if way == "leave":
            manager.trim()
            with torch.no_grad():
                assert torch.equal(model(x).cpu(), result)
        if way != "close":
            assert all(torch.equal(p, q) for p, q in zip(model[0].parameters(), expected, strict=True))
    assert all(torch.equal(p, q) for p, q in zip(model[0].parameters(), expected, strict=True))


def gradients(model):
    return [p.grad for p in model.parameters()]


def averaged(average, model):
    for mean, p in zip(average, model.parameters(), strict=True):
        mean.mul_(0.9).add_(p.grad)


def flattened(model):
    return [torch.cat([p.grad.flatten() for p in model.parameters()])]


@pytest.mark.parametrize("kept", ["themselves", "an average", "in one vector"])
def test_what_was_made_from_gradients_at_home_keeps_parameters_there(kept):
    def loop(model, optimizer, target):
        seen = []
        average = None
        for _ in range(10):
            backward(model, target)
            if kept == "an average":
                if average is None:
                    average = [p.grad.clone() for p in model.parameters()]
                averaged(average, model)
                seen.append([bits_of(mean) for mean in average])
            else:  # of the last iteration, beside those of this one
                now = flattened(model) if kept == "in one vector" else gradients(model)
                seen.append([bits_of(a - b) for a, b in zip(now, average or now, strict=True)])
                average = now
            optimizer.step()
            optimizer.zero_grad()
        return seen

    assert_twins(mlp, loop, budget=64 << 20)


@pytest.mark.parametrize("writes", [False, True])
def test_gradients_that_were_looked_at_and_left_alone_keep_nothing_at_home(writes):
    sums = [torch.zeros_like(p) for p in mlp().parameters()]  # like gradients, but there before
    model, optimizer, manager, target = managed_mlp()
    with manager:
        for _ in range(6):
            backward(model, target)
            norms = [p.grad.norm().item() for p in model.parameters()]
            if writes:
                for total, p in zip(sums, model.parameters(), strict=True):
                    total.add_(p.grad)
            optimizer.step()
            optimizer.zero_grad()
        assert min(norms) > 0
        assert manager.plan.everything_fits != writes


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("registered", ["before", "meanwhile"])
def test_gradients_that_a_hook_has_kept_keep_parameters_at_home(registered, kept):
    seen = {}

    def build():
        model = mlp()
        if registered == "before":
            watch(model)
        return model

    def keep(place, gradient):
        seen.setdefault(place, gradient if kept else None)

    def watch(model):
        for place, p in enumerate(model.parameters()):
            p.register_hook(functools.partial(keep, place))

    model, optimizer, manager, target = managed_mlp(build=build)
    with manager:
        if registered == "meanwhile":
            watch(model)
        step(model, optimizer, target)
        model[0].weight.detach()  # here somebody is seen to look, for the first time
        for _ in range(6):
            step(model, optimizer, target)
        assert len(seen) == len(list(model.parameters()))
        assert manager.plan.everything_fits != kept


def test_the_first_gradients_kept_and_compared_with_those_of_every_tenth_step_keep_parameters_at_home():
    def loop(model, optimizer, target):
        first, seen = [], []
        for number in range(21):
            backward(model, target)
            if number == 0:
                first = [p.grad for p in model.parameters()]
            elif number % 10 == 0:
                seen += [bits_of(p.grad - a) for p, a in zip(model.parameters(), first, strict=True)]
            optimizer.step()
            optimizer.zero_grad()
        return seen

    assert_twins(mlp, loop, budget=64 << 20)


def test_after_close_parameters_can_be_swapped():
    model, _, manager, _ = managed_mlp()
    manager.close()
    with torch.no_grad():
        torch.utils.swap_tensors(model[0].weight, nn.Parameter(torch.zeros_like(model[0].weight)))
    assert not model[0].weight.any()


def now_and_then(look):
    """A loop that does it after every fourth step."""

    def loop(model, optimizer, target):
        seen = []
        for number in range(12):
            loss = model(batch(target)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if number % 4 == 3:
                seen.append(look(model))
            seen.append(loss)
        return seen

    return loop


@pytest.mark.parametrize("kept", ["detached", "data", "state_dict", "cpu", "frozen too"])
def test_an_average_of_parameters_that_is_brought_up_to_date_now_and_then_keeps_them_at_home(kept):
    """Between two such iterations nobody looks. Where nothing is kept, everything fits and is settled."""

    def values(model):
        if kept == "state_dict":
            return list(model.state_dict().values())
        if kept == "data":
            return [p.data for p in model.parameters()]
        return [p.detach().cpu() if kept == "cpu" else p.detach() for p in model.parameters()]

    def build():
        model = mlp()
        if kept == "frozen too":
            model[0].requires_grad_(False)
        return model

    def loop(model, optimizer, target):
        average = [value.clone() for value in values(model)]

        def average_on(model):
            for mean, value in zip(average, values(model), strict=True):
                mean.mul_(0.9).add_(value * 0.1)  # ``lerp_`` rounds otherwise on another device

        return [now_and_then(average_on)(model, optimizer, target), average]

    manager = assert_twins(build, loop, share=3.0)
    assert manager.stats.settled_forwards == 0


def test_after_a_look_of_which_nothing_is_kept_parameters_settle():
    look = now_and_then(
        lambda model: [p.detach().clone().mul_(2.0).norm().item() for p in model.parameters()]
    )
    assert assert_twins(mlp, look, share=3.0).stats.settled_forwards > 0
