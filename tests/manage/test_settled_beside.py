"""Where everything fits, of several models of one shape: they settle together, whatever one of them has at home."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from loops import batch, mlp
from settling import is_intercepted, managed_mlp, settle, step
from several import in_turn, sgd, twins, two_that_are_trained

PLENTY = 64 << 20


@pytest.mark.parametrize("averaged", [[0], [1], [0, 1]])
def test_averages_of_copies_settle_beside_another_model(averaged):
    averages = []

    def build():
        models, optimizers = two_that_are_trained()
        averages[:] = [[p.detach().clone() for p in model.parameters()] for model in models]
        return models, optimizers

    def loop(models, optimizers, target):
        seen = []
        for _ in range(12):
            seen.append(in_turn(models, optimizers, target, steps=1))
            with torch.no_grad():
                for index in averaged:
                    for mean, p in zip(averages[index], models[index].parameters(), strict=True):
                        mean.lerp_(p.detach().cpu(), 0.1)
        return seen, averages

    stats = twins(loop, build, PLENTY)
    assert all(each.settled_forwards > 0 for each in stats)


def test_what_both_were_given_and_have_let_go_of_keeps_neither():
    def loop(models, optimizers, target):
        seen = []
        for number in range(12):
            seen.append(in_turn(models, optimizers, target, steps=1))
            if number == 1:
                seen += [value.clone().sum() for model in models for value in model.state_dict().values()]
        return seen

    stats = twins(loop, two_that_are_trained, PLENTY)
    assert all(each.settled_forwards > 0 for each in stats)


def _load(follower, model):
    follower.load_state_dict(model.state_dict())


def _set(follower, model):
    for p, new in zip(follower.parameters(), model.parameters(), strict=True):
        p.data = 0.9 * p.data + 0.1 * new.data


def _mix(follower, model):
    for p, new in zip(follower.parameters(), model.parameters(), strict=True):
        p.data.mul_(0.9).add_(0.1 * new.data)


def _mix_lists(follower, model):
    new = [p.data for p in model.parameters()]
    torch._foreach_lerp_([p.data for p in follower.parameters()], new, 0.1)


def a_model_and_its_follower():
    models = mlp(depth=3), mlp(depth=3)
    return models, [sgd(models[0]), None]


@pytest.mark.parametrize("follow", [_load, _set, _mix, _mix_lists])
@pytest.mark.parametrize("every", [3, 4, 7])
@pytest.mark.parametrize("is_first", [False, True], ids=["follower last", "follower first"])
@pytest.mark.parametrize("budget", [PLENTY, 620 << 10, 420 << 10])
def test_a_follower_is_where_its_model_is(follow, every, is_first, budget):
    """What is made of the one's parameters is combined with the other's, now and then. What one was given at home at
    the first, `state_dict()`, is gone by then."""

    def loop(models, optimizers, target):
        (model, follower), seen = models, []
        _load(follower, model)
        for number in range(18):
            x = batch(target)
            outputs = None if is_first else model(x)
            with torch.no_grad():
                wanted = follower(x)
            loss = ((model(x) if outputs is None else outputs) - wanted + 0.1).square().mean()
            loss.backward()
            optimizers[0].step()
            optimizers[0].zero_grad()
            seen.append(loss)
            if number % every == every - 1:
                follow(follower, model)
        return seen

    stats = twins(loop, a_model_and_its_follower, budget)
    if budget == PLENTY and follow is not _set:  # home is then memory that was the loop's
        assert all(each.settled_forwards > 0 for each in stats)


def test_one_leaves_with_another_but_for_what_another_thread_trains():
    """Nobody knows what that is in the middle of."""
    here, beside, elsewhere = (managed_mlp() for _ in range(3))
    with here[2], beside[2], elsewhere[2], ThreadPoolExecutor(1) as worker:
        worker.submit(settle, *elsewhere).result()
        for _ in range(8):
            step(here[0], here[1], here[3])
            step(beside[0], beside[1], beside[3])
        assert not any(is_intercepted(model) for model, *_ in (here, beside, elsewhere))
        step(here[0], here[1], here[3], rows=64)
        assert [is_intercepted(model) for model, *_ in (here, beside, elsewhere)] == [True, True, False]


def test_one_that_can_never_settle_does_not_keep_those_that_nobody_combines_with_it():
    kept, *others = managed_mlp(device_homes=False), managed_mlp(), managed_mlp()
    with kept[2], others[0][2], others[1][2]:
        for _ in range(14):
            for model, optimizer, _, target in (kept, *others):
                step(model, optimizer, target)
        assert [is_intercepted(model) for model, *_ in (kept, *others)] == [True, False, False]


def test_what_is_copied_from_one_that_cannot_settle_sends_others_home_once():
    kept, other = managed_mlp(device_homes=False), managed_mlp()
    intercepted = []
    with kept[2], other[2]:
        for _ in range(24):
            for model, optimizer, _, target in (kept, other):
                step(model, optimizer, target)
            intercepted.append(is_intercepted(other[0]))
            copies = [p.detach().cpu() for p in kept[0].parameters()] if len(intercepted) > 10 else []
            del copies
    assert not intercepted[10]
    assert all(intercepted[12:])
