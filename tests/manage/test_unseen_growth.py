"""Operators without parameters that come in a forward for the first time: nothing of ours runs when they do."""

import gc

import pytest
import torch
from accelerators import GAPS
from random_graphs import Graph, Node, Step, run, twin
from torch import nn
from twins import adamw, assert_same, device

import hetero

WIDTH, ROWS = 128, 16


class Stack(nn.Module):
    """After each layer, as many functions as nothing that the caller gives tells."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))
        self.functions = 0

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            for _ in range(self.functions):
                x = torch.sin(x)
        return x


def steps(model, optimizer, target, counts):
    seen = []
    for count in counts:
        model.functions = count
        loss = model(torch.ones(ROWS, WIDTH).to(target)).square().mean()
        loss.backward()
        seen.append([loss.detach().cpu(), *[p.grad.cpu() for p in model.parameters()]])
        optimizer.step()
        optimizer.zero_grad()
    return seen


def trained(counts, budget=None):
    """What is seen of them, after twelve alike; of the managed model also how much moved in the last of these."""
    gc.collect()
    torch.manual_seed(0)
    model, target = Stack(), device()
    if budget is None:
        model.to(target)
        optimizer = adamw(model)
        return steps(model, optimizer, target, [0] * 12 + counts)[12:], None
    optimizer = adamw(model)
    base = torch.accelerator.memory_allocated()
    manager = hetero.manage(model, optimizer, device=target, device_budget=base + budget, device_homes=False)
    try:
        steps(model, optimizer, target, [0] * 12)
        torch.accelerator.reset_peak_memory_stats()
        seen = steps(model, optimizer, target, counts)
        assert torch.accelerator.max_memory_allocated() <= base + budget + GAPS
        return seen, manager.stats
    finally:
        manager.close()


def test_what_is_saved_tells_of_it_where_nothing_moves_in_a_forward():
    """Each is too small to be looked at; together they passed the budget by a quarter."""
    counts = [30, 1, 0, 8, 0]
    expected, _ = trained(counts)
    seen, stats = trained(counts, budget=860 << 10)
    assert_same(seen, expected, "seen")
    assert stats.activation_out_bytes > 0


@pytest.mark.skipif(GAPS > 0, reason="a budget below the size of a segment refuses nothing there")
def test_what_is_kept_beside_a_plan_is_seen_while_an_iteration_is_measured():
    """Its branch's result, which the model keeps, is new in the second iteration, and all of it does not fit."""
    branch = Node("branch", 0, 1)
    graph = Graph(
        (Node("linear", 0, 0), branch, Node("linear", 0, 0), Node("scale", 0, 0)), 3, frozenset({0})
    )
    target = device()
    gc.collect()
    model, optimizer = twin(graph)
    torch.accelerator.reset_peak_memory_stats()
    budget = torch.accelerator.memory_allocated() + 6880
    with hetero.manage(model, optimizer, device=target, device_budget=budget, prefetch=False):
        with pytest.raises(hetero.BudgetError, match="nothing else can leave"):
            run(model, optimizer, [Step(4, 1, False, None)] * 2, target)
        assert torch.accelerator.max_memory_allocated() <= budget + GAPS
