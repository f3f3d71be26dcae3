"""What cannot be managed, or does not fit, is refused with the fact, the numbers and the cure; nothing is touched."""

import gc

import pytest
import torch
from loops import batch, mlp, train
from torch import nn
from twins import adamw, assert_twins, device

import hetero


def snapshot(model):
    return [(id(p), type(p), p.detach().clone(), p.device) for p in model.parameters()]


def assert_untouched(model, before):
    for parameter, (identity, kind, value, place) in zip(model.parameters(), before, strict=True):
        assert id(parameter) == identity
        assert type(parameter) is kind
        assert parameter.device == place
        assert torch.equal(parameter, value)


def test_a_budget_too_small_for_one_parameter_is_refused_at_once():
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(8, 8))
    before = snapshot(model)
    with pytest.raises(hetero.BudgetError, match=r"0\.weight .* need 262144 bytes .*100000 bytes"):
        hetero.manage(model, None, device=device(), device_budget=100_000)
    assert_untouched(model, before)


def test_a_budget_too_small_for_one_operator_names_it_and_the_least_that_would_do():
    target = device()

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Parameter(torch.randn(256, 64))
            self.second = nn.Parameter(torch.randn(64, 256))

        def forward(self, x):
            return x @ torch.mm(self.second, self.first)

    model = Two()
    optimizer = adamw(model)
    x = batch(target)
    gc.collect()
    base = torch.accelerator.memory_allocated()
    budget = base + (100 << 10)  # either of the two 64 KiB weights, not both
    manager = hetero.manage(model, optimizer, device=target, device_budget=budget)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(hetero.BudgetError, match=r"mm\(second, first\) needs 128\.0 KiB more") as caught:
        model(x)
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    manager.close()
    # The least budget it names holds the operands; their product, 16 KiB, comes on top.
    least = int(str(caught.value).split("(")[-1].split(" bytes")[0])
    assert least == base + (128 << 10)
    with hetero.manage(model, optimizer, device=target, device_budget=least + (16 << 10)), torch.no_grad():
        model(x)


def test_to_the_device_moves_nothing_but_what_is_new():
    def loop(model, optimizer, target):
        seen = []
        for _ in range(3):  # before the first forward, and with a plan
            parameters = list(model.parameters())
            assert model.to(target) is model
            assert model.float() is model
            assert model[0].to(device=target) is model[0]
            assert all(p is q for p, q in zip(parameters, model.parameters(), strict=True))
            seen.append(train(model, optimizer, target, 2))
        return seen

    assert_twins(mlp, loop)

    target = device()
    model = mlp(depth=1)
    with hetero.manage(model, None, device=target, device_budget="1MiB"):
        model.head = nn.Linear(64, 2)
        model.register_buffer("scale", torch.ones(3))
        model.to(target)
        assert model.head.weight.device == model.scale.device == target
        assert next(model.parameters()).device.type == "cpu"
        model[0].extra = nn.Parameter(torch.ones(2))
        with pytest.raises(hetero.ManageError, match="others of its own"):
            model.to(target)


def test_another_memory_format_is_refused():
    def build():
        return nn.Sequential(nn.Unflatten(1, (4, 4, 4)), nn.Conv2d(4, 3, 3), nn.Flatten(), nn.Linear(12, 2))

    target = device()
    for model in (build(), build().to(memory_format=torch.channels_last)):
        is_last = model[1].weight.is_contiguous(memory_format=torch.channels_last)
        with hetero.manage(model, None, device=target, device_budget="1MiB"):
            if is_last:
                assert model.to(memory_format=torch.channels_last) is model
            else:
                with pytest.raises(hetero.ManageError, match="memory format"):
                    model.to(memory_format=torch.channels_last)
            assert model.to(target) is model


def test_refusals_name_the_cure():
    target = device()
    model = mlp(depth=1)
    with hetero.manage(model, None, device=target, device_budget="1MiB"):
        with pytest.raises(hetero.ManageError, match="managed already"):
            hetero.manage(model, None, device=target, device_budget="1MiB")
        for convert in (
            lambda: model.to("cpu", torch.float64),
            lambda: model.half(),
            lambda: model.to(target, torch.float64),
            lambda: model[0].cpu().half(),
            lambda: model._apply(lambda tensor: tensor.clamp_(-0.1, 5.0)),
            lambda: model._apply(lambda tensor: tensor + 1),
        ):
            with pytest.raises(hetero.ManageError, match=r"manager\.close"):
                convert()
    model.half().float()
    with pytest.raises(hetero.ManageError, match="meta device"):
        hetero.manage(nn.Linear(2, 2, device="meta"), None, device=target)
    with pytest.raises(hetero.ManageError, match="none of the model's"):
        hetero.manage(mlp(), adamw(mlp()), device=target)
    with pytest.raises(hetero.ManageError, match=r"capturable=True.* fused=True"):
        hetero.manage(model, torch.optim.AdamW(model.parameters(), capturable=True), device=target)
    # Of groups without a parameter of the model's it is the user's matter.
    other = {"params": [nn.Parameter(torch.zeros(1, device=target))], "capturable": True}
    optimizer = torch.optim.AdamW([{"params": list(model.parameters())}, other])
    hetero.manage(model, optimizer, device=target).close()
    with pytest.raises(hetero.ManageError, match="lazy"):
        hetero.manage(nn.LazyLinear(3), None, device=target)
    with pytest.raises(hetero.ManageError, match=r"type list.* the one that holds most"):
        hetero.manage(model, [adamw(model), adamw(model)], device=target)
    with pytest.raises(hetero.ManageError, match="no parameters"):
        hetero.manage(nn.ReLU(), None, device=target)
    with pytest.raises(hetero.DeviceError, match="no accelerator"):
        hetero.manage(mlp(), None, device="cpu")


@pytest.mark.parametrize(
    ("keyword", "value", "message"),
    [
        ("device_budget", "20G", "ambiguous"),
        ("device_budget", 1.5, "share"),
        ("device_budget", "10TiB", "the device has only"),
        ("device_budget", 0, "positive"),
        ("host_budget", "5 apples", "unknown unit"),
        ("warmup_budget", 0.0, "fraction"),
        ("warmup_budget", 2, "fraction"),
        ("warmup_steps", 0, "at least 1"),
        ("policy", "random", "'opt'"),
        ("prefetch", "yes", "True or False$"),
        ("pin_memory", 1, "True, False or None$"),
        ("speculate", "x", "True, False or None$"),
    ],
)
def test_keywords_are_validated_at_once(keyword, value, message):
    model = mlp(depth=1)
    before = snapshot(model)
    with pytest.raises(hetero.ConfigError, match=message) as caught:
        hetero.manage(model, None, device=device(), **{"device_budget": "1MiB", keyword: value})
    assert keyword in str(caught.value)
    assert_untouched(model, before)
