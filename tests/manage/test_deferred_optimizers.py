"""Which optimizers are stepped parameter by parameter, and so later: those that say that they can be."""

import pytest
import torch
from accelerators import ON_CUDA, STEPS_AT_HOME
from lateness import host_step_of, managed_mlp
from loops import batch, mlp, two_steps
from twins import assert_same, assert_twins, at_home, device, managed, plain

import hetero

pytestmark = pytest.mark.usefixtures("late_queue")


class Lion(torch.optim.Optimizer):
    steps_parameters_independently = True  # said of this class, not of those that inherit from it

    def __init__(self, parameters, lr=1e-3, betas=(0.9, 0.99)):
        super().__init__(parameters, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                p.add_(m.lerp(p.grad, 1 - b1).sign_(), alpha=-group["lr"])
                m.lerp_(p.grad, 1 - b2)


class ClipsByTheGlobalNorm(Lion):
    @torch.no_grad()
    def step(self, closure=None):
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        torch._foreach_mul_(gradients, torch.clamp(1e3 / norm, max=1.0))
        super().step()


class CountsInTheGroup(Lion):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        super().step()


class CountsOnItself(Lion):
    count = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.count += 1
        super().step()


class Noisy(Lion):
    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(torch.randn_like(p), alpha=1e-4)


class SharesAverages(Lion):
    """Like SOAP's or Muon's variants that keep one statistic for all."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        mean = torch.stack([self.state[p]["m"].mean() for g in self.param_groups for p in g["params"]]).mean()
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(mean)


@pytest.mark.parametrize(
    ("kind", "alone"),
    [
        (Lion, True),
        (ClipsByTheGlobalNorm, False),
        (CountsInTheGroup, False),
        (CountsOnItself, False),
        (Noisy, False),
        (SharesAverages, False),
    ],
)
def test_only_a_class_that_says_so_is_stepped_parameter_by_parameter(kind, alone):
    def make(model):
        return kind(model.parameters())

    queued = []

    def loop(model, optimizer, target):
        for _ in range(5):
            two_steps(model, optimizer, target)
        if "step" in optimizer.__dict__:
            queued.append(host_step_of(optimizer).queued)
        return [p.detach() for p in model.parameters()]

    assert_twins(mlp, loop, make_optimizer=make)
    assert (queued[-1] > 0) is alone


@pytest.mark.skipif(ON_CUDA, reason="the model computes on the device, whose kernels round otherwise")
def test_lbfgs_and_closures_are_stepped_whole():
    def make(model):
        return torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def loop(model, optimizer, target):
        x = batch(target)
        seen = []
        for _ in range(3):

            def closure():
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                return loss

            seen.append(optimizer.step(closure))
        return seen

    expected = at_home(lambda: mlp(depth=2), loop, make)
    model, optimizer, manager, target = managed_mlp(make)
    with manager:
        torch.manual_seed(1)
        assert_same(plain(loop(model, optimizer, target)), expected, "loss")
        assert manager._host_step.queued == 0


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_each_call_of_a_closure_that_runs_the_model_is_an_iteration(micro_batches):
    """Else none would ever be over, and nothing planned."""
    model, optimizer, manager, target = managed_mlp(
        lambda model: torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    )
    x = batch(target)

    def closure():
        optimizer.zero_grad()
        for _ in range(micro_batches):
            loss = model(x).square().mean()
            loss.backward()
        return loss

    with manager:
        for _ in range(3):
            optimizer.step(closure)
        assert [len(plan.keys) for plan in manager._stm.plans] == [2 * micro_batches]
        assert manager.stats.bytes_moved > 0
        assert manager.stats.unplanned_fetches == 0


def test_adamw_with_a_closure_between_deferred_steps():
    def loop(model, optimizer, target):
        seen = []
        for step in range(6):
            x = batch(target)

            def closure(x=x):
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                return loss

            if step % 2:
                seen.append(optimizer.step(closure))
            else:
                seen.append(closure())
                optimizer.step()
        return seen

    assert_twins(mlp, loop)


@pytest.mark.skipif(ON_CUDA, reason=STEPS_AT_HOME)  # nor is a closure called before a step that has hooks
def test_what_a_closure_runs_is_planned_and_where_everything_fits_nothing_moves():
    def loop(model, optimizer, target):
        seen = []

        def closure():
            optimizer.zero_grad()
            loss = model(batch(target)).square().mean()
            loss.backward()
            return loss

        for _ in range(14):
            with torch.no_grad():
                seen.append(optimizer.step(closure).detach())
        return seen

    # Homes are chosen anew by what is measured, on a busy machine in the last iteration as well.
    manager = assert_twins(mlp, loop, device_homes=False)
    assert manager.stats.lower_bound_bytes > 0
    assert manager.stats.unplanned_fetches == 0
    assert_twins(mlp, loop, budget=64 << 20)
    model, optimizer, manager, target = managed_mlp(device_homes=True)
    with manager:
        loop(model, optimizer, target)
        before = manager.stats
        loop(model, optimizer, target)
        after = manager.stats
    assert after.total_fetched_bytes == before.total_fetched_bytes
    assert after.total_written_bytes == before.total_written_bytes


@pytest.mark.parametrize(
    "kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad], ids=lambda kind: kind.__name__
)
@pytest.mark.parametrize("fused", [None, True, False])
def test_a_learning_rate_on_the_device_is_there_for_a_step_at_home(kind, fused):
    def run(where):
        def make(model):
            return kind(model.parameters(), lr=torch.tensor(0.01, device=where), foreach=None, fused=fused)

        def loop(model, optimizer, target):
            seen = []
            for _ in range(3):
                seen.append(two_steps(model, optimizer, target))
                optimizer.param_groups[0]["lr"].mul_(0.5)
            assert optimizer.param_groups[0]["lr"].device.type == torch.device(where).type
            return seen

        seen, state, _ = managed(lambda: mlp(), loop, 256 << 10, make)
        return seen, state

    assert_same(plain(run(device())), plain(run("cpu")), "observed")


class Decaying(torch.optim.AdamW):
    """A step of its own, which also writes to its settings."""

    def step(self, closure=None):
        loss = super().step(closure)
        for group in self.param_groups:
            group["lr"].mul_(0.5)
            group["steps"] = group.get("steps", 0) + 1
        return loss


def test_what_states_it_will_have_is_asked_without_a_trace():
    model, steps = mlp(), []
    lr = torch.tensor(0.01)
    optimizer = Decaying(model.parameters(), lr=lr)
    optimizer.register_step_pre_hook(lambda *arguments: steps.append(arguments))
    with hetero.manage(model, optimizer, device=device(), device_budget="4MiB"):
        assert lr == torch.tensor(0.01)
    assert steps == []
    assert "steps" not in optimizer.param_groups[0]


@pytest.mark.parametrize("fused", [True, False])
def test_settings_on_the_device_are_at_home_for_a_step_of_ones_own(fused):
    def run(where):
        made = []

        def make(model):
            lr = torch.tensor(0.01, device=where)
            made.append((Decaying(model.parameters(), lr=lr, foreach=False, fused=fused), lr))
            return made[-1][0]

        def loop(model, optimizer, target):
            seen = [two_steps(model, optimizer, target) for _ in range(3)]
            (group,) = optimizer.param_groups
            assert group["lr"] is made[-1][1]
            assert group["steps"] == 6
            return [*seen, group["lr"]]

        seen, state, _ = managed(lambda: mlp(), loop, 256 << 10, make)
        return seen, state

    assert_same(plain(run(device())), plain(run("cpu")), "observed")


def test_torch_never_sees_groups_of_which_all_are_capturable_because_there_are_none(monkeypatch):
    # On a GPU it warns of them, once for each optimizer.
    seen = []

    def health_check(self):
        seen.append([group["capturable"] for group in self.param_groups])

    monkeypatch.setattr(torch.optim.Optimizer, "_accelerator_graph_capture_health_check", health_check)

    def two_groups(model):
        first, *rest = model.parameters()
        return torch.optim.AdamW([{"params": [first]}, {"params": rest, "lr": 1e-3}], foreach=False)

    model, optimizer, manager, target = managed_mlp(make_optimizer=two_groups)
    with manager:
        two_steps(model, optimizer, target)
        two_steps(model, optimizer, target)
        count = len(list(model.parameters()))
        assert host_step_of(optimizer).queued >= 3 * count
        assert [len(group["params"]) for group in optimizer.param_groups] == [1, count - 1]
    assert len(seen) >= 4
    assert not any(all(capturable) for capturable in seen)
