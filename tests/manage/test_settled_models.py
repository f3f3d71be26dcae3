"""Settled under autocast, compiled, with attention, and a transformer of others: exact, and nothing of ours runs."""

import pytest
import small_transformers
import torch
from loops import batch, mlp
from our_calls import our_calls
from torch import nn
from twins import assert_twins

from hetero.stm.interception.parameter import ManagedParameter

pytestmark = [
    pytest.mark.usefixtures("homes_on_device"),
    # Dynamo looks at the gradients of its inputs, be they leaves or not.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]

PLENTY = 64 << 20
STEPS = 9
CHECK = {"modelcalls", "signatures", "state", "check", "accelerator"}
# The call, its signature (two, three with keywords), the check (three), the counters, the user's forward.
MOST_CALLS = 9


def assert_settles_without_hooks(build, loss_of, *, least=3):
    """Its last two iterations, counted: nothing of ours but the check of the forward."""
    counted = []

    def loop(model, optimizer, target):
        seen = []
        for number in range(STEPS):
            losses = []
            runs = (
                lambda: losses.append(loss_of(model, target)),  # noqa: B023
                lambda: finish(model, optimizer, losses[0]),  # noqa: B023
            )
            if number < STEPS - 2:
                for run in runs:
                    run()
            else:
                counted.append([our_calls(run) for run in runs])
            seen.append(losses[0])
        return seen

    manager = assert_twins(build, loop, budget=PLENTY)
    assert manager.stats.settled_forwards >= least
    unmanaged, settled = counted[:2], counted[2:]
    assert not any(calls for pair in unmanaged for calls in pair)
    for forward, rest in settled:
        assert forward["state.Settled.enter"] == 1
        assert {name.split(".")[0] for name in forward} <= CHECK
        assert sum(forward.values()) <= MOST_CALLS
        assert not rest


def finish(model, optimizer, loss):
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def loss_of_batch(model, target):
    return model(batch(target)).float().square().mean()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    def loss_of(model, target):
        with torch.autocast(target.type, dtype=dtype):
            return loss_of_batch(model, target)

    assert_settles_without_hooks(mlp, loss_of)


def test_autocast_that_comes_and_goes_is_another_kind_of_iteration():
    noted = []

    def loop(model, optimizer, target):
        seen = []
        noted.clear()
        for number in range(14):
            with torch.autocast(target.type, dtype=torch.bfloat16, enabled=number in (6, 7, 10, 13)):
                loss = loss_of_batch(model, target)
            if number in (5, 6, 13):
                noted.append(type(next(model.parameters())) is ManagedParameter)
            finish(model, optimizer, loss)
            seen.append(loss)
        return seen

    assert_twins(mlp, loop, budget=PLENTY)
    assert noted == [False, True, False]  # intercepted where it had not been measured yet


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64, bias=False)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("way", ["in place", "wrapped", "whole"])
def test_compiled_blocks(backend, way):
    def build():
        torch._dynamo.reset()
        model = nn.Sequential(*[Block() for _ in range(3)])
        if way == "whole":
            model.compile(backend=backend)
        for place, block in enumerate(model):
            if way == "in place":
                block.compile(backend=backend)
            elif way == "wrapped":
                model[place] = torch.compile(block, backend=backend)
        return model

    assert_settles_without_hooks(build, loss_of_batch)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.MultiheadAttention(64, 4, batch_first=True) for _ in range(2))

    def forward(self, x):
        x = x.view(2, -1, 64)
        for layer in self.layers:
            x = x + layer(x, x, x, need_weights=False)[0]
        return x


def test_multihead_attention():
    assert_settles_without_hooks(Attention, loss_of_batch)


@pytest.mark.parametrize("frozen", [True, False])
def test_a_transformer_in_evaluation_takes_its_own_fast_path(frozen):
    outputs = []

    def loop(model, optimizer, target):
        seen = []
        for _ in range(0 if frozen else 4):
            seen.append(model(batch(target, 8).view(2, 4, 64)).square().mean())
            seen[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            for _ in range(6):
                seen.append(model(batch(target, 8).view(2, 4, 64)))
            outputs.append(our_calls(lambda: model(batch(target, 8).view(2, 4, 64))))
        return seen

    def build():
        layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
        model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        return model.requires_grad_(False) if frozen else model  # which settles once it was trained

    def plain_sgd(model):
        return torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)

    assert_twins(build, loop, budget=PLENTY, make_optimizer=plain_sgd)
    assert {name.split(".")[0] for name in outputs[1]} <= CHECK


def test_gpt2_with_keyword_arguments_and_tied_weights():
    def build():
        return small_transformers.gpt2(width=32, layers=2, heads=2, vocabulary=64, length=32)

    def loss_of(model, target):
        tokens = torch.randint(0, 64, (2, 16)).to(target)
        return model(input_ids=tokens, labels=tokens, attention_mask=torch.ones_like(tokens)).loss

    assert_settles_without_hooks(build, loss_of)
