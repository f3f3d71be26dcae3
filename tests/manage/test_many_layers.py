"""A measured iteration of twice as many layers asks twice as many questions, and not four times as many."""

from collections import Counter

import pytest
import torch
from torch import nn
from twins import adamw, device

import hetero
from hetero.devices import CopyEngine
from hetero.eviction.policies import FarthestNextUse
from hetero.msc import Period
from hetero.stm.activations.offload import Activations
from hetero.stm.copies.uploads import Uploads
from hetero.stm.tensors.managed import ManagedTensor


class Counting(FarthestNextUse):
    """Counts the copies that it is asked to choose among."""

    seen = 0

    def victims(self, candidates, nbytes):
        Counting.seen += len(candidates)
        return super().victims(candidates, nbytes)


def count_questions(monkeypatch, layers, budget):
    """In the first iteration, by what is asked."""
    asked = Counter()
    Counting.seen = 0

    def counted(owner, name):
        inner = getattr(owner, name)

        def ask(self, *args):
            asked[name] += 1
            return inner(self, *args)

        monkeypatch.setattr(owner, name, ask)

    target = device()
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(layers)])
    optimizer = adamw(model)
    room = torch.accelerator.memory_allocated() + budget
    with hetero.manage(
        model, optimizer, device=target, device_budget=room, policy=Counting(), device_homes=False
    ):
        with monkeypatch.context() as monkeypatch:
            counted(ManagedTensor, "is_held")
            counted(Activations, "_is_held")
            model(torch.randn(16, 16, device=target)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return asked + Counter(candidates=Counting.seen)


@pytest.mark.parametrize("share", [None, 0.8])
def test_measuring_asks_whoever_may_be_held_and_no_other(monkeypatch, share):
    # A weight is 1 KiB, and so is what forward saves of a layer.
    few, many = (
        count_questions(monkeypatch, layers, 8 << 20 if share is None else int(share * layers * 2048) + 8192)
        for layers in (240, 480)
    )
    assert few["is_held"] > 0
    assert few["_is_held"] > 0
    assert (few["candidates"] > 0) == (share is not None)
    assert all(many[question] < 3 * few[question] for question in few), (few, many)


class _Event:
    def __init__(self):
        self.is_over = False

    def query(self):
        return self.is_over


class _Tensor:
    """Counts how often it is looked at."""

    looks = 0

    def __init__(self, index):
        self._index = index

    @property
    def index(self):
        _Tensor.looks += 1
        return self._index


def test_whoever_waits_for_one_copy_looks_at_no_other():
    uploads = Uploads(CopyEngine.__new__(CopyEngine))
    tensors = [_Tensor(index) for index in range(100)]
    events = {tensor: [_Event(), _Event()] for tensor in tensors}
    for turn in range(2):
        for tensor in tensors:
            uploads.note(events[tensor][turn], tensor)
    _Tensor.looks = 0
    for tensor in tensors:
        assert uploads.reading(tensor) == events[tensor]
        assert uploads.take([tensor]) == {tensor.index: events[tensor]}
        assert uploads.reading(tensor) == []
        assert uploads.take([tensor]) == {}
    assert _Tensor.looks < 20 * len(tensors)


def test_a_copy_that_is_over_is_forgotten_once_those_before_it_are():
    uploads = Uploads(CopyEngine.__new__(CopyEngine))
    first, second = _Tensor(0), _Tensor(1)
    events = [_Event() for _ in range(4)]
    for event, tensor in zip(events, (first, second, first, second), strict=True):
        uploads.note(event, tensor)
    events[1].is_over = True
    uploads.note(_Event(), second)
    assert uploads.reading(second)[0] is events[1]
    assert uploads.take([first]) == {0: [events[0], events[2]]}
    events[0].is_over = events[2].is_over = True  # taken before
    uploads.note(last := _Event(), first)
    assert uploads.reading(first) == [last]
    assert uploads.reading(second)[0] is events[3]


def test_what_is_known_of_a_segment_is_not_looked_through_at_each_operator(monkeypatch):
    """Where segments were measured and their sequence is new, there is no plan, and each operator asks."""
    layers = 40
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(layers)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(4, 8).to(device())
    looks = []
    is_sampled = Period.is_sampled.fget
    with hetero.manage(model, optimizer, device_budget="64KiB"):
        for micro_batches in (1, 2, 3):
            if micro_batches == 3:  # all of its segments are known but the last forward
                monkeypatch.setattr(
                    Period, "is_sampled", property(lambda p: looks.append(p) or is_sampled(p))
                )
            for _ in range(micro_batches):
                model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.accelerator.synchronize()
    assert len(looks) < 50 * layers
