"""ResNet50, GPT-2 and Llama under budgets that hold neither their parameters nor what forward saves: the same bits.

The device itself has no more memory than the budget, so that its allocator refuses whatever would pass it.
"""

import gc

import pytest
import repository
import small_transformers
import torch
from accelerators import GAPS, ON_CUDA, clear_races, device, races, set_memory_limit
from torch.nn import functional
from twins import adamw, assert_same, plain

import hetero

STEPS = 5  # the first is measured, the others are planned
VOCABULARY = 256
ROOM = 700 << 20  # of the device, for the unmanaged run


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, foreach=False)


def resnet50():
    return repository.load("examples/cnn.py").resnet("resnet50")


def gpt2():
    return small_transformers.gpt2(width=128, layers=6, heads=4, vocabulary=VOCABULARY, length=128)


def llama():
    return small_transformers.llama(width=128, inner=320, layers=6, heads=4, groups=2, vocabulary=VOCABULARY)


def image_loss(model, target):
    images, labels = torch.randn(2, 3, 32, 32).to(target), torch.randint(10, (2,)).to(target)
    return functional.cross_entropy(model(images), labels)


def text_loss(model, target):
    tokens = torch.randint(VOCABULARY, (4, 128)).to(target)
    return model(input_ids=tokens, labels=tokens).loss


def train(model, optimizer, target, loss_of, steps=STEPS):
    """Loss and gradients of each step."""
    torch.manual_seed(1)
    seen = []
    for _ in range(steps):
        loss = loss_of(model, target)
        loss.backward()
        seen.append(plain([loss, *[p.grad for p in model.parameters()]]))
        del loss  # and with it the graph
        optimizer.step()
        optimizer.zero_grad()
    return seen


def values(model):
    return [t.detach().cpu().clone() for t in (*model.parameters(), *model.buffers())]


def unmanaged(build, loss_of, make_optimizer):
    target = device(memory=ROOM)
    torch.manual_seed(0)
    model = build().to(target)
    torch.accelerator.reset_peak_memory_stats()
    seen = train(model, make_optimizer(model), target, loss_of)
    return seen, values(model), torch.accelerator.max_memory_allocated()


# The transformers' links are so slow that copies are late wherever they can be.
CASES = {
    "resnet50": (resnet50, image_loss, sgd, 0.2, "4GiB/s"),
    "gpt2": (gpt2, text_loss, adamw, 0.2, "300MiB/s"),
    "llama": (llama, text_loss, adamw, 0.2, "300MiB/s"),
}


@pytest.mark.parametrize("name", CASES)
def test_training_a_model_that_fits_neither_way_is_exact(name):
    build, loss_of, make_optimizer, share, bandwidth = CASES[name]
    seen, state, peak = unmanaged(build, loss_of, make_optimizer)
    gc.collect()
    budget = int(share * peak)
    target = device(memory=ROOM, bandwidth=bandwidth, latency="10us")
    before = torch.accelerator.memory_allocated()
    torch.manual_seed(0)
    model = build()
    optimizer = make_optimizer(model)
    torch.accelerator.reset_peak_memory_stats()
    clear_races()
    manager = hetero.manage(model, optimizer, device=target, device_budget=before + budget)
    set_memory_limit(before + budget)
    try:
        got = train(model, optimizer, target, loss_of)
        torch.accelerator.synchronize()
        assert torch.accelerator.max_memory_allocated() <= before + budget + GAPS
        assert manager.stats.peak_device_bytes <= before + budget + GAPS
        assert_same(got, seen, "observed")
        assert_left(manager)
    finally:
        if not ON_CUDA:
            set_memory_limit(ROOM)
        manager.close()
    assert_same(values(model), state, "state")
    assert races() == []


def assert_left(manager):
    """In the last iteration, which had a plan, both kinds of tensors left, and came back."""
    stm = manager._stm
    stm.close_books()
    last, plan = stm.plans.last_segments, stm.plans.last
    assert plan is not None
    assert not any(segment.sampled for segment in last)
    periods = [period for segment in last for period in segment.periods]
    assert sum(period.activation_out_bytes for period in periods) > 0
    assert sum(period.activation_in_bytes for period in periods) > 0
    assert sum(period.fetched_bytes for period in periods) > 0
    first = len(stm.tensors)
    leaving = [index for actions in plan.schedule.actions for index in actions.evict]
    assert any(index < first for index in leaving)
    assert any(index >= first for index in leaving)
