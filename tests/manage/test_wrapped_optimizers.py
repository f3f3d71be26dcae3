"""What is around the managed optimizer's step: Lookahead and the like, schedulers, a method that somebody has kept."""

import contextlib
import inspect

import pytest
import torch
from accelerators import ON_CUDA, STEPS_AT_HOME
from loops import batch, losses, mlp
from twins import adamw, assert_same, assert_twins, device, managed, unmanaged

import hetero


class Lookahead(torch.optim.Optimizer):
    """After every third step of ``inner``, half of the way back."""

    def __init__(self, inner):
        super().__init__(inner.param_groups, {})
        self.inner, self.slow, self.steps = inner, {}, 0

    @torch.no_grad()
    def step(self, closure=None):
        loss = self.inner.step(closure)
        self.steps += 1
        if self.steps % 3 == 0:
            for parameter in (p for group in self.param_groups for p in group["params"]):
                slow = self.slow.setdefault(parameter, torch.zeros_like(parameter))
                slow.add_(parameter - slow, alpha=0.5)
                parameter.copy_(slow)
        return loss


class Unmade(Lookahead):
    """As that of timm, without the base class's ``__init__``."""

    def __init__(self, inner):
        self.inner, self.param_groups, self.state, self.defaults = inner, inner.param_groups, {}, {}
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = {}, {}
        self.slow, self.steps = {}, 0


@pytest.mark.parametrize("share", [0.5, 0.8, 1.2])
@pytest.mark.parametrize("kind", [Lookahead, Unmade])
def test_what_its_step_steps_within_another_is_written_once(kind, share):
    def loop(model, optimizer, target):
        wrapper, seen = kind(optimizer), []
        for _ in range(13):
            loss = model(batch(target)).square().mean()
            loss.backward()
            wrapper.step()
            wrapper.zero_grad()
            seen.append(loss)
        return [*seen, *model.state_dict().values()]

    assert_twins(mlp, loop, share=share)


def test_a_wrapper_that_is_not_told_of_loading_is_refused():
    model = mlp(depth=1)
    with pytest.raises(hetero.ManageError, match="pass that one"):
        hetero.manage(model, Unmade(adamw(model)), device=device(), device_budget="1MiB")


@pytest.mark.skipif(ON_CUDA, reason=STEPS_AT_HOME)
@pytest.mark.parametrize("share", [0.6, 8.0])
def test_iterations_end_with_a_step_that_was_kept_before_manage(share):
    """It is torch's own, so its kernels are, and the plan says so."""

    def make_optimizer(model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        optimizer.kept = optimizer.step
        return optimizer

    def loop(model, optimizer, target):
        seen = []
        for number in range(12):
            loss = model(batch(target)).square().mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
            if number == 6:
                with pytest.raises(TypeError):
                    optimizer.kept(nonsense=1)
            optimizer.kept()
            optimizer.zero_grad()
            seen.append(loss)
        return seen

    manager = assert_twins(mlp, loop, share=share, make_optimizer=make_optimizer)
    plan, stats = manager.plan, manager.stats
    assert plan.kept_step
    assert "kept before hetero.manage" in str(plan)
    assert not plan.lives_on_device
    assert stats.unplanned_fetches == 0
    assert 0 < stats.lower_bound_bytes <= stats.bytes_moved <= 1.05 * stats.lower_bound_bytes


def schedules(optimizer):
    lrs = torch.optim.lr_scheduler
    return {
        "lambda": lambda: lrs.LambdaLR(optimizer, lambda n: 1 / (1 + n)),
        "one cycle": lambda: lrs.OneCycleLR(optimizer, max_lr=1e-2, total_steps=100),
        "one after another": lambda: lrs.SequentialLR(
            optimizer, [lrs.LinearLR(optimizer), lrs.ExponentialLR(optimizer, 0.9)], [3]
        ),
    }


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # two of them around one step
@pytest.mark.skipif(ON_CUDA, reason=STEPS_AT_HOME)
@pytest.mark.parametrize("kind", ["lambda", "one cycle", "one after another"])
@pytest.mark.parametrize("share", [0.6, 8.0])
def test_schedulers_from_before_manage_step_and_settle(share, kind):
    """They have wrapped ``optimizer.step`` by then."""

    def make(fused):
        def make_optimizer(model):
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
            optimizer.scheduler = schedules(optimizer)[kind]()
            return optimizer

        return make_optimizer

    def loop(model, optimizer, target):
        seen = []
        for _ in range(12):
            loss = model(batch(target)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.scheduler.step()
            optimizer.zero_grad()
            seen += [loss, optimizer.scheduler.get_last_lr()]
        return seen

    expected, parameters, peak = unmanaged(mlp, loop, make(True))
    got, state, manager = managed(mlp, loop, int(share * peak), make(None))
    assert_same(got, expected, "losses")
    assert_same(state, parameters, "parameters")
    assert (manager.stats.settled_forwards > 0) is (share > 1)
    assert not manager.plan.kept_step


@pytest.mark.parametrize("share", [0.6, 1.5])
def test_where_another_optimizer_steps_there_is_a_plan_in_the_end(share):
    """Nothing else tells where an iteration ends."""

    def loop(model, optimizer, target):
        other, seen = torch.optim.SGD(model.parameters(), lr=1e-2, foreach=False), []
        for _ in range(140):
            loss = model(batch(target)).square().mean()
            loss.backward()
            other.step()
            other.zero_grad()
            seen.append(loss.detach())
        return seen

    manager = assert_twins(mlp, loop, share=share)
    assert manager.plan is not None
    assert manager.stats.lower_bound_bytes is not None


def test_many_micro_batches_for_a_step_are_one_iteration():
    """As many as there are before it is taken for granted that no step will come."""
    manager = assert_twins(
        lambda: mlp(depth=1), lambda m, o, t: losses(m, o, t, 4, micro_batches=140), share=0.8
    )
    kinds = [len(plan.keys) for plan in manager._stm.plans]
    assert 2 * 140 + 1 in kinds


def test_a_step_that_is_replaced_again_and_again_takes_what_it_took():
    """As `GradScaler` asks, of an optimizer with parameters of two managed models."""
    target = device()
    torch.manual_seed(0)
    models = [mlp(depth=1), mlp(depth=1)]
    optimizer = torch.optim.SGD([p for model in models for p in model.parameters()], lr=1e-2)
    own = inspect.signature(optimizer.step)
    with contextlib.ExitStack() as managers:
        for model in models:
            managers.enter_context(hetero.manage(model, optimizer, device=target, device_budget="64MiB"))
            assert inspect.signature(optimizer.step) == own
        scaler = torch.amp.GradScaler(target.type)
        for _ in range(6):
            scaler.scale(models[1](models[0](batch(target))).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            assert inspect.signature(optimizer.step) == own
    assert inspect.signature(optimizer.step) == own
