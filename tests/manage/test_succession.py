"""Kinds of iterations that begin alike: which comes next is guessed from the order in which they came."""

import gc

import pytest
import torch
from accelerators import device
from hypothesis import given, settings
from hypothesis import strategies as st
from loops import batch, mlp
from twins import adamw, assert_twins

import hetero
from hetero.stm.plans.succession import Succession


def guesses(kinds):
    succession, seen = Succession(), []
    for kind in kinds:
        seen.append(succession.following() == kind)
        succession.add(kind)
    return seen


@pytest.mark.parametrize("pattern", ["A", "AB", "AAB", "AAAAB", "ABAC", "AABABB"])
def test_what_repeats_is_known_after_it_has_come_twice(pattern):
    kinds = pattern * 6
    assert all(guesses(kinds)[2 * len(pattern) :])


def test_what_came_once_is_not_expected_before_as_much_has_passed_again():
    """A few micro-batches less at an epoch's end."""
    assert all(guesses("A" * 20 + "B" + "A" * 19)[22:])


@given(st.lists(st.sampled_from("ABC"), max_size=60))
@settings(deadline=None)
def test_a_guess_is_a_kind_that_has_come(kinds):
    succession = Succession()
    for place, kind in enumerate(kinds):
        guess = succession.following()
        assert guess is None or guess in kinds[:place]
        succession.add(kind)


def micro_batches(model, optimizer, target, counts):
    seen = []
    for count in counts:
        for _ in range(count):
            loss = model(batch(target)).square().mean()
            loss.backward()
            seen.append(loss)
        optimizer.step()
        optimizer.zero_grad()
    return seen


def test_as_many_micro_batches_as_there_are_at_the_end_of_an_epoch():
    for share in (0.4, 0.7):
        assert_twins(mlp, lambda *job: micro_batches(*job, (3, 3, 1) * 4), share=share)


@pytest.mark.parametrize("pattern", [(1, 2), (2, 2, 1)])
def test_kinds_that_begin_alike_are_planned_and_measured_no_longer(pattern):
    target = device()
    gc.collect()
    model = mlp()
    optimizer = adamw(model)
    nbytes = sum(p.nbytes for p in model.parameters())
    budget = torch.accelerator.memory_allocated() + int(0.9 * nbytes)
    with hetero.manage(model, optimizer, device=target, device_budget=budget, device_homes=False) as manager:
        micro_batches(model, optimizer, target, pattern * 5)
        begin, measured = manager._stm.executor.begin_segment, []

        def watched(*args, **keywords):
            begin(*args, **keywords)
            measured.append(manager._stm.collector.is_sampling)

        manager._stm.executor.begin_segment = watched
        micro_batches(model, optimizer, target, pattern * 3)
        assert measured
        assert not any(measured)


@pytest.mark.parametrize("share", [0.3, 0.33])
def test_a_backward_that_is_differentiated_again_now_and_then_is_no_ordinary_one(share):
    """It keeps what the ordinary one of the same forward, whose plan it followed, lets go."""

    def loop(model, optimizer, target):
        seen, parameters = [], list(model.parameters())
        for step in range(8):
            if step % 2:
                loss = model(batch(target, 32, 96)).square().mean()
                gradients = torch.autograd.grad(loss, parameters, create_graph=True)
                product = sum((gradient * gradient.detach()).sum() for gradient in gradients)
                seen += torch.autograd.grad(product, parameters)
            loss = model(batch(target, 32, 96)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss)
        return seen

    assert_twins(lambda: mlp(96), loop, share=share)
