"""Buffers in sparse layouts: an adjacency that messages are passed along."""

import pytest
import torch
from loops import losses
from settling import PLENTY
from torch import nn
from twins import assert_same, managed, unmanaged


class _Passes(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(64, 128), nn.Linear(128, 64)
        self.register_buffer("adjacency", (torch.eye(8) + torch.eye(8).roll(1, 0)).to_sparse())

    def forward(self, x):
        return torch.sparse.mm(
            self.adjacency, self.last(torch.sparse.mm(self.adjacency, self.first(x)).relu())
        )


@pytest.mark.parametrize("budget", [150 << 10, PLENTY])
def test_a_model_with_a_sparse_buffer(budget):
    made = []

    def build():
        made.append(_Passes())
        return made[-1]

    def loop(model, optimizer, target):
        return losses(model, optimizer, target, 8), list(model.parameters())

    seen, _, manager = managed(build, loop, budget)
    assert_same(seen, unmanaged(build, loop)[0], "observed")
    assert (manager.stats.settled_forwards > 0) == (budget == PLENTY)
    adjacency = made[0].adjacency
    assert adjacency.layout is torch.sparse_coo
    assert adjacency.is_cpu
    assert torch.equal(adjacency.to_dense(), torch.eye(8) + torch.eye(8).roll(1, 0))
