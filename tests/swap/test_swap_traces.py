"""From a recorded step to a plan: counted operations, uses of storages, every method by name."""

import importlib.util
import sys
from functools import partial

import pytest
import torch
from repository import load
from torch import nn

from hetero.errors import ConfigError, PlanError
from hetero.simulate import GTX_1080_TI
from hetero.swap import METHODS, least_limit, plan_swaps
from hetero.swap.selection import load_without
from hetero.trace import StepTrace, from_json, operator_seconds, swap_step, to_json, trace_recipe, trace_step

cnn = load("examples/cnn.py")

needs_optuna = pytest.mark.skipif(
    importlib.util.find_spec("optuna") is None, reason="optuna, an optional dependency, is not installed"
)


@pytest.fixture(scope="module")
def vgg11() -> StepTrace:
    return trace_recipe(partial(cnn.recipe, "vgg11"))


def test_a_linear_layer_counts_its_multiplications_and_additions() -> None:
    model = nn.Linear(8, 4, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x: torch.Tensor) -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    trace = trace_step(step, torch.zeros(16, 8), fake=True)
    product = 2 * 16 * 8 * 4
    counted = {o.phase: o.flops for o in trace.operators if o.flops}
    assert counted == {"forward": product, "backward": product}
    assert from_json(to_json(trace)) == trace
    times = operator_seconds(trace, GTX_1080_TI)
    assert len(times) == trace.span
    touched = {s.id: s.nbytes for s in trace.storages}
    first = trace.operators[0]
    memory = sum(touched[i] for i in (*first.reads, *first.writes)) / GTX_1080_TI.memory_bandwidth
    assert times[0] == max(first.flops / GTX_1080_TI.flops, memory)


def test_the_planners_step_has_the_traces_load_and_its_weights_persist(vgg11: StepTrace) -> None:
    step = swap_step(vgg11, operator_seconds(vgg11, GTX_1080_TI))
    assert step.load.tolist() == vgg11.load_curve().tolist()
    kept = {s.name for s in vgg11.storages if s.kind in ("parameter", "state") and s.nbytes}
    assert kept <= {v.name for v in step.variables if v.persistent}
    assert all(not v.persistent for v in step.variables if v.end < vgg11.span)
    with pytest.raises(PlanError, match="1 times for"):
        swap_step(vgg11, (1.0,))


@needs_optuna
@pytest.mark.filterwarnings("ignore")  # optuna's sampler is not ours to keep quiet in every version
def test_every_method_meets_the_limit_and_bo_is_no_worse_than_any_score(vgg11: StepTrace) -> None:
    step = swap_step(vgg11, operator_seconds(vgg11, GTX_1080_TI))
    limit = max(int(0.6 * step.peak_bytes), least_limit(step, method="doa"))
    plans = {m: plan_swaps(step, limit, GTX_1080_TI, method=m, trials=8) for m in METHODS}
    for name, plan in plans.items():
        assert plan.method == name
        assert load_without(step, [swap.gap for swap in plan.swaps]).max() <= limit
        assert plan.timeline.peak_bytes <= limit
        assert plan.timeline.over_bytes == 0
        waited = sum(plan.timeline.stall_seconds.values())
        # Sums of the same times in another order.
        assert plan.timeline.step_seconds >= step.total_seconds + waited - 1e-9
    assert plans["bo"].overhead <= min(plans[m].overhead for m in ("doa", "aoa", "wdoa", "swdoa"))
    assert plan_swaps(step, limit, GTX_1080_TI, method="bo", trials=8) == plans["bo"], "seeded"


def test_without_optuna_bo_says_what_to_install(vgg11: StepTrace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    step = swap_step(vgg11, operator_seconds(vgg11, GTX_1080_TI))
    with pytest.raises(ConfigError, match=r"needs optuna.*'search'"):
        plan_swaps(step, step.peak_bytes, GTX_1080_TI, method="bo")
