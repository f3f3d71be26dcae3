"""Modules of torch that compute as one kernel in evaluation, wherever torch would."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from accelerators import ON_CUDA, device
from torch import nn
from twins import assert_same, assert_twins, managed, unmanaged

import hetero

WIDTH, LENGTH = 64, 12


def layer():
    return nn.TransformerEncoderLayer(WIDTH, 4, 128, dropout=0.0, batch_first=True)


class Head(nn.Module):
    """On an encoder, of which ``frozen`` says what is not trained and is in evaluation."""

    def __init__(self, frozen):
        super().__init__()
        self.encoder = nn.TransformerEncoder(layer(), 3, enable_nested_tensor=False)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.head = nn.Linear(WIDTH, 8)
        self.frozen = frozen
        for part in self.frozen_parts():
            part.requires_grad_(False)

    def frozen_parts(self):
        layers = self.encoder.layers
        return {
            "encoder": [self.encoder],
            "two layers": list(layers[:2]),
            "attention": [self.attention, layers[1].self_attn],
            "nothing": [],
        }[self.frozen]

    def forward(self, x):
        x = self.encoder(x)
        return self.head(x + self.attention(x, x, x, need_weights=False)[0])


def batches(target, count):
    for step in range(count):
        yield torch.randn(4, LENGTH, WIDTH, generator=torch.Generator().manual_seed(step)).to(target)


@pytest.mark.parametrize("share", [0.5, 0.8, 4.0])
@pytest.mark.parametrize("frozen", ["encoder", "two layers", "attention", "nothing"])
def test_frozen_parts_in_evaluation_take_them_in_training(frozen, share):
    def loop(model, optimizer, target):
        seen = []
        for x in batches(target, 7):
            model.train()
            for part in model.frozen_parts():
                part.eval()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            model.eval()
            with torch.no_grad():
                seen += [loss.detach(), model(x)]
        return seen

    assert_twins(lambda: Head(frozen), loop, share=share)


@pytest.mark.parametrize("wants", ["input", "weights", "nothing"])
def test_where_gradients_are_wanted_they_are_not_taken(wants):
    def loop(model, optimizer, target):
        model.eval().requires_grad_(wants == "weights")
        seen = []
        for x in batches(target, 5):
            x.requires_grad_(wants == "input")
            y = model(x)
            if wants != "nothing":
                y.square().mean().backward()
            seen += [y.detach(), *([x.grad] if wants == "input" else [])]
        return seen

    def optimizer(model):
        return torch.optim.SGD(model.parameters(), lr=1e-2, foreach=False)

    assert_twins(lambda: nn.Sequential(layer(), layer(), layer()), loop, share=0.8, make_optimizer=optimizer)


def test_one_that_does_not_fit_says_how_to_compute_it_by_operators():
    target = device()
    model = layer().eval()
    base = torch.accelerator.memory_allocated()
    with (
        hetero.manage(model, device=target, device_budget=base + model.linear1.weight.nbytes * 4),
        torch.no_grad(),
    ):
        x = next(batches(target, 1))[:1]
        with pytest.raises(hetero.BudgetError) as refused:
            model(x)
        assert "set_fastpath_enabled" in refused.value.__notes__[-1]
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            model(x)
        finally:
            torch.backends.mha.set_fastpath_enabled(True)


class Adapted(nn.Module):
    """As adapters are put around an attention: it has its attributes. Torch's fast path passes it by."""

    def __init__(self, base):
        super().__init__()
        self.base, self.added = base, nn.Linear(WIDTH, WIDTH)

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base"), name)

    def forward(self, q, k, v, **keywords):
        result, weights = self.base(q, k, v, **keywords)
        return result + self.added(q), weights


class ReadingFirst(nn.TransformerEncoder):
    """Looks at its first layer before it calls it, and calls another layer's forward."""

    def forward(self, src, *args, **keywords):
        src = src + self.layers[0].linear1.weight.mean() + self.layers[0].linear2(src.repeat(1, 1, 2))
        return super().forward(self.layers[1].forward(src), *args, **keywords)


def adapted():
    model = nn.TransformerEncoder(layer(), 3).requires_grad_(False)
    for part in model.layers:
        part.self_attn = Adapted(part.self_attn)
    return model


def shared():
    inner = nn.TransformerEncoder(layer(), 3)
    return nn.ModuleDict({"one": nn.Sequential(inner, nn.Linear(WIDTH, WIDTH)), "same": inner})["one"]


@pytest.mark.parametrize("share", [0.8, 3.0])
@pytest.mark.parametrize(
    "make",
    [adapted, shared, lambda: ReadingFirst(layer(), 3)],
    ids=["adapted", "shared", "reading the first"],
)
def test_modules_that_are_made_of_them(make, share):
    def loop(model, optimizer, target):
        seen = []
        for x in batches(target, 6):
            for evaluates in (False, True):
                model.train(not evaluates)
                y = model(x)
                seen.append(y.detach().cpu())
                if not evaluates and y.requires_grad:
                    y.square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
            with torch.no_grad():
                seen.append(model(x).cpu())
        return seen

    assert_twins(make, loop, share=share)


def test_modules_under_several_names_get_their_calls_back():
    inner = nn.TransformerEncoder(layer(), 2)
    model = nn.ModuleDict({"one": inner, "other": nn.Sequential(inner, inner.layers[0])})
    with hetero.manage(model, device=device(), device_budget="64MiB"):
        assert "_compiled_call_impl" in inner.__dict__
    assert not any("_compiled_call_impl" in module.__dict__ for module in model.modules())


def test_all_arguments_may_be_given_by_position():
    def loop(model, optimizer, target):
        seen = []
        for x, mask in padded(target):
            seen.append(model(x, None, mask, False).detach())
        return seen

    assert_twins(lambda: encoder().train(), loop, share=0.8)


@pytest.mark.parametrize("budget", [1 << 20, 64 << 20])
def test_threads_take_them_side_by_side(budget):
    target = device()
    model = encoder_of_seed(0).eval()
    given = [x[:1].contiguous() for x in batches(target, 5)]

    def evaluate(some):
        with torch.no_grad():
            return [some(x).cpu() for x in given for _ in range(4)]

    expected = evaluate(copy.deepcopy(model).to(target))
    base = torch.accelerator.memory_allocated()
    with (
        hetero.manage(model, device=target, device_budget=base + budget),
        ThreadPoolExecutor(2) as threads,
    ):
        for seen in threads.map(evaluate, [model] * 4):
            assert_same(seen, expected, "seen")


def test_torch_answers_itself_when_nobody_is_called():
    asked = torch.overrides.has_torch_function
    model = nn.Sequential(layer(), layer()).eval()
    with hetero.manage(model, device=device(), device_budget="64MiB"), torch.no_grad():
        model(next(batches(device(), 1)))
        parameter = next(model.parameters())
        assert torch.overrides.has_torch_function((parameter,))
        assert torch.overrides.has_torch_function is asked


def padded(target):
    """Batches with padding on the right, as an encoder wants it."""
    for step, x in enumerate(batches(target, 5)):
        lengths = torch.arange(4) + LENGTH - 4 - step
        yield x, (torch.arange(LENGTH) >= lengths[:, None]).to(target)


def encoder():
    return nn.TransformerEncoder(layer(), 3)


def encoder_of_seed(seed):
    torch.manual_seed(seed)
    return encoder()


def evaluate(model, optimizer, target):
    model.eval()
    with torch.no_grad():
        return [model(x, src_key_padding_mask=mask).cpu() for x, mask in padded(target)]


@pytest.mark.skipif(not ON_CUDA, reason="the virtual device has no nested tensors")
def test_padding_is_left_out_by_an_encoder():
    expected, *_ = unmanaged(encoder, evaluate)
    for budget in (350 << 10, 64 << 20):
        seen, *_ = managed(encoder, evaluate, budget)
        assert_same(seen, expected, f"{budget} bytes")


@pytest.mark.parametrize("budget", [350 << 10, 64 << 20])
def test_an_encoder_decides_as_without_us_whether_to_leave_padding_out(monkeypatch, budget):
    # What stands for nested tensors on a device that has none.
    zeroed = lambda x, keep, mask_check: x * keep[..., None]  # noqa: E731
    monkeypatch.setattr(torch, "_nested_tensor_from_mask", zeroed)
    monkeypatch.setattr(torch.Tensor, "to_padded_tensor", lambda x, padding, size: x)

    def loop(model, optimizer, target):
        seen = evaluate(model, optimizer, target)
        for x, mask in padded(target):
            loss = model(x, src_key_padding_mask=mask).square().mean()  # parameters are trained: it does not
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.detach())
        return [*seen, *evaluate(model, optimizer, target)]

    assert_twins(encoder, loop, budget=budget)


class LeftOutError(Exception):
    pass


def test_parameters_are_there_after_an_error_amid_the_decision(monkeypatch):
    def leave_out(*args, **kwargs):
        raise LeftOutError

    model = encoder().eval()
    base = torch.accelerator.memory_allocated()
    with hetero.manage(model, device=device(), device_budget=base + (350 << 10)), torch.no_grad():
        x, mask = next(padded(device()))
        ours, before = list(model.parameters()), model(x)
        monkeypatch.setattr(torch, "_nested_tensor_from_mask", leave_out)
        with pytest.raises(LeftOutError):
            model(x, src_key_padding_mask=mask)
        assert all(a is b for a, b in zip(model.parameters(), ours, strict=True))
        assert torch.equal(model(x), before)
