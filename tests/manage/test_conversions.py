"""``model.to(device)`` and ``model.cpu()``, as frameworks call them around training: nothing of a managed model moves,
and what is around it does."""

import pytest
import torch
from loops import batch, losses, mlp
from settling import is_intercepted
from torch import nn
from twins import assert_twins, device

import hetero


class Total(nn.Module):
    """A metric: what it counts is neither a parameter nor a buffer, so it converts that itself."""

    def __init__(self):
        super().__init__()
        self.total = torch.zeros(())

    def _apply(self, fn, *args, **kwargs):
        super()._apply(fn, *args, **kwargs)
        self.total = fn(self.total)
        return self


class Job(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model
        self.metric = nn.ModuleList([Total()])
        self.register_buffer("scale", torch.ones(2))

    def devices(self):
        return {self.metric[0].total.device.type, self.scale.device.type}


def build():
    model = mlp()
    model.append(nn.BatchNorm1d(64, affine=False))  # buffers alone
    return model


def test_training_goes_on_as_if_nothing_had_been_called():
    def loop(model, optimizer, target):
        job, seen = Job(model), []
        for _ in range(3):
            job.to(target)
            assert job.devices() == {target.type}
            seen += losses(model, optimizer, target, 3)
            job.metric[0].total += seen[-1].detach()
            job.cpu()
            assert job.devices() == {"cpu"}
            assert {p.device.type for p in model.parameters()} == {"cpu"}
        seen.append(job.metric[0].total)
        model.to(target)
        return seen

    assert_twins(build, loop, make_optimizer=fused)


def test_after_cpu_operators_run_on_the_device_all_the_same():
    target = device()
    model = build()
    with hetero.manage(model, None, device=target, device_budget="1MiB"):
        model[0].metric = Total()
        model.to(target)
        assert model.cpu() is model
        assert model[0].to("cpu") is model[0]
        assert model[0].metric.total.device == target  # a part of the model
        assert model(batch(target)).device == target


def test_where_everything_fits_parameters_come_home():
    def loop(model, optimizer, target):
        managed = is_intercepted(model)
        seen = losses(model, optimizer, target, 6)
        if managed:
            assert not is_intercepted(model)
        model.cpu()
        assert {p.device.type for p in model.parameters()} == {"cpu"}
        seen += [p.detach().clone() for p in model.parameters()]
        model.to(target)
        return seen + losses(model, optimizer, target, 4)

    assert_twins(build, loop, budget=64 << 20, make_optimizer=fused)


def fused(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def test_a_refusal_names_a_parameter_once():
    model = nn.Sequential(nn.Linear(4, 4))
    with hetero.manage(model, device=device(), device_budget="1MiB"):
        with pytest.raises(hetero.ManageError, match=r"while managed: 0\.weight is moved"):
            model.half()
        with pytest.raises(hetero.ManageError, match=r"while managed: weight \(0.weight\) is moved"):
            model[0].half()
