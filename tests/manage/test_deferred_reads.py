"""While updates are queued, whoever looks at what they will write waits for them, and nobody else does."""

import copy
import ctypes
import re

import numpy as np
import pytest
import torch
from accelerators import ON_CUDA
from lateness import managed_mlp, pending, stopped
from loops import backward, mlp, two_steps
from twins import adamw, assert_same, at_home, device, plain

import hetero

pytestmark = pytest.mark.usefixtures("late_queue")


def test_step_and_zero_grad_do_not_wait():
    model, optimizer, manager, target = managed_mlp(speculate=False)
    with manager:
        two_steps(model, optimizer, target)
        backward(model, target)
        with stopped(manager) as waited:
            optimizer.step()
            assert set(pending(manager)) == {name for name, _ in model.named_parameters()}
            optimizer.zero_grad()
            model.zero_grad()
            model[0].zero_grad()
            assert all(p.grad is None for p in model.parameters())
            assert model[0].weight.shape == (128, 64)
            assert model[0].weight.requires_grad
            assert waited == []
        assert manager._host_step.queued > 0


def test_a_use_waits_for_its_own_parameters_update_alone():
    model, optimizer, manager, target = managed_mlp(speculate=False)
    with manager:
        two_steps(model, optimizer, target)
        backward(model, target)
        with stopped(manager) as waited:
            optimizer.step()
            model[2].weight.sum()
            assert set(waited) == {"2.weight"}
            model[2](torch.randn(8, 128).to(target))
            assert set(waited) == {"2.weight", "2.bias"}


READS = {
    "operator at home": lambda m, o: m[2].weight.sum().item(),
    "print": lambda m, o: re.findall(r"-?\d\.\d+e[-+]\d+", repr(m[2].weight)),
    "numpy": lambda m, o: m[2].weight.detach().numpy().copy(),
    "asarray": lambda m, o: np.asarray(m[2].weight.data).copy(),
    "data": lambda m, o: m[2].weight.data.clone(),
    "tolist": lambda m, o: m[2].weight.tolist(),
    "grad": lambda m, o: m[2].weight.grad.clone(),
    "deepcopy": lambda m, o: copy.deepcopy(m[2].weight),
    "state_dict": lambda m, o: copy.deepcopy(m.state_dict()),
    "optimizer state": lambda m, o: {k: v.clone() for k, v in o.state[m[2].weight].items()},
    "optimizer state_dict": lambda m, o: copy.deepcopy(o.state_dict()),
    "deepcopy of the optimizer": lambda m, o: copy.deepcopy(o).state_dict()["state"][0]["exp_avg"],
    "version": lambda m, o: m[2].weight._version,
    "vector": lambda m, o: torch.nn.utils.parameters_to_vector(m.parameters()),
    "dict of the state": lambda m, o: [v["step"].clone() for v in dict(o.state).values()],
    "state | other": lambda m, o: [v["step"].clone() for v in (o.state | {}).values()],
    "other | state": lambda m, o: [v["step"].clone() for v in ({} | o.state).values()],
    "state | state": lambda m, o: [v["step"].clone() for v in (o.state | o.state).values()],
}


@pytest.mark.parametrize("name", READS)
def test_every_way_of_reading_waits(name):
    read = READS[name]

    def run(manage):
        torch.manual_seed(0)
        model = mlp(depth=2)
        optimizer = adamw(model)
        target = device()
        manager = None
        if manage:
            manager = hetero.manage(model, optimizer, device=target, device_budget="4MiB")
        generator = torch.Generator().manual_seed(3)
        for _ in range(3):
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            if manager is not None and _ == 2:
                with stopped(manager) as waited:
                    optimizer.step()
                    seen = read(model, optimizer)
                    assert waited or not pending(manager)
                assert manager._host_step.queued > 0
                manager.close()
            else:
                optimizer.step()
        return seen if manage else read(model, optimizer)

    got, expected = run(manage=True), run(manage=False)
    assert _text(got) == _text(expected)


def _text(value):
    if isinstance(value, torch.Tensor):
        return value.detach().tolist()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return [(str(k), _text(v)) for k, v in value.items()]
    if isinstance(value, list | tuple):
        return [_text(v) for v in value]
    return value


def holders():
    """Aliases taken before the step and read after it: nothing tells when."""
    return {
        "state_dict": lambda m, o: (s := m.state_dict(), lambda: s["2.weight"].clone())[1],
        "data": lambda m, o: (d := m[2].weight.data, lambda: d.clone())[1],
        "numpy": lambda m, o: (n := m[2].weight.detach().numpy(), lambda: torch.from_numpy(n.copy()))[1],
        "view": lambda m, o: (v := m[2].weight.detach().view(-1)[3:9], lambda: v.clone())[1],
        "exp_avg": lambda m, o: (e := o.state[m[2].weight]["exp_avg"], lambda: e.clone())[1],
        "entry": lambda m, o: (e := o.state[m[2].weight], lambda: e["exp_avg"].clone())[1],
        "optimizer state_dict": lambda m, o: (
            s := o.state_dict(),
            lambda: s["state"][2]["step"].clone(),
        )[1],
        "pointer": lambda m, o: (
            p := m[2].weight.data_ptr(),
            lambda: _floats_at(p, 5),
        )[1],
    }


# The same of a model on the device, where the host cannot look at memory.
ON_DEVICE = {
    "numpy": lambda m, o: lambda: m[2].weight.detach().clone(),
    "pointer": lambda m, o: lambda: m[2].weight.detach().flatten()[:5].clone(),
}


def _floats_at(address, count):
    return torch.tensor(list((ctypes.c_float * count).from_address(address)))


@pytest.mark.parametrize("name", holders())
def test_an_alias_taken_before_the_step_is_never_stale(name):
    def loop(model, optimizer, target):
        two_steps(model, optimizer, target)
        is_there = ON_CUDA and type(model[2].weight) is torch.nn.Parameter
        look = {**holders(), **(ON_DEVICE if is_there else {})}[name](model, optimizer)
        seen = []
        for _ in range(2):
            backward(model, target)
            optimizer.step()
            seen.append(look())
            optimizer.zero_grad()
        return seen

    expected = at_home(lambda: mlp(depth=2), loop)
    model, optimizer, manager, target = managed_mlp(speculate=False)
    with manager:
        torch.manual_seed(1)
        got = plain(loop(model, optimizer, target))
        assert manager._host_step.queued > 0
    assert_same(got, expected, name)


def test_a_gradient_that_the_user_holds_may_be_changed_after_the_step():
    def loop(model, optimizer, target):
        two_steps(model, optimizer, target)
        seen = []
        for _ in range(3):
            backward(model, target)
            gradients = [p.grad for p in model.parameters()]
            views = [g.view(-1) for g in gradients[:2]]
            del gradients[:2]
            optimizer.step()
            torch._foreach_zero_(gradients)
            for view in views:
                view.fill_(7.0)
            optimizer.zero_grad()
            seen.append([p.detach().clone() for p in model.parameters()])
        return seen
