"""What choosing homes and places may take, where there are many kinds of iterations."""

import gc
from types import SimpleNamespace

import pytest
import torch
from loops import backward, mlp
from twins import adamw, device

import hetero
from hetero.stm.plans import homechoice


class Clock:
    """Moves when it is told to."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now


@pytest.mark.parametrize(("pace", "expected"), [(0.0, 1), (0.5, 1), (100.0, 4)])
def test_choices_for_further_kinds_of_iterations_wait_for_their_share_of_the_time(
    monkeypatch, pace, expected
):
    clock, choices = Clock(), []
    choose = homechoice.choose_placement

    def slowly(order, costs, *args, **keywords):
        found = choose(order, costs, *args, **keywords)
        clock.now += 1.0
        choices.append((set(costs), found.home.homes))
        return found

    monkeypatch.setattr(homechoice, "time", SimpleNamespace(monotonic=clock.monotonic))
    monkeypatch.setattr(homechoice, "choose_placement", slowly)
    target = device()
    gc.collect()
    torch.manual_seed(0)
    model = mlp()
    optimizer = adamw(model)
    with hetero.manage(model, optimizer, device=target, device_budget="200KiB", speculate=False) as manager:
        for turn in range(80):
            backward(model, target, rows=8 * (1 + turn % 4))
            optimizer.step()
            optimizer.zero_grad()
            clock.now += pace
        homes = manager._stm.plans.device_homes
    assert len(choices) == expected
    # The first was free to choose; further ones could only send home what lives on the device.
    assert choices[0][0]
    for (costs, _), (_, before) in zip(choices[1:], choices, strict=False):
        assert costs <= set(before)
    assert homes == choices[-1][1]
