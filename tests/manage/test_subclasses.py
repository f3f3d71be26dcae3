"""Inputs of the user's own classes of tensors (MONAI's, fastai's): operators hand them on, as unmanaged."""

import pytest
import torch
from loops import mlp
from torch import nn
from torch.utils.checkpoint import checkpoint
from twins import assert_twins


class Kept(torch.Tensor):
    """What torch makes of it by itself: results are of this class."""


class Tagged(torch.Tensor):
    """Hands on more than its class."""

    tag = "none"

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        result = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(result, cls):
            result.tag = next((x.tag for x in args if isinstance(x, cls)), "none")
        return result


class Dropped(torch.Tensor):
    """Results are ordinary tensors."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if not all(issubclass(cls, kind) for kind in types):
            return NotImplemented
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class Net(nn.Module):
    """Operators in C++ and in Python, with one parameter and with several."""

    def __init__(self):
        super().__init__()
        self.wide = nn.Linear(64, 256)
        self.norm = nn.LayerNorm(256)
        self.narrow = nn.Linear(256, 64)
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True)
        self.scale = nn.Parameter(torch.ones(64))

    def forward(self, x):
        x = self.narrow(nn.functional.gelu(self.norm(self.wide(x))))
        mixed, _ = self.attention(x[None], x[None], x[None], need_weights=False)
        return x * self.scale + mixed[0]


def of_class(kind, target):
    x = torch.randn(8, 64).to(target).as_subclass(kind)
    x.tag = "of the batch"
    return x


def look(result):
    return type(result).__name__, getattr(result, "tag", None), result.as_subclass(torch.Tensor)


@pytest.mark.parametrize("share", [0.6, 4.0])
@pytest.mark.parametrize("way", ["plain", "checkpointed", "autocast", "a part"])
@pytest.mark.parametrize("kind", [Kept, Tagged, Dropped])
def test_operators_hand_on_the_inputs_class(kind, way, share):
    def call(model, x):
        if way == "checkpointed":
            return checkpoint(model, x, use_reentrant=False)
        if way == "a part":
            return model.narrow(model.wide(x))
        return model(x)

    def loop(model, optimizer, target):
        torch.manual_seed(1)
        seen = []
        for _ in range(6):
            x = of_class(kind, target)
            with torch.autocast(target.type, torch.bfloat16, enabled=way == "autocast"):
                result = call(model, x)
            loss = result.float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen += [*look(result), *look(loss)]
            with torch.no_grad():
                seen += look(call(model, x))
        return seen

    assert_twins(Net, loop, share=share)


@pytest.mark.parametrize("kind", [Kept, Tagged, Dropped])
def test_operators_outside_of_forward_hand_it_on_as_well(kind):
    def loop(model, optimizer, target):
        torch.manual_seed(1)
        seen = []
        for _ in range(4):
            x = of_class(kind, target)
            penalty = (x * model.scale).square().mean()
            loss = model(x.as_subclass(torch.Tensor)).square().mean()
            (loss + penalty.as_subclass(torch.Tensor)).backward()
            optimizer.step()
            optimizer.zero_grad()
            seen += [*look(penalty), loss]
        return seen

    assert_twins(Net, loop, share=0.6)


@pytest.mark.parametrize("kind", [Kept, Tagged, Dropped])
def test_what_forward_saves_leaves_the_device_whatever_its_class(kind):
    """There is no room for half of it."""

    def loop(model, optimizer, target):
        torch.manual_seed(1)
        seen = []
        for _ in range(5):
            x = torch.randn(512, 64).to(target).as_subclass(kind)
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen += look(loss)
        return seen

    assert_twins(lambda: mlp(depth=4), loop, share=0.5)
