"""The step simulator: servers, dependencies, memory, stalls by cause; and against the simulator of eviction plans."""

import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.errors import PlanError
from hetero.eviction import Trace, plan, simulate
from hetero.simulate import (
    GTX_1080_TI,
    Link,
    Machine,
    ProgramBuilder,
    lower_schedule,
    simulate_program,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "eviction"))
from random_traces import LINKS, traces, traces_with_products


def test_a_step_of_compute_alone_takes_the_sum_of_its_tasks() -> None:
    builder = ProgramBuilder(initial=3)
    for seconds in (1.0, 0.0, 2.5):
        builder.add("compute", seconds, allocates=4, frees=4)
    timeline = simulate_program(builder.build(), limit=7)
    assert timeline.step_seconds == 3.5
    assert sum(timeline.stall_seconds.values()) == 0.0
    assert timeline.peak_bytes == 7
    assert timeline.starts.tolist() == [0.0, 1.0, 1.0]


def test_all_four_servers_run_side_by_side_and_waiting_is_charged_to_who_is_late() -> None:
    builder = ProgramBuilder()
    backward = builder.add("compute", 2.0)
    out = builder.add("d2h", 3.0, after=[backward])
    step = builder.add("host", 5.0, after=[out])
    back = builder.add("h2d", 1.0, after=[step])
    forward = builder.add("compute", 1.0, after=[back])
    timeline = simulate_program(builder.build())
    assert timeline.step_seconds == 2 + 3 + 5 + 1 + 1
    # The forward waits for the link; the link for the host: compute itself waits for h2d all the time.
    assert timeline.stall_seconds == {"compute": 0, "h2d": 9, "d2h": 0, "host": 0, "memory": 0}
    assert timeline.starts[forward] == 11.0
    assert timeline.bound_seconds == 5.0


def test_work_of_the_iteration_before_overlaps_this_one() -> None:
    builder = ProgramBuilder()
    step = builder.add("host", 4.0)
    operator = builder.add("compute", 3.0, after_previous=[step])
    builder.wait(step, operator)
    timeline = simulate_program(builder.build())
    assert timeline.step_seconds == 7.0
    assert timeline.stall_seconds["host"] == 4.0
    free = ProgramBuilder()
    free.add("host", 4.0)
    free.add("compute", 3.0)
    assert simulate_program(free.build()).step_seconds == 4.0, "a backlog that grows is paid in the end"


def test_an_allocation_waits_for_memory_and_the_wait_is_charged_to_it() -> None:
    builder = ProgramBuilder(initial=6)
    first = builder.add("compute", 1.0)
    builder.add("d2h", 4.0, after=[first], frees=6)
    builder.add("compute", 1.0, allocates=6)
    program = builder.build()
    timeline = simulate_program(program, limit=6, iterations=1, memory=True)
    assert timeline.step_seconds == 6.0
    assert timeline.stall_seconds["memory"] == 4.0
    assert timeline.memory_seconds.tolist() == [0.0, 1.0, 5.0, 6.0]  # freed and taken again at 5
    assert timeline.memory_bytes.tolist() == [6, 6, 6, 6]
    assert simulate_program(program, limit=12, iterations=1).step_seconds == 2.0


def test_memory_that_nobody_will_free_is_taken_above_the_limit_and_reported() -> None:
    builder = ProgramBuilder(initial=2)
    builder.add("compute", 1.0, allocates=5, frees=5)
    timeline = simulate_program(builder.build(), limit=4)
    assert (timeline.over_bytes, timeline.peak_bytes, timeline.step_seconds) == (3, 7, 1.0)


def test_tasks_that_wait_for_each_other_are_refused() -> None:
    builder = ProgramBuilder()
    one = builder.add("compute", 1.0)
    other = builder.add("h2d", 1.0, after=[one])
    builder.wait(one, other)
    with pytest.raises(PlanError, match=r"circle.*h2d"):
        simulate_program(builder.build())


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (dict(seconds=-1.0), "negative or endless"),
        (dict(seconds=1.0, frees=-1), "negative number"),
        (dict(seconds=1.0, after=[7]), "none of the 1"),
    ],
)
def test_a_program_that_makes_no_sense_is_refused(fault, says) -> None:
    builder = ProgramBuilder()
    builder.add("compute", **fault)
    with pytest.raises(PlanError, match=says):
        builder.build()


def test_a_program_without_compute_is_refused() -> None:
    builder = ProgramBuilder()
    builder.add("host", 1.0)
    with pytest.raises(PlanError, match="no step to time"):
        builder.build()
    with pytest.raises(PlanError, match="no step to time"):
        ProgramBuilder().build()


def test_the_roofline_is_the_slower_of_arithmetic_and_memory() -> None:
    machine = Machine(
        name="round numbers",
        flops=100.0,
        memory_bandwidth=10.0,
        h2d=Link(latency=1.0, seconds_per_byte=2.0),
        d2h=Link.of_bandwidth(4.0),
        launch_seconds=0.5,
    )
    assert machine.operator_seconds(1000, 20) == 0.5 + 10.0
    assert machine.operator_seconds(100, 20) == 0.5 + 2.0
    assert machine.operator_seconds(0, 0) == 0.0
    assert machine.slowed(2.0).operator_seconds(1000, 20) == 1.0 + 20.0
    assert machine.slowed(2.0).h2d == machine.h2d
    assert (machine.h2d.seconds(3), machine.d2h.seconds(8)) == (7.0, 2.0)
    # The paper: 200 MB take 15 ms out and 16 ms in.
    assert 0.0151 < GTX_1080_TI.d2h.seconds(200_000_000) < 0.0153
    assert 0.0164 < GTX_1080_TI.h2d.seconds(200_000_000) < 0.0165


def test_a_trace_without_moments_is_no_step() -> None:
    trace = Trace(sizes=(), moments=())
    with pytest.raises(PlanError, match="without moments"):
        lower_schedule(trace, plan(trace, links=LINKS), LINKS)


@pytest.mark.parametrize("policy", ["opt", "cost-opt", "lru"])
@settings(max_examples=60, deadline=None)
@given(trace=st.one_of(traces(cyclic=True), traces_with_products(cyclic=True)))
def test_it_agrees_with_the_simulator_of_eviction_plans(policy, trace) -> None:
    """Two implementations that share no code: one walks from moment to moment, the other handles events."""
    schedule = plan(trace, links=LINKS, policy=policy)
    program, limit = lower_schedule(trace, schedule, LINKS)
    expected = simulate(trace, schedule, LINKS)
    timeline = simulate_program(program, limit=limit)
    # Sums of the same times in another order.
    assert timeline.step_seconds == pytest.approx(expected.step_seconds, rel=1e-9, abs=1e-12)
    assert timeline.busy_seconds["h2d"] == pytest.approx(expected.h2d_seconds, rel=1e-9, abs=1e-12)
    assert timeline.busy_seconds["d2h"] == pytest.approx(expected.d2h_seconds, rel=1e-9, abs=1e-12)
