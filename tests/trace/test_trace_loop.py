"""Finding the iteration of a loop that does not mark its steps."""

import contextlib
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hetero.errors import ConfigError, PlanError
from hetero.trace import trace_loop, trace_step
from hetero.trace.iteration import IterationFinder

Op = tuple[int, bool, bool]  # signature, forward, updates a parameter


def make() -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
    return model, torch.optim.AdamW(model.parameters()), torch.randn(3, 6)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def feed(finder: IterationFinder, ops: Sequence[Op]) -> tuple[int, int] | None:
    for signature, forward, updates in ops:
        found = finder.feed(signature, forward=forward, updates=updates)
        if found is not None:
            return found
    return None


def signatures(ops: Sequence[Op]) -> list[int]:
    return [signature for signature, _, _ in ops]


iterations = st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=12).map(
    lambda ops: [(0, True, False), *((s, f, False) for s, f in ops), (9, False, True)]
)


@given(iterations, iterations)
def test_the_second_of_two_equal_iterations_is_found(warm_up: list[Op], iteration: list[Op]) -> None:
    stream = [*warm_up, *iteration, *iteration, (0, True, False)]
    begin, end = feed(IterationFinder(), stream) or (-1, -1)
    assert signatures(stream[begin:end]) == signatures(iteration)
    if signatures(warm_up) != signatures(iteration):
        assert end == len(stream) - 1


def test_equal_layers_are_not_an_iteration() -> None:
    layers = [(1, True, False)] * 50 + [(2, False, False)] * 50
    assert feed(IterationFinder(), layers) is None


def test_several_updates_make_one_iteration() -> None:
    critic, generator = [(1, True, False), (2, False, True)], [(3, True, False), (4, False, True)]
    stream = [*critic, *generator] * 2 + [(1, True, False)]
    assert feed(IterationFinder(), stream) == (4, 8)


def test_more_repeats_see_past_steps_that_are_alike_at_first() -> None:
    critic, generator = [(1, True, False), (2, False, True)], [(3, True, False), (4, False, True)]
    stream = [*critic, *critic, *generator] * 3 + [(1, True, False)]
    assert feed(IterationFinder(repeats=2), stream) == (2, 4)
    assert feed(IterationFinder(repeats=3), stream) == (12, 18)


@pytest.mark.parametrize("fake", [False, True])
def test_an_endless_loop_gives_the_trace_of_its_step(fake: bool) -> None:
    def endless(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
        for _ in itertools.count():
            step(model, optimizer, x)

    trace = trace_loop(endless, *make(), fake=fake)
    marked = trace_step(step, *make())
    assert trace.operators == marked.operators
    assert trace.load_curve().tolist() == marked.load_curve().tolist()


def test_gradient_accumulation_is_one_iteration() -> None:
    def accumulate(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
        for _ in range(4):
            model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def loop(*things: Any) -> None:
        while True:
            accumulate(*things)

    assert trace_loop(loop, *make()).operators == trace_step(accumulate, *make()).operators


def test_a_loop_that_survives_errors_is_left_all_the_same() -> None:
    steps = []

    def stubborn(*things: Any) -> None:
        for i in range(20):
            steps.append(i)
            with contextlib.suppress(Exception):
                step(*things)

    assert trace_loop(stubborn, *make()).span > 0
    assert len(steps) == 4  # the first makes the states, two are equal, and the fourth begins


def test_a_loop_that_ends_with_the_repetition_is_enough() -> None:
    def thrice(*things: Any) -> None:
        for _ in range(3):
            step(*things)

    assert trace_loop(thrice, *make()).operators == trace_step(step, *make()).operators


def test_a_loop_that_does_not_repeat_is_an_error() -> None:
    with pytest.raises(PlanError, match="before an iteration repeated 2 times"):
        trace_loop(step, *make())

    def growing(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
        while True:
            x = torch.cat([x, x[:1]])
            step(model, optimizer, x)

    with pytest.raises(PlanError, match="repeated within 500 operators"):
        trace_loop(growing, *make(), max_operators=500)
    with pytest.raises(ConfigError, match="repeats=1"):
        trace_loop(step, *make(), repeats=1)
