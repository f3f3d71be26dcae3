"""Operators that run functions: branches, loops and scans, which torch calls higher-order."""

import copy
import functools

import pytest
import torch
from accelerators import ON_CUDA, SEGMENTS, set_memory_limit
from loops import train
from torch import nn
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.while_loop import while_loop
from twins import assert_twins, device

import hetero
from hetero.stm.running import guard
from hetero.stm.running.retry import Retry

WIDTH = 64

pytestmark = [
    # Dynamo looks at the gradients of its inputs, be they leaves or not, managed or not.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


class Branches(nn.Module):
    """To be compiled: uncompiled, torch compiles both functions as a whole."""

    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda x: self.one(x).sin(), lambda x: self.other(x).cos(), (x,))


class Loops(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        i = torch.zeros((), dtype=torch.long, device=x.device)
        return (
            self.linear(x)
            * while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x.tanh()), (i, x.detach()))[1]
        )


class Scans(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return associative_scan(lambda a, b: a + b, self.linear(x), 0, combine_mode="generic").tanh()


def build(kind, *, compiles):
    torch._dynamo.reset()
    layers = [layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), kind())]
    if compiles:
        for layer in layers[1::2]:
            layer.compile(backend="aot_eager")
    return nn.Sequential(*layers)


@pytest.mark.parametrize("share", [0.7, 4.0])
@pytest.mark.parametrize(
    ("kind", "compiles"),
    [(Branches, True), (Loops, True), (Loops, False), (Scans, True), (Scans, False)],
    ids=["compiled branches", "compiled loops", "loops", "compiled scans", "scans"],
)
def test_they_train_to_the_same_bits_under_a_budget(kind, compiles, share):
    assert_twins(
        lambda: build(kind, compiles=compiles),
        functools.partial(train, steps=4),
        share=share,
        warmup_budget=0.5,
    )


def test_what_torch_compiles_as_a_whole_says_what_to_do():
    target = device()
    model = build(Branches, compiles=False)
    with hetero.manage(model, device=target, device_budget="1MiB"):
        with pytest.raises(torch._dynamo.exc.UncapturedHigherOrderOpError) as error:
            model(torch.randn(4, WIDTH, device=target))
        assert any("block.compile()" in note for note in error.value.__notes__)


class Draws(nn.Module):
    """A loop with a large number of random numbers in it."""

    def __init__(self, columns):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(8))
        self.columns = columns

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        columns = self.columns

        def body(i, x):
            noise = torch.rand(x.shape, device=x.device)
            return i + 1, x + noise * x.new_zeros(columns, 1024).sum(0)

        i = torch.zeros((), dtype=torch.long, device=x.device)
        return while_loop(lambda i, x: i < 2, body, (i, x))[1]


def test_a_loop_that_runs_out_of_memory_is_tried_again_and_draws_the_same_numbers():
    target = device()
    x = torch.randn(4, 1024, device=target)
    budget, layers = 60 << 20, 8 * (1024 * 1024 * 4)
    model = Draws(columns=(budget - layers) // 4096)  # beside which not all layers fit
    twin = copy.deepcopy(model).to(target)
    torch.manual_seed(1)
    with torch.no_grad():
        expected = twin(x)
    del twin
    before = torch.accelerator.memory_allocated()
    torch.manual_seed(1)
    with hetero.manage(model, device=target, device_budget=before + budget, warmup_budget=0.9) as manager:
        with torch.no_grad():
            assert torch.equal(model(x), expected)
        assert manager._stm.collector.total.evicted_bytes > 0, "it was not tried again"


@pytest.mark.skipif(ON_CUDA or SEGMENTS, reason="memory is refused to the byte")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_loop_that_has_written_to_what_it_was_given_is_not_run_twice(mode):
    target = device()

    def body(i, total):
        total.add_(1)
        return i + 1, total + torch.zeros(1 << 20, device=target).sum()

    def relieve(unless_free=None):
        set_memory_limit(256 << 20)
        return 1

    with mode():
        total, i = torch.zeros(64, device=target), torch.zeros((), dtype=torch.long, device=target)
    with mode(), guard.guarded(Retry(relieve), at_once=True):
        set_memory_limit(torch.accelerator.memory_allocated() + (1 << 20))
        with pytest.raises(torch.OutOfMemoryError):
            torch.ops.higher_order.while_loop(lambda i, total: i < 2, body, (i, total), ())
    set_memory_limit(256 << 20)
    assert torch.equal(total.cpu(), torch.ones(64))
