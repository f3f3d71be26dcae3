"""What models do while they are built, and kernels that torch has no rule for: a fake step is the real one."""

import copy

import pytest
import torch
from torch import nn

from hetero import PlanError
from hetero.trace import trace_recipe
from hetero.trace.fakemode import fake_mode, grouped_mm


class Drop(nn.Module):
    def __init__(self, rate):
        super().__init__()
        self.rate = rate

    def forward(self, x):
        return x * torch.empty(len(x), 1, 1).bernoulli_(1.0 - self.rate)


class Stochastic(nn.Module):
    """As vision transformers are built: truncated normal weights, layers left out at a rate that grows from none on."""

    def __init__(self, rates, std):
        super().__init__()
        self.drops = nn.ModuleList(Drop(rate) if rate > 0.0 else nn.Identity() for rate in rates)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in rates)
        for layer in self.layers:
            nn.init.trunc_normal_(layer.weight, std=std, a=-2.0, b=2.0)

    def forward(self, x):
        for layer, drop in zip(self.layers, self.drops, strict=True):
            x = x + drop(layer(x))
        return x


class Experts(nn.Module):
    """Rows that are sorted by expert, as mixtures of experts multiply them. ``turned``: weights as linear layers have
    them."""

    def __init__(self, dtype, *, turned):
        super().__init__()
        columns = 48 // dtype.itemsize  # 12, which torch's own rule refuses, of float32
        shape = (4, columns, 16) if turned else (4, 16, columns)
        self.weights, self.turned = nn.Parameter(torch.randn(shape, dtype=dtype)), turned

    def forward(self, x):
        ends = torch.arange(2, 10, 2, dtype=torch.int32)
        weights = self.weights.transpose(-2, -1) if self.turned else self.weights
        return torch._grouped_mm(x[0].to(weights.dtype), weights, offs=ends).float()


def step(model, optimizer):
    model(torch.ones(2, 8, 16)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def traces(make):
    """Fake and real."""

    return [trace_recipe(lambda: (step, *made(make)), fake=fake) for fake in (True, False)]


def made(make):
    model = make()
    return model, torch.optim.AdamW(model.parameters(), fused=True)


def described(trace):
    return trace.peak_nbytes(), [(op.name, op.phase, op.module) for op in trace.operators]


@pytest.mark.parametrize("std", [0.02, 5.0])  # torch draws in two ways
@pytest.mark.parametrize(
    "rates",
    [
        lambda: [x.item() for x in torch.linspace(0, 0.3, 4)],
        lambda: torch.linspace(0, 0.3, 4).tolist(),
        lambda: [0.1 * float(x) for x in torch.arange(4)],
        lambda: [0.1 * x.item() for x in torch.arange(0, 8, 2)],
        lambda: [x.item() for part in torch.linspace(0, 0.3, 4).split([1, 3]) for x in part],
        lambda: (0.1 * torch.unique(torch.tensor([0, 3, 1, 2, 3]))).tolist(),
    ],
    ids=["items", "list", "floats", "steps", "parts", "unique"],
)
def test_a_model_that_is_built_by_values(rates, std):
    fake, real = traces(lambda: Stochastic(rates(), std))
    assert described(fake) == described(real)
    assert sum(op.name.startswith("aten.bernoulli_") for op in fake.operators) == 3


class Copies(nn.Module):
    """What is made by deep copies: layers, and a teacher of theirs."""

    def __init__(self):
        super().__init__()
        self.student = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)
        self.student.layers[1].norm1 = self.student.layers[0].norm1
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, x):
        return self.student(x) - self.teacher(x)


@pytest.mark.filterwarnings("error")
def test_deep_copies():
    fake, real = traces(Copies)
    assert described(fake) == described(real)


def test_values_that_were_written_since_are_not_known():
    def make():
        rates = torch.linspace(0, 0.3, 4)
        rates[1] = torch.rand(())
        return Stochastic([x.item() for x in rates], 0.02)

    with pytest.raises(PlanError, match="branches on a value read from a tensor"):
        traces(make)


def test_rows_of_a_step_have_no_values():
    def values(model, optimizer):
        row = torch.arange(4.0)
        torch._foreach_add_([row], 1.0)
        if row[0].item() > 0.5:
            step(model, optimizer)

    with pytest.raises(PlanError, match="branches on a value read from a tensor"):
        trace_recipe(lambda: (values, *made(Copies)))

    def symbols(model, optimizer):
        loss = model(torch.ones(2, 8, 16)).square().mean()
        (loss * torch.linspace(0, loss.item(), 16).sum()).backward()

    fake, real = (trace_recipe(lambda: (symbols, *made(Copies)), fake=fake) for fake in (True, False))
    assert described(fake) == described(real)


def test_weights_are_drawn_within_their_bounds_afterwards():
    traces(lambda: Stochastic([0.0, 0.1], 0.02))
    weight = nn.init.trunc_normal_(torch.empty(1000), std=1.0, a=-0.5, b=0.5)
    assert weight.abs().max() <= 0.5
    assert weight.abs().max() > 0.4


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_experts_in_any_type(dtype, turned):
    fake, real = traces(lambda: Experts(dtype, turned=turned))
    assert described(fake) == described(real)


@pytest.mark.parametrize(
    ("a", "b", "ends", "turned"),
    [
        ((8, 16), (4, 16, 8), [2, 4, 6, 8], False),
        ((8, 16), (4, 10, 16), [2, 4, 6, 8], True),  # of 40 bytes, a row begins after 48
        ((16, 8), (8, 12), [2, 4, 6, 8], False),
        ((4, 8, 16), (16, 8), [2, 4, 6, 8], False),
        ((4, 8, 16), (4, 16, 8), None, False),
    ],
)
def test_products_of_groups_have_their_shapes(a, b, ends, turned):
    def product(multiply):
        one, other = torch.ones(a), torch.ones(b)
        offs = None if ends is None else torch.tensor(ends, dtype=torch.int32)
        return multiply(one, other.transpose(-2, -1) if turned else other, offs=offs)

    real = product(torch._grouped_mm)
    with fake_mode():
        fake = product(grouped_mm)
    assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)
