"""Forwards without gradients that come while another one waits for its backward: what a model says without its
adapters, of another view of the batch, or in an evaluation that cannot wait."""

import pytest
import torch
from loops import batch, mlp
from twins import assert_twins

STEPS = 10


def ask(times):
    """A loop that asks so many times within each iteration."""

    def loop(model, optimizer, target):
        seen = []
        for step in range(STEPS):
            x = batch(target, rows=256)
            y = model(x)
            for _ in range(times(step)):
                with torch.no_grad():
                    aim = model(x.flip(0))
                y = y - aim
            loss = y.square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.item())
        return seen

    return loop


@pytest.mark.parametrize("share", [0.4, 0.55, 0.7, 0.85])
@pytest.mark.parametrize("times", [1, 2])
def test_they_are_planned_with_the_iteration(share, times):
    manager = assert_twins(lambda: mlp(depth=3), ask(lambda step: times), share=share)
    # While the second iteration is measured, copies may come in another order than planned.
    parameters = 18
    assert manager.stats.unplanned_fetches < parameters


@pytest.mark.parametrize("share", [0.4, 0.7, 1.2])
def test_now_and_then(share):
    assert_twins(lambda: mlp(depth=3), ask(lambda step: step % 3 == 2), share=share)


@pytest.mark.parametrize("share", [0.4, 0.7, 1.2])
def test_an_evaluation_of_many_batches(share):
    """More than an iteration has."""
    assert_twins(lambda: mlp(depth=3), ask(lambda step: 12 * (step % 4 == 1)), share=share)
