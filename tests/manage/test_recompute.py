"""Memory that runs out while a checkpoint watches what operators save: an error that is true, and no wrong gradient."""

import contextlib
import copy
import functools

import pytest
import torch
from accelerators import ON_CUDA, SEGMENTS, set_memory_limit
from loops import batch, losses, mlp
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from twins import assert_twins, device

import hetero

aten = torch.ops.aten
WIDTH = 64
MEMORY = 256 << 20


class Block(nn.Module):
    """All that it saves is of one shape, so that a checkpoint could not tell one from another."""

    short_in = None  # "forward" or "recompute": its second operator finds no memory, once

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(WIDTH, WIDTH) / 8) for _ in range(4))

    def forward(self, x):
        now = "forward" if torch._C._current_graph_task_id() == -1 else "recompute"
        for place, weight in enumerate(self.weights):
            if place == 1 and self.short_in == now:
                self.short_in = None
                set_memory_limit(torch.accelerator.memory_allocated())
            x = torch.mm(x, weight)
        return x


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def around_the_model(model, optimizer, target):
    seen = []
    for _ in range(6):
        x = batch(target, 64).requires_grad_()
        loss = checkpoint(model, x, use_reentrant=True).square().mean()
        loss.backward()
        seen.append([loss.item(), x.grad.sum().item()])
        optimizer.step()
        optimizer.zero_grad()
    return seen


@pytest.mark.parametrize("kib", [400, 420, 460, 480, 500, 520, 540])
def test_a_reentrant_checkpoint_around_the_model_is_tried_again_or_refused_as_others_are(kib):
    try:
        assert_twins(lambda: mlp(depth=4), around_the_model, budget=kib << 10)
    except hetero.BudgetError:  # not the device's own: it says what it would take
        assert kib < 520


class Selective(nn.Module):
    """Each block keeps its products, or one of two kinds of them, and recomputes the rest."""

    def __init__(self, kept, width=64):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(4)
        )
        self.kept = kept

    def policy(self, context, operator, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if operator in self.kept else CheckpointPolicy.PREFER_RECOMPUTE

    def forward(self, x):
        for block in self.blocks:
            contexts = functools.partial(create_selective_checkpoint_contexts, self.policy)
            x = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
        return x


# torch 2.15 warns that some day what these keep goes through hooks, which are ours.
@pytest.mark.filterwarnings("ignore:A saved_tensors_hooks context:FutureWarning")
@pytest.mark.parametrize("share", [1.5, 0.5, 0.35, 0.25])
@pytest.mark.parametrize("kept", [(aten.mm.default,), (aten.mm.default, aten.addmm.default)])
def test_a_selective_checkpoint_is_as_without_us(kept, share):
    assert_twins(lambda: Selective(kept), functools.partial(losses, steps=6), share=share)


# Of what autograd saves, and of what it is given back: of the same memory, and nothing is computed.
VIEWS = ("aten.detach.default", "aten.as_strided.default")


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_mode_sees_the_operators_of_the_loop_and_no_copies_of_ours():
    def loop(model, optimizer, target):
        rows = [batch(target) for _ in range(8)]
        seen = []
        for x in rows:
            with Seen() as mode:
                loss = model(x).square().mean()
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append([loss, sorted(name for name in mode.names if name not in VIEWS)])
        return seen

    assert_twins(mlp, loop, share=0.5, activations=False)


def in_hooks(model, optimizer, target):
    """Backwards within one of something else, at its leaves."""
    seen = []

    def train(_):
        with torch.enable_grad():
            loss = model(batch(target, 64)).square().mean()
            loss.backward()
        seen.append(loss.item())

    for _ in range(5):
        leaves = [torch.zeros(1, device=target, requires_grad=True) for _ in range(3)]
        for leaf in leaves:
            leaf.register_post_accumulate_grad_hook(train)
        sum(leaves).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return seen


@pytest.mark.parametrize("kib", [500, 520, 540, 560, 600])
def test_backwards_in_hooks_of_leaves_are_tried_again_each(kib):
    assert_twins(lambda: mlp(depth=4), in_hooks, budget=kib << 10)


def test_a_model_called_in_a_hook_leaves_the_node_that_runs_its_formula():
    """Which one prod's backward takes is chosen by whether something tries operators again then."""
    target = device()

    def run(**keywords):
        torch.manual_seed(0)
        model, seen, ones = mlp(), [], torch.ones(8, 64).to(target)
        with hetero.manage(model, device=target, **keywords) if keywords else contextlib.nullcontext():
            for _ in range(3):
                x = torch.randn(8, 64).to(target).requires_grad_()
                product = (0.1 * x + 1).prod()
                if keywords:
                    product.register_hook(lambda gradient: model(ones).sum() * 0 + gradient)
                product.backward()
                seen.append(x.grad.cpu())
        return seen

    model_and_more = torch.accelerator.memory_allocated() + (3 << 20)
    assert all(map(torch.equal, run(device_budget=model_and_more), run()))


@pytest.mark.skipif(ON_CUDA or SEGMENTS, reason="the limit is the virtual device's")
@pytest.mark.parametrize("phase", ["forward", "recompute"])
def test_an_operator_within_a_checkpoint_is_not_run_again_where_that_would_be_seen(phase):
    torch.manual_seed(0)
    target = device()
    model = Net()
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, foreach=False)
    x = torch.randn(WIDTH, WIDTH)

    def gradients(net, x):
        net.zero_grad()
        net(x).square().mean().backward()
        return [p.grad for p in net.parameters()]

    with hetero.manage(
        model, optimizer, device=target, device_budget="400KiB", device_homes=False
    ) as manager:
        for _ in range(8):
            gradients(model, x.to(target))
            optimizer.step()
        assert not manager._stm.executor.is_guarded
        model.blocks[2].short_in = phase
        try:
            with pytest.raises(torch.OutOfMemoryError):
                gradients(model, x.to(target))
        finally:
            set_memory_limit(MEMORY)
        assert model.blocks[2].short_in is None
        for one, other in zip(gradients(model, x.to(target)), gradients(plain, x), strict=True):
            assert torch.equal(one, other)
