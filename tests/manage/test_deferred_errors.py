"""An update that fails: it has written nothing, the next wait raises, and training goes on."""

import pytest
import torch
from accelerators import ON_CUDA, STEPS_AT_HOME
from lateness import managed_mlp
from loops import backward, batch, mlp, two_steps
from torch import nn
from twins import assert_twins

pytestmark = pytest.mark.usefixtures("late_queue")


class Fragile(torch.optim.Optimizer):
    """Fails for one parameter, in the middle of writing."""

    steps_parameters_independently = True

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["sum"] = torch.zeros_like(p)
                state["sum"] += p.grad
                p.add_(state["sum"], alpha=-group["lr"])
                if p.grad.isnan().any():
                    state["spoilt"] = True
                    raise ValueError("half-way")


WAITS = {
    "forward": lambda m, o, t, manager: m(batch(t)),
    "the parameter": lambda m, o, t, manager: m[2].weight.sum(),
    "another parameter": lambda m, o, t, manager: m[0].bias.sum(),
    "step": lambda m, o, t, manager: o.step(),
    "state": lambda m, o, t, manager: o.state_dict(),
    "stats": lambda m, o, t, manager: manager.stats,
    "load": lambda m, o, t, manager: o.load_state_dict({}),
}


@pytest.mark.parametrize("way", WAITS)
def test_an_error_in_the_queue_is_raised_by_the_next_wait_and_has_written_nothing(way):
    model, optimizer, manager, target = managed_mlp(lambda m: Fragile(m.parameters()))
    with manager:
        two_steps(model, optimizer, target)
        backward(model, target)
        model[2].weight.grad[0, 0] = float("nan")
        before = model[2].weight.detach().clone()
        summed = optimizer.state[model[2].weight]["sum"].clone()
        others = model[0].weight.detach().clone()
        queued = manager._host_step.queued
        optimizer.step()
        assert manager._host_step.queued == queued + len(list(model.parameters()))
        optimizer.zero_grad()
        manager._stm.updates.finish_all()
        with pytest.raises(ValueError, match="half-way"):
            WAITS[way](model, optimizer, target, manager)
        assert torch.equal(model[2].weight, before)
        assert optimizer.state[model[2].weight].keys() == {"sum"}
        assert torch.equal(optimizer.state[model[2].weight]["sum"], summed)
        assert not torch.equal(model[0].weight, others)
        two_steps(model, optimizer, target)  # it goes on
    assert not any(p.isnan().any() for p in model.parameters())


def test_an_error_that_nobody_waited_for_is_raised_by_close_which_gives_everything_back():
    model, optimizer, manager, target = managed_mlp(lambda m: Fragile(m.parameters()))
    two_steps(model, optimizer, target)
    backward(model, target)
    model[2].weight.grad[0, 0] = float("nan")
    optimizer.step()
    with pytest.raises(ValueError, match="half-way"):
        manager.close()
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert type(optimizer.state) is not type(manager)
    manager.close()


def test_an_error_within_the_step_leaves_nothing_queued():
    def loop(model, optimizer, target):
        two_steps(model, optimizer, target)
        backward(model, target)
        kept = optimizer.state[model[0].weight]
        kept["step"] = "nonsense"
        with pytest.raises(Exception):  # noqa: B017, PT011 - whatever AdamW makes of it
            optimizer.step()
        kept["step"] = torch.tensor(2.0)
        optimizer.zero_grad()
        assert optimizer.param_groups[0]["params"]
        two_steps(model, optimizer, target)
        return [p.detach().clone() for p in list(model.parameters())[:1]]

    model, optimizer, manager, target = managed_mlp(speculate=False)
    with manager:
        loop(model, optimizer, target)
        assert not manager._host_step.capture.queued


@pytest.mark.parametrize("with_closure", [False, True])
@pytest.mark.parametrize("fused", [None, True])
def test_what_a_step_has_written_before_it_failed_is_seen_on_the_device(fused, with_closure):
    # Fused kernels move no versions, and what runs after a step does not after one that fails.
    def make_optimizer(model):
        groups = [{"params": list(model[2].parameters())}, {"params": list(model[4].parameters())}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2, fused=fused)
        if with_closure:  # with a hook, it is not called before the step
            optimizer.register_step_pre_hook(lambda *_: None)
        return optimizer

    model, optimizer, manager, target = managed_mlp(make_optimizer)
    x = batch(target)

    def gradients():
        model(x).square().mean().backward()
        model[4].weight.grad = model[4].weight.grad.to_sparse()

    with manager:
        before = model[2].weight.detach().clone()
        if not with_closure:
            gradients()
        with pytest.raises(RuntimeError, match="sparse"):
            optimizer.step(gradients if with_closure else None)
        assert not torch.equal(model[2].weight, before)
        optimizer.zero_grad()
        got = model(x).detach().cpu()
    with torch.no_grad():
        assert torch.equal(got, model.to(target)(x).cpu())


@pytest.mark.skipif(ON_CUDA, reason=STEPS_AT_HOME + "; torch calls no hooks after a step that fails")
@pytest.mark.parametrize("device_homes", [False, True])
@pytest.mark.parametrize("fused", [None, False, True])
@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_step_that_fails_in_one_group_has_stepped_those_before_it(failing, fused, device_homes):
    def make_optimizer(model):
        groups = [{"params": list(model[i].parameters()), "lr": 1e-2 / (i + 1)} for i in (0, 2, 4)]
        is_managed = model[0].weight.device.type == "cpu"
        # Where the choice is left to us, it is the fused kernels; they refuse sparse gradients before all else, too.
        return torch.optim.AdamW(groups, fused=fused if is_managed else fused is not False)

    def loop(model, optimizer, target):
        seen = []
        two_steps(model, optimizer, target)
        for _ in range(3):
            backward(model, target)
            weight = model[2 * failing].weight
            weight.grad = weight.grad.to_sparse()
            with pytest.raises(RuntimeError, match="sparse"):
                optimizer.step()
            assert len(optimizer.param_groups) == 3
            assert sum(len(group["params"]) for group in optimizer.param_groups) == 6
            optimizer.zero_grad()
            seen.append(model(batch(target)).detach().cpu())
        two_steps(model, optimizer, target)
        seen.append([v for state in optimizer.state.values() for v in state.values()])
        return seen

    assert_twins(mlp, loop, make_optimizer=make_optimizer, device_homes=device_homes)


def test_an_error_in_the_queue_is_no_matter_of_another_manager():
    model, optimizer, manager, target = managed_mlp(lambda m: Fragile(m.parameters()))
    with manager:
        two_steps(model, optimizer, target)
        backward(model, target)
        model[2].weight.grad[0, 0] = float("nan")
        optimizer.step()
        optimizer.zero_grad()
        manager._stm.updates.finish_all()
        another, steps, its_manager, _ = managed_mlp(speculate=False)  # looks at what tensors there are
        with its_manager:
            two_steps(another, steps, target)
        with pytest.raises(ValueError, match="half-way"):
            model(batch(target))
        two_steps(model, optimizer, target)
