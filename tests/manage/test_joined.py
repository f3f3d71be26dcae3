"""Models that were trained one after the other, each of which fits alone, and then by one backward, where they may not:
what an iteration takes was measured while nothing of the other's was under way."""

import functools

import pytest
import torch
from accelerators import GAPS, device
from equality import fresh_memory, peak_memory
from loops import batch, mlp
from several import sgd, twins

ALONE, TOGETHER = 10, 12


def without_states(model):
    return torch.optim.SGD(model.parameters(), lr=1e-2, foreach=False)


def fused(model):
    return torch.optim.SGD(model.parameters(), lr=1e-2, fused=True)


class Joined:
    """``order``: of the forwards in what is shared. ``every``: so many of those, one of the first model alone.
    ``resets``: the device's peak counter before each iteration, as a loop may that logs it. ``peaks``: of the
    iterations of the last run."""

    def __init__(self, order, *, optimizer, rows, depths=(4, 4), every=None, resets=True):
        self.order, self.every, self.resets = order, every, resets
        self.optimizer, self.rows, self.depths = optimizer, rows, depths
        self.peaks = []

    def build(self):
        models = [mlp(depth=depth) for depth in self.depths]
        return models, [self.optimizer(model) for model in models]

    def loop(self, models, optimizers, target):
        self.peaks, seen = [], []
        fresh_memory()

        def iteration(numbers):
            if self.resets:
                fresh_memory()
            loss = sum(models[number](batch(target, self.rows)).square().mean() for number in numbers)
            loss.backward()
            for number in numbers:
                optimizers[number].step()
                optimizers[number].zero_grad()
            seen.append(loss.detach())
            self.peaks.append(peak_memory())

        for number in range(len(models)):
            for _ in range(ALONE):
                iteration([number])
        for number in range(1, TOGETHER + 1):
            iteration(self.order)
            if self.every and number % self.every == 0:
                iteration([0])
        return seen

    @functools.cached_property
    def unmanaged_peak(self):
        """With all models on the device."""
        target = device()
        torch.manual_seed(0)
        models, optimizers = self.build()
        before = fresh_memory()
        for model in models:
            model.to(target)
        self.loop(models, optimizers, target)
        return max(self.peaks) - before


LOOPS = {
    "parameters": {"order": [0, 1], "optimizer": without_states, "rows": 8},
    "parameters, second first": {"order": [1, 0], "optimizer": without_states, "rows": 8},
    "fused": {"order": [0, 1], "optimizer": fused, "rows": 8},
    "states": {"order": [0, 1], "optimizer": sgd, "rows": 8},
    "activations": {"order": [0, 1], "optimizer": sgd, "rows": 256},
    "a larger one": {"order": [0, 1], "optimizer": without_states, "rows": 8, "depths": (3, 6)},
    "a smaller one": {"order": [0, 1], "optimizer": without_states, "rows": 8, "depths": (6, 3)},
    "three": {"order": [0, 1, 2], "optimizer": without_states, "rows": 8, "depths": (3, 3, 3)},
    "called twice": {"order": [0, 1, 0, 1], "optimizer": without_states, "rows": 8},
    "alone in between": {"order": [0, 1], "optimizer": without_states, "rows": 8, "every": 2},
    "no resets": {"order": [0, 1], "optimizer": without_states, "rows": 8, "resets": False},
}


@pytest.mark.parametrize("share", [0.75, 0.85, 0.95])
@pytest.mark.parametrize("name", LOOPS)
def test_what_one_backward_goes_through_keeps_the_budget_from_the_first(name, share):
    """And in the end. In between each is planned anew beside what the other did before, which is noticed if it
    passes the budget (docs/limits.md)."""
    joined = Joined(**LOOPS[name])
    budget = int(share * joined.unmanaged_peak)
    before = fresh_memory()
    twins(joined.loop, joined.build, budget)
    shared = joined.peaks[ALONE * len(joined.depths) :]
    assert max(shared[:3] + shared[-3:]) <= before + budget + GAPS


@pytest.mark.parametrize("name", ["parameters", "activations"])
def test_they_settle_again_where_all_of_it_fits(name):
    joined = Joined(**LOOPS[name])
    stats = twins(joined.loop, joined.build, int(1.1 * joined.unmanaged_peak))
    assert all(each.settled_forwards > ALONE // 2 for each in stats)
    assert all(each.bytes_moved == 0 for each in stats)
