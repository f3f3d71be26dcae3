"""Two managers on one device, each with parameters that live there: what of one's does, the other plans beside."""

import gc

import pytest
import torch
from accelerators import device
from hypothesis import given
from hypothesis import strategies as st
from loops import batch, mlp
from residents import living
from several import in_turn, twins, unmanaged_peak
from torch.utils._python_dispatch import TorchDispatchMode
from twins import adamw

import hetero
from hetero.eviction import HomeCost
from hetero.stm.neighbours import HomeBytes
from hetero.stm.plans import homechoice
from hetero.stm.plans.othershomes import OthersHomes
from hetero.stm.plans.planbook import _without
from hetero.stm.running import unseen
from hetero.stm.running.retry import Retry
from hetero.stm.step.hoststep import HostStep


@pytest.fixture
def chooses_at_once(homes_on_device, monkeypatch):
    """Whatever choosing takes of the time so far."""
    monkeypatch.setattr(homechoice, "_SHARE_OF_TIME", float("inf"))
    monkeypatch.setattr(homechoice, "_SHARE_OF_FURTHER", float("inf"))


def two():
    models = mlp(depth=3), mlp(depth=3)
    return models, [adamw(model) for model in models]


def adversaries(models, optimizers, target, steps=24, rows=8):
    """The generator's backward goes through the discriminator."""
    (generator, discriminator), (for_generator, for_discriminator) = models, optimizers
    seen = []
    for _ in range(steps):
        made = generator(batch(target, rows))
        loss = discriminator(batch(target, rows)).mean() - discriminator(made.detach()).mean()
        loss.backward()
        for_discriminator.step()
        for_discriminator.zero_grad()
        discriminator(generator(batch(target, rows))).mean().neg().backward()
        for_generator.step()
        for_generator.zero_grad()
        for_discriminator.zero_grad()
        seen.append(loss.item())
    return seen


def by_one_backward(models, optimizers, target, steps=16):
    seen = []
    for _ in range(steps):
        loss = sum(model(batch(target)).square().mean() for model in models)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        seen.append(loss.item())
    return seen


def one_after_the_other(models, optimizers, target, steps=24):
    return in_turn(models, optimizers, target, steps=steps)


LOOPS = [adversaries, by_one_backward, one_after_the_other]


class Watched:
    """``loop``, managed: ``moved`` and ``unplanned`` in its last steps, and who lives on the device after them."""

    def __init__(self, loop, budget, last=4):
        gc.collect()
        torch.manual_seed(0)
        models, optimizers = two()
        target = device()
        before = torch.accelerator.memory_allocated()
        self.managers = [
            hetero.manage(model, optimizer, device=target, device_budget=before + budget)
            for model, optimizer in zip(models, optimizers, strict=True)
        ]
        loop(models, optimizers, target)
        moved, unplanned = self._moved(), self._unplanned()
        loop(models, optimizers, target, steps=last)
        self.moved = self._moved() - moved
        self.unplanned = self._unplanned() - unplanned
        self.living = [living(manager) for manager in self.managers]
        for manager in self.managers:
            manager.close()

    def _moved(self):
        stats = [manager.stats for manager in self.managers]
        return sum(each.total_fetched_bytes + each.total_written_bytes for each in stats)

    def _unplanned(self):
        return sum(manager.stats.unplanned_fetches for manager in self.managers)


@pytest.mark.usefixtures("homes_on_device")
@pytest.mark.parametrize("share", [0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1])
@pytest.mark.parametrize("loop", LOOPS)
def test_whatever_lives_there_the_numbers_are_the_same_within_the_budget(loop, share):
    twins(loop, two, int(share * unmanaged_peak(loop, two)))


@pytest.mark.usefixtures("chooses_at_once")
@pytest.mark.parametrize("share", [0.6, 0.7, 0.8, 0.9])
@pytest.mark.parametrize("loop", LOOPS)
def test_both_have_some_there_and_follow_their_plans(loop, share):
    watched = Watched(loop, int(share * unmanaged_peak(loop, two)))
    assert all(watched.living)
    assert watched.unplanned == 0


@pytest.mark.usefixtures("chooses_at_once")
def test_adversaries_live_there_where_both_fit():
    """They do not settle: each is in the middle of an iteration whenever the other begins one."""
    watched = Watched(adversaries, int(1.05 * unmanaged_peak(adversaries, two)))
    assert watched.moved == 0


@pytest.mark.usefixtures("homes_on_device")
def test_a_larger_batch_has_the_room_of_what_lived_there():
    def loop(models, optimizers, target):
        seen = adversaries(models, optimizers, target, steps=12)
        return seen + adversaries(models, optimizers, target, steps=8, rows=128)

    twins(loop, two, int(0.9 * unmanaged_peak(adversaries, two)))


def test_a_step_is_deferred_where_only_another_manager_guards_what_runs(monkeypatch):
    deferred = []
    may_defer = HostStep._may_defer

    def noted(self, *given):
        deferred.append(may_defer(self, *given))
        return deferred[-1]

    monkeypatch.setattr(HostStep, "_may_defer", noted)
    twins(adversaries, two, int(0.5 * unmanaged_peak(adversaries, two)))
    assert deferred
    assert all(deferred)


class Counting(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("is_inner", [False, True])
def test_a_mode_of_the_users_sees_the_step_whatever_guards_what_runs(is_inner, monkeypatch):
    guard = object.__new__(Retry)  # as far as the stack of modes knows it
    outer, inner = (guard, Counting()) if is_inner else (Counting(), guard)
    monkeypatch.setattr(
        Retry, "__torch_dispatch__", lambda self, func, types, args=(), kwargs=None: func(*args)
    )
    with outer, inner:
        assert unseen.is_seen()
    with guard:
        assert not unseen.is_seen()


# -- what plans count --------------------------------------------------------------------------------------


@given(looks=st.lists(st.integers(0, 3), max_size=60))
def test_more_counts_at_once_and_less_after_eight_iterations(looks):
    now = [0]
    others = OthersHomes(lambda: HomeBytes(now[0], 2 * now[0]))
    planned, less = 0, []
    for nbytes in looks:
        now[0] = nbytes
        before = planned
        less = [*less, nbytes] if nbytes < planned else []
        if nbytes > planned:
            planned = nbytes
        elif len(less) == 8:
            planned, less = max(less), []
        assert others.look() is (planned != before)
        assert others.nbytes == HomeBytes(planned, 2 * planned)
        assert others.more_than(others.nbytes.total) == 0


def test_a_plan_that_lacks_room_makes_others_leave_and_is_made_again_only_if_they_have():
    here, asked = [100], []

    def leave(nbytes):
        asked.append(nbytes)
        here[0] -= 40

    others = OthersHomes(lambda: HomeBytes(here[0], 0), send_home=leave)
    assert not others.make_room(7)  # plans count none
    assert others.look()
    assert others.make_room(7)
    assert asked == [7]
    assert others.nbytes.total == 60
    others.send_home = lambda nbytes: None  # busy on another thread
    assert not others.make_room(7)


@given(
    sizes=st.lists(st.integers(1, 100), min_size=1, max_size=40),
    unknown=st.sets(st.integers(0, 39)),
    short=st.integers(1, 3000),
)
def test_of_homes_without_room_the_last_ones_go_as_many_as_it_takes(sizes, unknown, short):
    def cost(nbytes):
        return HomeCost(nbytes=nbytes, gradient_nbytes=0, step_nbytes=0, step_seconds=0.0)

    costs = {index: cost(nbytes) for index, nbytes in enumerate(sizes) if index not in unknown}
    kept = _without(tuple(range(len(sizes))), costs, short)
    known = tuple(costs)
    assert kept == known[: len(kept)]
    freed = sum(costs[index].nbytes for index in known[len(kept) :])
    assert not kept or freed >= short
    assert len(sizes) - len(kept) >= max(1, len(sizes) // 8)
    if kept != known and len(sizes) - len(kept) > max(1, len(sizes) // 8):
        assert freed - costs[known[len(kept)]].nbytes < short  # no more than that


@pytest.mark.usefixtures("chooses_at_once")
def test_what_others_have_there_is_shown_and_is_no_part_of_what_was_measured():
    models, optimizers = two()
    target = device()
    gc.collect()
    used = torch.accelerator.memory_allocated()
    managers = [
        hetero.manage(model, optimizer, device=target, device_budget=used + (64 << 20))
        for model, optimizer in zip(models, optimizers, strict=True)
    ]
    for manager in managers:
        manager._settled.forbid()
    one, other = managers
    in_turn(models, optimizers, target, steps=8)
    there = other._stm.sharing.home_bytes()
    assert there.total > 0
    plan = one._stm.plans.last
    assert plan.others_home_bytes == there.total
    one._stm.plans.measure_again(plan.keys, for_good=True)
    in_turn(models, optimizers, target, steps=3)
    again = one._stm.plans.get(plan.keys)
    assert again.others_home_bytes == there.total
    periods = [p for key in again.keys for p in one._stm.plans.samples[key][-1].periods]
    assert all(p.others_home_bytes == there.total for p in periods)
    assert max(p.non_model_bytes for p in periods) < there.total
    assert min(again.non_model) >= there.total
    assert min(period.device_non_model_bytes for period in one.stats.periods) >= there.total
    for manager in managers:
        manager.close()
