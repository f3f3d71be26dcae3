"""Random models, loops, budgets, policies and failures: equal numbers, peak within budget, nothing leaked."""

import gc

import torch
from accelerators import GAPS, clear_races, races
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from random_graphs import WIDTH, graphs, loops, run, twin
from twins import assert_same, device

import hetero


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    graph=graphs(),
    loop=loops(),
    share=st.floats(0.3, 1.0),
    policy=st.sampled_from(["opt", "cost-opt", "lru", "fifo"]),
    prefetch=st.booleans(),
    pin=st.booleans(),
)
def test_any_model_in_any_loop_under_any_budget_trains_the_same(graph, loop, share, policy, prefetch, pin):
    target = device()
    gc.collect()
    clear_races()
    torch.accelerator.reset_peak_memory_stats()
    base = torch.accelerator.memory_allocated()
    model, optimizer = twin(graph, target)
    expected = run(model, optimizer, loop, target)
    expected_state = [p.detach().cpu() for p in model.parameters()]
    peak = torch.accelerator.max_memory_allocated() - base
    # Adam's two states and a gradient for whatever ever had one; parameters for all.
    stepped = 0 if optimizer is None else sum(p.nbytes for p in optimizer.state)
    activations = peak - sum(p.nbytes for p in model.parameters()) - 3 * stepped
    del model, optimizer
    gc.collect()

    model, optimizer = twin(graph)
    torch.accelerator.reset_peak_memory_stats()
    base = torch.accelerator.memory_allocated()
    # Where every step fails early nearly nothing was in use; less than one parameter is refused in any case.
    room = max(int(share * peak), max(-(-p.nbytes // 512) * 512 for p in model.parameters()))
    budget = base + room
    manager = hetero.manage(
        model,
        optimizer,
        device=target,
        device_budget=budget,
        policy=policy,
        prefetch=prefetch,
        pin_memory=pin,
    )
    try:
        _check(
            manager,
            model,
            optimizer,
            loop,
            target,
            budget,
            expected,
            expected_state,
            activations,
            room,
        )
    finally:
        manager.close()


def _result_bytes(step):
    return -(-step.rows * WIDTH * 4 // 512) * 512


def _check(manager, model, optimizer, loop, target, budget, expected, expected_state, activations, room):
    refused = False
    try:
        got = run(model, optimizer, loop, target)
    except (hetero.BudgetError, torch.OutOfMemoryError):
        # Legitimate only if what is no model data, and the operands of one block, would not fit.
        refused = True
        unit = sum(p.nbytes + 512 for p in model.groups[0].parameters())
        assert room < activations + 4 * unit, (room, activations, unit)
    event("refused" if refused else "trained")
    # Nothing of ours runs between two moments: what comes there for the first time is seen at the second, or, where
    # nothing is saved for backward, later.
    news = sum(node.kind == "branch" for node in model.graph.nodes) * max(map(_result_bytes, loop))
    assert torch.accelerator.max_memory_allocated() <= budget + GAPS + news
    ledger = manager._stm.ledger
    assert not any(tensor.users for tensor in manager._stm.tensors)
    manager.close()
    assert races() == []
    assert ledger.device_bytes == 0
    if not refused:
        assert_same(got, expected, "seen")
        assert_same([p.detach() for p in model.parameters()], expected_state, "parameters")
