"""Giving device memory back after warm-up, so that several jobs share one device."""

import gc
import threading

import pytest
import torch
from accelerators import GAPS, ON_CUDA, SEGMENTS
from torch import nn
from twins import adamw, device

import hetero
from hetero.devices import virtual

WIDTH, DEPTH, BATCH = 256, 20, 16
LAYER = WIDTH * WIDTH * 4
MEMORY = 10 * LAYER
ITERATIONS = 6


def build():
    """A frozen trunk, whose copies are worth keeping, so that the manager fills its budget; a head that learns."""
    trunk = nn.Sequential(
        *(nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)),
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(DEPTH)),
    )
    return nn.Sequential(trunk.requires_grad_(False), nn.Linear(WIDTH, WIDTH))


def batches():
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(BATCH, WIDTH, generator=generator) for _ in range(ITERATIONS)]


def iterate(model, optimizer, batch, target):
    loss = model(batch.to(target)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach().cpu()


def loop(model, optimizer, target):
    return [iterate(model, optimizer, batch, target) for batch in batches()]


class Turns:
    """Threads take turns, an iteration each; who is done or has failed drops out."""

    def __init__(self, count):
        self._condition = threading.Condition()
        self._waiting = list(range(count))

    def take(self, who):
        with self._condition:
            assert self._condition.wait_for(lambda: self._waiting[0] == who, timeout=300)

    def pass_on(self, *, leave=False):
        with self._condition:
            first = self._waiting.pop(0)
            if not leave:
                self._waiting.append(first)
            self._condition.notify_all()


def train(who, turns, target, *, trim, results):
    """One job: a model of its own, trained on the shared device, an iteration a turn."""
    turns.take(who)
    try:
        torch.manual_seed(who)
        model = build()
        optimizer = adamw(model)
        losses = []
        with hetero.manage(model, optimizer, device=target, device_budget=MEMORY) as manager:
            for done, batch in enumerate(batches()):
                losses.append(iterate(model, optimizer, batch, target))
                if done == 2 and trim is not None:
                    manager.trim(trim)
                # The first job has warmed up before the second one begins.
                if done >= 2:
                    turns.pass_on()
                    turns.take(who)
        results[who] = (losses, [p.detach().clone() for p in model.parameters()])
    except Exception as error:
        results[who] = error
    finally:
        turns.pass_on(leave=True)


def share(trim):
    target = device(memory="256MiB")
    gc.collect()
    virtual.clear_races()
    free = torch.accelerator.memory_allocated()
    virtual.set_memory_limit(free + MEMORY)
    results, turns = {}, Turns(2)
    threads = [
        threading.Thread(target=train, args=(who, turns, target), kwargs={"trim": trim, "results": results})
        for who in range(2)
    ]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert torch.accelerator.max_memory_allocated() <= free + MEMORY
        assert virtual.races() == []
    finally:
        gc.collect()
        virtual.set_memory_limit("256MiB")
    return results


@pytest.mark.skipif(
    ON_CUDA, reason="the device's memory has to be all that two jobs share: a real one has more"
)
@pytest.mark.parametrize("trim", [None, MEMORY // 2])
def test_two_training_threads_share_a_device(trim):
    results = share(trim=trim)
    for who in range(2):
        assert not isinstance(results[who], Exception), results[who]
        torch.manual_seed(who)
        model = build()
        losses = loop(model, adamw(model), torch.device("cpu"))
        assert all(torch.equal(a, b) for a, b in zip(results[who][0], losses, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(results[who][1], model.parameters(), strict=True))


def test_trim_gives_back_what_copies_hold_and_the_lower_budget_holds():
    target = device()
    gc.collect()
    free = torch.accelerator.memory_allocated()
    model = build()
    optimizer = adamw(model)
    with hetero.manage(model, optimizer, device=target, device_budget=free + MEMORY) as manager:
        torch.accelerator.empty_cache()
        assert manager.trim() == 0  # before any plan
        loop(model, optimizer, target)
        # What goes back to the device is reserved memory: without segments, what is in use.
        before = torch.accelerator.memory_reserved()
        given_back = manager.trim(free + MEMORY // 2)
        assert given_back == before - torch.accelerator.memory_reserved()
        assert given_back > 0 or ON_CUDA or SEGMENTS  # all of it may lie beside something that stays
        torch.accelerator.reset_peak_memory_stats()
        loop(model, optimizer, target)
        assert torch.accelerator.max_memory_allocated() <= free + MEMORY // 2


@pytest.mark.parametrize("sizes", [(0.8, 0.6), (0.5,), (0.65,), (0.6, 0.4)])
@pytest.mark.parametrize("budget", [4.0, 1.0, 0.9])
def test_what_lives_on_the_device_makes_way_at_once(budget, sizes):
    """Of the peak where everything fits."""
    target = device()

    def run(budget, sizes):
        gc.collect()
        torch.manual_seed(0)
        model = nn.Sequential(
            *(nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(3))
        )
        optimizer = adamw(model)
        free = torch.accelerator.memory_allocated()
        losses, batches = [], torch.Generator().manual_seed(1)
        with hetero.manage(model, optimizer, device=target, device_budget=free + budget) as manager:
            for size in (None, *sizes):
                if size is not None:
                    manager.trim(free + size)
                torch.accelerator.reset_peak_memory_stats()
                for _ in range(5):
                    loss = model(torch.randn(8, 64, generator=batches).to(target)).square().mean()
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    losses.append(loss.item())
                _ = manager.stats  # what was queued is done
                peak = torch.accelerator.max_memory_allocated() - free
                assert peak <= (budget if size is None else size) + GAPS
        return losses, peak

    expected, peak = run(16 << 20, (16 << 20,) * len(sizes))
    assert run(int(budget * peak), [int(min(1.0, budget) * size * peak) for size in sizes])[0] == expected


def test_trim_refuses_what_it_cannot_keep():
    target = device()
    model = build()
    optimizer = adamw(model)
    used = torch.accelerator.memory_allocated()
    with hetero.manage(model, optimizer, device=target, device_budget=used + MEMORY) as manager:
        loop(model, optimizer, target)
        with pytest.raises(hetero.ConfigError, match="only gives back"):
            manager.trim(used + 2 * MEMORY)
        with pytest.raises(hetero.BudgetError, match="pass at least"):
            manager.trim(LAYER)
        loop(model, optimizer, target)
    assert manager.trim() == manager.trim(LAYER) == 0  # there is nothing to give any more


def test_gradients_on_their_way_keep_to_the_budget():
    # Two gradients of the largest parameter and its copy are more than the budget: they go one after the other.
    target = device()
    gc.collect()
    budget = torch.accelerator.memory_allocated() + 8 * LAYER
    model = build().requires_grad_(True)
    optimizer = adamw(model)
    with hetero.manage(model, optimizer, device=target, device_budget=budget):
        loop(model, optimizer, target)
        torch.accelerator.reset_peak_memory_stats()
        loop(model, optimizer, target)
        assert torch.accelerator.max_memory_allocated() <= budget + GAPS


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.takes_second = False

    def forward(self, x):
        x = self.first(x)
        return self.second(torch.tanh(x)) if self.takes_second else x


def test_while_one_kind_of_iteration_that_shares_segments_with_another_is_measured_again():
    target = device()
    gc.collect()
    torch.manual_seed(0)
    model = Branches()
    optimizer = adamw(model)

    def step(micro_batches):
        for _ in range(micro_batches):
            model(torch.randn(BATCH, WIDTH).to(target)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    with hetero.manage(
        model, optimizer, device=target, device_budget="1800KiB", device_homes=False
    ) as manager:
        for micro_batches in (1, 2, 1, 2):
            step(micro_batches)
        model.takes_second = True
        step(2)
        manager.trim()
        model.takes_second = False
        for micro_batches in (1, 2, 1, 2):
            step(micro_batches)
        manager.trim()
