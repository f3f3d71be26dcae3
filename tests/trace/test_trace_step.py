"""What `trace_step` says of training steps, real and fake."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch._higher_order_ops.while_loop import while_loop
from torch.utils.checkpoint import checkpoint

from hetero.errors import ConfigError, PlanError
from hetero.trace import StepTrace, trace_recipe, trace_step


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Linear(16, 32)
        self.norm = nn.BatchNorm1d(32)
        self.back = nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.back(torch.relu(self.norm(self.front(x))))
        return out


def make(optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW) -> tuple[Any, ...]:
    torch.manual_seed(0)
    model = Net()
    return model, optimizer(model.parameters(), lr=1e-3), torch.randn(8, 16), torch.randint(0, 4, (8,))


def step(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor
) -> torch.Tensor:
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


def of_kind(trace: StepTrace, kind: str) -> list[Any]:
    return [storage for storage in trace.storages if storage.kind == kind]


def test_a_fake_trace_equals_the_real_one() -> None:
    things = make()
    real = trace_step(step, *things)
    fake = trace_step(step, *things, fake=True)
    assert fake.operators == real.operators
    assert fake.storages == real.storages
    assert (real.source, fake.source) == ("real", "fake")


def test_a_fake_trace_changes_nothing() -> None:
    model, optimizer, x, y = make()
    step(model, optimizer, x, y)
    parameters = dict(model.named_parameters())
    values = {name: p.detach().clone() for name, p in parameters.items()}
    grads = {name: p.grad for name, p in parameters.items()}
    state = optimizer.state_dict()
    trace_step(step, model, optimizer, x, y, fake=True)
    assert dict(model.named_parameters()).keys() == parameters.keys()
    for name, p in model.named_parameters():
        assert p is parameters[name]
        assert p.grad is grads[name]
        assert torch.equal(p, values[name])
    for now, before in zip(optimizer.state_dict()["state"].values(), state["state"].values(), strict=True):
        assert all(now[key] is before[key] for key in before)


def test_a_fake_trace_that_fails_changes_nothing_either() -> None:
    model, optimizer, x, y = make()
    parameters = list(model.parameters())

    def broken(*things: Any) -> None:
        step(*things)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        trace_step(broken, model, optimizer, x, y, fake=True)
    assert all(now is before for now, before in zip(model.parameters(), parameters, strict=True))
    assert not optimizer.state
    assert all(p.grad is None for p in parameters)


def test_a_model_on_the_meta_device_is_traced_without_memory() -> None:
    with torch.device("meta"):
        things = make()
    assert trace_step(step, *things, fake=True).storages == trace_step(step, *make()).storages


def test_persistent_tensors_live_over_the_whole_step() -> None:
    trace = trace_step(step, *make())
    assert {s.name for s in of_kind(trace, "parameter")} == {name for name, _ in Net().named_parameters()}
    assert len(of_kind(trace, "state")) == 3 * 6  # step, exp_avg, exp_avg_sq of six parameters
    for kind in ("parameter", "buffer", "state"):
        assert all((s.begin, s.end) == (0, trace.span) for s in of_kind(trace, kind))


def test_gradients_die_at_zero_grad_and_are_born_in_backward() -> None:
    trace = trace_step(step, *make())
    gradients = [s for s in of_kind(trace, "gradient") if s.begin]
    assert {s.name for s in gradients} == {f"{name}.grad" for name, _ in Net().named_parameters()}
    assert all(trace.operators[s.begin].phase == "backward" and s.end == trace.span for s in gradients)


def test_the_first_step_makes_the_optimizer_states() -> None:
    trace = trace_step(step, *make(), warmup=0)
    assert all(trace.operators[s.begin].phase == "step" for s in of_kind(trace, "state"))


def test_phases_come_in_order_and_backward_knows_its_modules() -> None:
    trace = trace_step(step, *make())
    phases = [operator.phase for operator in trace.operators]
    assert phases == sorted(phases, key=["forward", "backward", "step"].index)
    assert list(trace.phase_peaks()) == ["forward", "backward", "step"]
    modules = {o.module for o in trace.operators if o.phase == "backward" and "mm" in o.name}
    assert modules == {"front", "back"}
    assert {o.module for o in trace.operators if o.phase == "step"} == {"AdamW"}


def test_micro_batches_return_to_forward() -> None:
    def accumulate(
        model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor
    ) -> None:
        for _ in range(2):
            nn.functional.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    phases = [o.phase for o in trace_step(accumulate, *make()).operators]
    runs = [phase for i, phase in enumerate(phases) if i == 0 or phases[i - 1] != phase]
    assert runs == ["forward", "backward", "forward", "backward", "step"]


def test_recomputation_under_checkpointing_is_backward_of_its_module() -> None:
    def step_with_checkpoint(model: Net, x: torch.Tensor) -> None:
        inner = nn.Sequential(model.front, nn.ReLU(), model.back)
        checkpoint(inner, x, use_reentrant=False).sum().backward()

    trace = trace_step(step_with_checkpoint, Net(), torch.randn(8, 16))
    recomputed = [o for o in trace.operators if o.phase == "backward" and o.name == "aten.addmm"]
    assert [o.module for o in recomputed] == ["front"]


def test_checkpointing_lowers_the_peak() -> None:
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)) for _ in range(6))

    def run(keep: bool, x: torch.Tensor) -> None:
        for block in blocks:
            x = block(x) if keep else checkpoint(block, x, use_reentrant=False)
        x.sum().backward()
        for p in blocks.parameters():
            p.grad = None

    x = torch.randn(1024, 64)
    kept, recomputed = (trace_step(run, keep, x, fake=True).peak_nbytes() for keep in (True, False))
    assert recomputed < kept


def test_tied_weights_are_one_storage() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(50, 8)
            self.head = nn.Linear(8, 50, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.head(self.embed(ids))
            return out

    def tied_step(model: nn.Module, ids: torch.Tensor) -> None:
        model(ids).sum().backward()

    for fake in (False, True):
        trace = trace_step(tied_step, Tied(), torch.arange(5), fake=fake)
        assert [s.nbytes for s in of_kind(trace, "parameter")] == [50 * 8 * 4]


def test_what_the_step_closes_over_is_found() -> None:
    model, optimizer, x, y = make()
    closed = trace_step(lambda: step(model, optimizer, x, y), fake=True)
    assert closed.operators == trace_step(step, model, optimizer, x, y, fake=True).operators
    assert trace_step(partial(step, model, optimizer, x, y), fake=True).operators == closed.operators


def test_a_name_that_is_not_bound_yet_is_no_obstacle() -> None:
    things = make()

    def run() -> None:
        step(*things)
        if things is None:
            later()

    trace = trace_step(run, fake=True)
    assert trace.operators == trace_step(step, *things, fake=True).operators

    def later() -> None:
        raise AssertionError


def test_a_model_that_cannot_be_found_is_asked_for() -> None:
    hidden = {"get": lambda: make()[0]}
    model = make()[0]
    hidden = type("Hidden", (), {"get": staticmethod(lambda: model)})

    with pytest.raises(PlanError, match=r"real parameter of shape .* pass its model"):
        trace_step(lambda x: hidden.get()(x).sum().backward(), torch.randn(8, 16), fake=True)
    assert all(p.grad is None for p in model.parameters())


def test_a_branch_on_data_is_refused_under_fake_tensors_and_traced_on_real_ones() -> None:
    def branching(*things: Any) -> None:
        if step(*things) > 1e6:
            raise AssertionError("the loss is not that large")

    with pytest.raises(PlanError, match=r"_local_scalar_dense.*fake=False"):
        trace_step(branching, *make(), fake=True)
    assert trace_step(branching, *make()).span > 0


@pytest.mark.parametrize("name", ["nonzero", "unique"])
def test_shapes_that_depend_on_data_are_refused_by_operator_name(name: str) -> None:
    def dynamic(x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = getattr(torch, name)(x)
        return out

    with pytest.raises(PlanError, match=rf"aten\..*{name}.*fake=False"):
        trace_step(dynamic, torch.ones(4), fake=True)
    assert trace_step(dynamic, torch.ones(4)).span > 0


def test_a_loss_may_be_logged_but_not_formatted_under_fake_tensors() -> None:
    losses = []
    trace_step(lambda *things: losses.append(step(*things).item()), *make(), fake=True)
    assert len(losses) == 2
    with pytest.raises(PlanError, match=r"formats a value.*item.*fake=False"):
        trace_step(lambda *things: f"{step(*things).item():.3f}", *make(), fake=True)


def test_a_gradient_scaler_finds_no_overflow_and_stays_as_it_was() -> None:
    scaler = torch.amp.GradScaler("cpu")

    def scaled(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
        scaler.scale(nn.functional.cross_entropy(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    things = make()
    fake = trace_step(scaled, *things, fake=True)
    assert scaler._scale is None
    real = trace_step(scaled, *things)
    scale = scaler.get_scale()
    assert [o.name for o in fake.operators] == [o.name for o in real.operators]
    assert fake.peak_nbytes() == real.peak_nbytes()
    trace_step(scaled, *things, fake=True)
    assert scaler.get_scale() == scale


def test_tracing_a_real_step_changes_no_number() -> None:
    def weights(traced: bool) -> list[torch.Tensor]:
        things = make()
        if traced:
            trace_step(step, *things, warmup=2)
        else:
            for _ in range(3):
                step(*things)
        return list(things[0].parameters())

    assert all(torch.equal(a, b) for a, b in zip(weights(True), weights(False), strict=True))


def test_a_predicted_accelerator_chooses_foreach_as_torch_does_there() -> None:
    things = make()
    here = trace_step(step, *things, fake=True)
    there = trace_step(step, *things, fake=True, device="cuda")
    assert here.device == "cpu"
    assert there.device == "cuda:0"
    assert not any("foreach" in o.name for o in here.operators)
    assert any("foreach" in o.name for o in there.operators)
    assert [group["foreach"] for group in things[1].param_groups] == [None]
    assert there.devices == ("cpu", "cuda:0")  # the optimizer's step counters stay on the CPU


def test_a_choice_of_the_user_is_kept() -> None:
    model, _, x, y = make()
    looping = torch.optim.AdamW(model.parameters(), foreach=False)
    trace = trace_step(step, model, looping, x, y, fake=True, device="cuda")
    assert not any("foreach" in o.name for o in trace.operators)


def test_recipes_are_built_without_memory_and_checked() -> None:
    trace = trace_recipe(lambda: (step, *make()))
    assert trace.storages == trace_step(step, *make()).storages
    with pytest.raises(ConfigError, match="returns a tuple"):
        trace_recipe(lambda: None)  # type: ignore[arg-type,return-value]


def test_a_recipe_may_convert_its_model() -> None:
    def recipe() -> tuple[Any, ...]:
        model = Net().to("cpu").to(torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters())
        return step, model, optimizer, torch.randn(8, 16).bfloat16(), torch.zeros(8, dtype=torch.long)

    swap = torch.utils.swap_tensors
    fake, real = trace_recipe(recipe), trace_recipe(recipe, fake=False)
    assert fake.operators == real.operators
    assert fake.storages == real.storages
    assert torch.utils.swap_tensors is swap


def test_a_step_may_build_its_own_model() -> None:
    def build_and_step() -> None:
        step(*make(torch.optim.SGD))

    fake = trace_step(build_and_step, fake=True)
    assert fake.load_curve().tolist() == trace_step(build_and_step).load_curve().tolist()
    there = trace_step(lambda: step(*make()), fake=True, device="cuda")
    assert any("foreach" in o.name for o in there.operators)


def test_arguments_that_cannot_be_used_are_refused() -> None:
    with pytest.raises(ConfigError, match="warmup=-1"):
        trace_step(step, *make(), warmup=-1)
    with pytest.raises(ConfigError, match="meta"):
        trace_step(step, *make(), fake=True, device="meta")
    with pytest.raises(PlanError, match="no operator"):
        trace_step(lambda: None)


def test_no_hook_outlives_a_trace() -> None:
    from torch.nn.modules import module
    from torch.optim import optimizer

    def hooks() -> list[int]:
        held = (
            module._global_forward_pre_hooks,
            module._global_forward_hooks,
            module._global_forward_hooks_always_called,
            optimizer._global_optimizer_pre_hooks,
            optimizer._global_optimizer_post_hooks,
        )
        return [len(h) for h in held]

    before = hooks()
    trace_step(step, *make())
    with pytest.raises(PlanError):
        trace_step(lambda: None)
    assert hooks() == before


def test_the_table_names_the_biggest_at_the_peak() -> None:
    trace = trace_step(step, *make())
    text = trace.table(limit=3)
    peak = trace.live_at(trace.peak_at())
    assert sum(s.nbytes for s in peak) == trace.peak_nbytes()
    assert f"at operator {trace.peak_at()} of {trace.span}" in text
    assert peak[0].name in text
    assert f"{len(peak) - 3} more" in text


def test_the_problem_has_the_load_of_the_trace() -> None:
    trace = trace_step(step, *make())
    problem = trace.to_problem(granularity=512)
    load = sum(
        ((problem.begins <= i) & (i < problem.ends)) @ problem.sizes == trace.load_curve(granularity=512)[i]
        for i in range(trace.span)
    )
    assert load == trace.span
    assert all(size % 512 == 0 for size in problem.sizes)


@pytest.mark.parametrize("fake", [False, True])
def test_a_step_with_a_higher_order_operator_is_refused(fake: bool) -> None:
    class Looping(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            start = torch.zeros((), dtype=torch.long)
            looped = while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x.tanh()), (start, x.detach()))
            return super().forward(looped[1])

    model = Looping()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with pytest.raises(PlanError, match="runs while_loop, whose own functions"):
        trace_step(step, model, optimizer, torch.randn(8, 16), torch.randint(0, 4, (8,)), fake=fake)
