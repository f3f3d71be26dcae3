"""The ledger against an interpreter that knows which storages a program makes, touches and drops."""

import gc
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.trace import StepTrace
from hetero.trace.ledger import Ledger

Line = tuple[str, int, int]
lines = st.tuples(
    st.sampled_from(["make", "add", "view", "add_", "zero_", "drop"]),
    st.integers(0, 9),
    st.integers(1, 50),
)


@dataclass
class Expected:
    """What the ledger must hold: begin, end and bytes of each storage, and what operators touch."""

    lives: list[list[int | None]] = field(default_factory=list)
    touches: list[tuple[str, set[int], set[int]]] = field(default_factory=list)
    holders: list[int] = field(default_factory=list)


def run(program: list[Line], ledger: Ledger) -> Expected:
    """Runs ``program`` under ``ledger``; keeps its own books by counting who holds which storage."""
    want = Expected()
    tensors: list[tuple[torch.Tensor, int]] = []

    def new(nbytes: int) -> int:
        want.lives.append([len(want.touches), None, nbytes])
        want.holders.append(1)
        return len(want.lives) - 1

    def let_go(index: int) -> None:
        want.holders[index] -= 1
        if not want.holders[index]:
            want.lives[index][1] = len(want.touches)

    with ledger:
        for what, which, size in program:
            if what == "make" or not tensors:
                index = new(4 * size)
                want.touches.append(("aten.zeros", set(), {index}))
                tensors.append((torch.zeros(size), index))
                continue
            tensor, index = tensors[which % len(tensors)]
            if what == "add":
                made = new(4 * tensor.numel())
                want.touches.append(("aten.add", {index}, {made}))
                tensors.append((tensor + 1, made))
            elif what == "view":
                want.holders[index] += 1
                tensors.append((tensor.view(-1), index))
            elif what == "add_":
                want.touches.append(("aten.add_", {index}, {index}))
                tensor.add_(1)
            elif what == "zero_":
                want.touches.append(("aten.zero_", set(), {index}))
                tensor.zero_()
            elif what == "drop":
                del tensors[which % len(tensors)], tensor
                let_go(index)
        del tensors
        for index, holders in enumerate(want.holders):
            if holders:
                want.lives[index][1] = len(want.touches)
    return want


@settings(max_examples=200, deadline=None)
@given(st.lists(lines, max_size=40))
def test_the_ledger_agrees_with_a_naive_interpreter(program: list[Line]) -> None:
    ledger = Ledger()
    want = run(program, ledger)
    if not want.touches:
        return
    trace = ledger.cut(0, ledger.now, source="real")
    got = sorted((s.begin, s.end, s.nbytes) for s in trace.storages)
    assert got == sorted((b, e, n) for b, e, n in want.lives if b != e)
    by_id = {s.id: (s.begin, s.end, s.nbytes) for s in trace.storages}
    for operator, (name, reads, writes) in zip(trace.operators, want.touches, strict=True):
        assert operator.name == name
        assert [by_id[i] for i in operator.reads] == [tuple(want.lives[i]) for i in reads]
        assert [by_id[i] for i in operator.writes] == [tuple(want.lives[i]) for i in writes]


def window(body: "object", **names: torch.Tensor) -> StepTrace:
    ledger = Ledger()
    with ledger:
        body()  # type: ignore[operator]
    return ledger.cut(0, ledger.now, source="real")


def test_views_take_no_time_and_keep_their_storage_alive() -> None:
    def body() -> None:
        base = torch.zeros(8)
        view = base.view(2, 4).t()[1:]
        del base
        torch.zeros(1)
        view.sum()

    trace = window(body)
    assert [o.name for o in trace.operators] == ["aten.zeros", "aten.zeros", "aten.sum"]
    assert (trace.storages[0].begin, trace.storages[0].end) == (0, 3)


def test_an_output_argument_is_written_and_not_read() -> None:
    a, out = torch.ones(4), torch.empty(4)
    trace = window(lambda: torch.add(a, a, out=out))
    operator = trace.operators[0]
    assert len(operator.reads) == 1
    assert len(operator.writes) == 1
    assert operator.reads != operator.writes


def test_a_resized_storage_is_another_block_from_then_on() -> None:
    def body() -> None:
        t = torch.zeros(4)
        t.resize_(100)
        t.add_(1)

    trace = window(body)
    assert [(s.begin, s.end, s.nbytes) for s in trace.storages] == [(0, 2, 16), (1, 3, 400)]


def test_lists_of_tensors_are_looked_into() -> None:
    tensors = [torch.ones(3), torch.ones(5)]
    trace = window(lambda: torch._foreach_add_(tensors, 1.0))
    assert sorted(s.nbytes for s in trace.storages) == [12, 20]
    assert len(trace.operators[0].writes) == 2


def test_an_operator_that_raises_leaves_no_trace() -> None:
    def body() -> None:
        a = torch.ones(3)
        with pytest.raises(RuntimeError):
            a + torch.ones(4)
        a.add_(1)

    trace = window(body)
    assert [o.name for o in trace.operators] == ["aten.ones", "aten.ones", "aten.add_"]


def test_a_storage_kept_by_a_reference_cycle_lives_until_it_is_collected() -> None:
    def body() -> None:
        cycle: list[object] = [torch.zeros(2)]
        cycle.append(cycle)
        del cycle
        torch.zeros(4)
        gc.collect()
        torch.zeros(8)

    gc.disable()
    try:
        trace = window(body)
    finally:
        gc.enable()
    assert [(s.begin, s.end) for s in trace.storages if s.nbytes == 8] == [(0, 2)]
