"""Forecasts: the plan of a step that nobody has run, from its trace and a modelled machine."""

import dataclasses

import pytest
import small_transformers
import torch
from torch import nn

from hetero.errors import BudgetError, PlanError
from hetero.eviction import check, lower_bound
from hetero.eviction import plan_iteration as plan_iteration_of_eviction
from hetero.forecast import MACHINES, Host, forecast
from hetero.simulate import Link, Machine
from hetero.trace import StepTrace, trace_recipe

KIB, MIB = 1 << 10, 1 << 20
LINK = Link.of_bandwidth(1e9, latency=1e-5)
MACHINE = Machine(name="a modelled one", flops=5e10, memory_bandwidth=2e10, h2d=LINK, d2h=LINK)
PLENTY = Host(memory_bytes=1 << 40, bandwidth=5e9)
LAYERS, WIDTH = 8, 256


def chain():
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())])
    return model, torch.randn(64, WIDTH), lambda outputs: outputs.square().mean()


def transformer():
    model = small_transformers.gpt2(width=64, layers=3, heads=2, vocabulary=128, length=32)
    return model, torch.zeros(2, 32, dtype=torch.long), lambda outputs: outputs.logits.mean()


def traced(make, drop="first") -> StepTrace:
    def recipe():
        model, inputs, loss = make()

        def step(model, optimizer, inputs):
            if drop == "first":
                optimizer.zero_grad()
            loss(model(inputs)).backward()
            optimizer.step()
            if drop == "last":
                optimizer.zero_grad()
            if drop == "never":
                optimizer.zero_grad(set_to_none=False)

        return step, model, torch.optim.AdamW(model.parameters(), fused=True), inputs

    return trace_recipe(recipe)


@pytest.fixture(scope="module")
def of_chain() -> StepTrace:
    return traced(chain)


@pytest.fixture(scope="module")
def of_transformer() -> StepTrace:
    return traced(transformer)


@pytest.fixture
def checked(monkeypatch):
    """Every plan that is made is checked by the naive checker, which knows no planner; and how many there were."""
    made = []

    def plan_iteration(trace, **given):
        schedule = plan_iteration_of_eviction(trace, **given)
        check(trace, schedule)
        assert all(moment.capacity >= 0 for moment in trace.moments)
        assert schedule.moved_bytes >= lower_bound(trace)
        made.append(trace)
        return schedule

    monkeypatch.setattr("hetero.forecast.planned.plan_iteration", plan_iteration)
    return made


def test_model_data_are_counted_by_what_they_are(of_chain):
    found = forecast(of_chain, MACHINE, device_budget=3 * MIB, host=PLENTY)
    parameters = LAYERS * (WIDTH + 1) * WIDTH * 4
    steps = 2 * LAYERS * 4  # AdamW counts for each parameter
    assert found.model_bytes == 4 * parameters + steps
    assert found.parameters == 2 * LAYERS
    assert found.unmanaged_bytes == of_chain.peak_nbytes()
    assert found.host_bytes >= found.model_bytes


def test_gradients_are_known_wherever_the_loop_drops_them(of_chain):
    budget = of_chain.peak_nbytes() // 2
    first = forecast(of_chain, MACHINE, device_budget=budget, host=PLENTY, device_homes=False)
    for drop in ("last", "never"):
        other = forecast(traced(chain, drop), MACHINE, device_budget=budget, host=PLENTY, device_homes=False)
        assert other.model_bytes == first.model_bytes
        # What is added to in place is made by another operator, and may go down a little later.
        assert other.moved_bytes == pytest.approx(first.moved_bytes, rel=0.1)


def test_everything_fits_from_the_unmanaged_peak_on(of_chain):
    peak = of_chain.peak_nbytes()
    fits = forecast(of_chain, MACHINE, device_budget=peak, host=Host(memory_bytes=0, bandwidth=1e9))
    assert fits.everything_fits
    assert (fits.moved_bytes, fits.host_bytes, fits.on_device) == (0, 0, fits.parameters)
    assert fits.step_seconds == fits.unmanaged_seconds > 0
    less = forecast(of_chain, MACHINE, device_budget=peak - 1, host=PLENTY)
    assert not less.everything_fits
    assert less.unmanaged_seconds == fits.unmanaged_seconds


@pytest.mark.parametrize(
    ("name", "shares"), [("of_chain", (0.9, 0.6, 0.4, 0.3)), ("of_transformer", (0.8, 0.4))]
)
def test_every_plan_keeps_its_budget_by_the_naive_checker(name, shares, request, checked):
    trace = request.getfixturevalue(name)
    for share in shares:
        budget = int(share * trace.peak_nbytes())
        found = forecast(trace, MACHINE, device_budget=budget, host=PLENTY)
        assert found.least_budget <= budget
        assert found.moved_bytes >= found.least_bytes > 0
        assert found.step_seconds >= max(found.up_seconds, found.down_seconds)
    assert len(checked) > 2 * len(shares)


def test_the_least_budget_is_enough_and_one_byte_less_is_refused_with_it(of_transformer, checked):
    least = forecast(of_transformer, MACHINE, device_budget=4 * MIB, host=PLENTY).least_budget
    assert forecast(of_transformer, MACHINE, device_budget=least, host=PLENTY).least_budget == least
    with pytest.raises(BudgetError, match=rf"\({least} bytes\) of the device.*raise it to that"):
        forecast(of_transformer, MACHINE, device_budget=least - 1, host=PLENTY)
    assert checked


def test_a_host_that_is_too_small_is_refused_with_what_it_takes(of_chain):
    budget = of_chain.peak_nbytes() // 2
    needed = forecast(of_chain, MACHINE, device_budget=budget, host=PLENTY)
    with pytest.raises(BudgetError, match=r"of the host, which has 1\.0 MiB") as refused:
        forecast(of_chain, MACHINE, device_budget=budget, host=dataclasses.replace(PLENTY, memory_bytes=MIB))
    least = int(str(refused.value).split("(")[1].split(" bytes")[0])
    enough = dataclasses.replace(PLENTY, memory_bytes=least)
    assert forecast(of_chain, MACHINE, device_budget=budget, host=enough).host_bytes <= least
    assert least <= needed.host_bytes


def test_updates_begin_in_backward_where_the_host_is_slow_and_has_room_for_it(of_chain):
    budget = of_chain.peak_nbytes() // 3
    slow = Host(memory_bytes=1 << 40, bandwidth=2e9)
    early = forecast(of_chain, MACHINE, device_budget=budget, host=slow)
    assert early.begins_early
    tight = dataclasses.replace(slow, memory_bytes=early.model_bytes + 2 * MIB)
    late = forecast(of_chain, MACHINE, device_budget=budget, host=tight)
    assert not late.begins_early
    assert late.host_bytes <= tight.memory_bytes
    assert late.step_seconds > early.step_seconds


def test_a_faster_link_is_never_slower(of_chain):
    budget = of_chain.peak_nbytes() // 3
    seconds = []
    for rate in (1e8, 1e9, 1e10):
        link = Link.of_bandwidth(rate, latency=1e-5)
        machine = dataclasses.replace(MACHINE, h2d=link, d2h=link)
        seconds.append(forecast(of_chain, machine, device_budget=budget, host=PLENTY).step_seconds)
    assert seconds[0] > 1.5 * seconds[1]
    assert seconds[1] >= 0.99 * seconds[2]  # both near what the operators take: plans come of a search


def test_a_trace_without_parameters_or_backward_is_refused(of_chain):
    forward = dataclasses.replace(
        of_chain,
        operators=tuple(dataclasses.replace(operator, phase="forward") for operator in of_chain.operators),
    )
    with pytest.raises(PlanError, match="no backward"):
        forecast(forward, MACHINE, device_budget=MIB, host=PLENTY)
    anonymous = dataclasses.replace(
        of_chain,
        storages=tuple(
            dataclasses.replace(s, kind="input") if s.kind == "parameter" else s for s in of_chain.storages
        ),
    )
    with pytest.raises(PlanError, match="no parameters"):
        forecast(anonymous, MACHINE, device_budget=MIB, host=PLENTY)
    with pytest.raises(PlanError, match="bandwidth must be positive"):
        Host(memory_bytes=1, bandwidth=0.0)


def test_every_machine_by_name_is_one():
    for known in MACHINES.values():
        assert known.memory_bytes >= 16 << 30
        assert known.machine.h2d.seconds(1 << 30) < 0.1
        assert known.machine.operator_seconds(10**12, 0) < 0.05


def partly_used():
    """The larger layer is never called, and stays at home."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(WIDTH, WIDTH))
    first = model[0]
    model.forward = lambda x: first(x)
    return model, torch.randn(8, 64), lambda outputs: outputs.square().mean()


def test_a_link_that_carries_nothing_takes_no_time():
    trace = traced(partly_used)
    found = forecast(trace, MACHINE, device_budget=trace.peak_nbytes() // 2, host=PLENTY)
    assert not found.everything_fits
    assert found.moved_bytes == 0
    assert found.up_seconds == found.down_seconds == 0
