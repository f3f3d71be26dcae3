"""Iterations that leave out some of what was planned, or have more in them: experts without tokens, layers dropped."""

import copy
import gc
import itertools
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from accelerators import ON_CUDA, SEGMENTS
from blocks import Block
from hypothesis import given
from hypothesis import strategies as st
from loops import WithMore, batch, losses
from torch import nn
from twins import adamw, assert_twins, device

import hetero
from hetero.eviction import Actions
from hetero.stm.plans.departures import Departures
from hetero.stm.plans.planbook import PlanBook
from hetero.stm.running.course import in_the_end

WIDTH = 64
EVERY = tuple(range(6))


class Parts(nn.Module):
    """Of its parts, ``chosen`` run, as nothing that the caller gives tells."""

    def __init__(self, part):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.parts = nn.ModuleList(part() for _ in EVERY)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.chosen = EVERY

    def forward(self, x):
        x = self.first(x)
        for index in self.chosen:
            x = x + self.parts[index](x)
        return self.last(x)


def expert():
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))


def experts():
    return Parts(expert)


def blocks():
    return Parts(Block)


def steps(model, optimizer, target, paths, rows=8, note=lambda: None):
    seen = []
    for path in paths:
        model.chosen = path
        loss = F.mse_loss(model(torch.randn(rows, WIDTH).to(target)), torch.zeros(rows, WIDTH).to(target))
        loss.backward()
        seen.append([loss.detach().cpu(), *[p.grad for p in model.parameters()]])
        optimizer.step()
        optimizer.zero_grad()
        note()
    return seen


def without(*left_out):
    return tuple(index for index in EVERY if index not in left_out)


PATHS = [
    EVERY,
    EVERY,
    EVERY,
    without(3),
    without(0, 5),
    EVERY,
    without(1, 2, 3),
    (),
    without(4),
    EVERY,
    (5, 0, 2),
]


@pytest.mark.parametrize("share", [0.4, 0.7])
def test_numbers_and_budget_whatever_runs(share):
    assert_twins(experts, lambda *job: steps(*job, PATHS), share=share)


@pytest.mark.parametrize("share", [0.4, 0.7])
def test_numbers_and_budget_where_saved_tensors_move(share):
    assert_twins(blocks, lambda *job: steps(*job, PATHS, rows=512), share=share)


class Watched:
    """A managed model that has its plan; ``run`` tells what each iteration fetched: bytes, and how often unplanned."""

    def __init__(self, build=experts, share=0.6, first=EVERY, rows=8, count=12, row_bytes=8 * 1024):
        # Before memory is counted: it waits for what is about to go, and libraries take theirs in it.
        target = device()
        gc.collect()
        self.rows = rows
        torch.manual_seed(0)
        self.model = build()
        self.optimizer = adamw(self.model)
        nbytes = sum(p.nbytes for p in self.model.parameters())
        budget = torch.accelerator.memory_allocated() + int(share * nbytes) + rows * row_bytes
        self.manager = hetero.manage(
            self.model, self.optimizer, device=target, device_budget=budget, device_homes=False
        )
        self.run([first] * count)  # twelve: until nothing is measured any more

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.manager.close()

    def run(self, paths):
        fetched = []

        def note():
            stats = self.manager.stats
            fetched.append((stats.total_fetched_bytes, stats.unplanned_fetches))

        before = self.manager.stats
        last = before.total_fetched_bytes, before.unplanned_fetches
        steps(self.model, self.optimizer, device(), paths, self.rows, note)
        rows = []
        for now in fetched:
            rows.append((now[0] - last[0], now[1] - last[1]))
            last = now
        return rows

    def known(self, path):
        """After a forward: how many saved tensors the plan knows, and how many there are."""
        activations = self.manager._stm.activations
        self.model.chosen = path
        out = self.model(torch.randn(self.rows, WIDTH).to(device()))
        count = len(activations._by_index), len(activations._live)
        out.square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return count

    @property
    def planned(self):
        """Parameters that the plan knows of."""
        return {index for moment in self.manager._stm.plans.last.operands for index in moment}


def test_who_is_left_out_was_fetched_in_vain_and_nothing_else():
    with Watched() as watched:
        [(whole, unplanned)] = watched.run([EVERY])
        assert unplanned == 0
        part = sum(p.nbytes for p in watched.model.parts[3].parameters())
        for path in (without(3), without(0, 5), without(1, 2)):
            for nbytes, unplanned in watched.run([path, EVERY]):
                assert unplanned == 0
                assert nbytes <= whole + 2 * part * (len(EVERY) - len(path))


def test_who_was_not_planned_for_is_all_that_is_fetched_unplanned():
    with Watched(first=without(3)) as watched:
        assert watched.run([without(3)])[0][1] == 0
        [(_, unplanned)] = watched.run([EVERY])
        assert 0 < unplanned <= 2 * len(list(watched.model.parts[3].parameters()))


def test_what_is_left_out_for_good_is_planned_for_no_longer():
    with Watched() as watched:
        mine = len(list(watched.model.parameters())), len(list(watched.model.parts[3].parameters()))
        assert len(watched.planned) == mine[0]
        # Others in between, and never all: part 3 is always among them.
        watched.run([without(3), without(2, 3)] * 8)
        watched.run([without(3)] * 4)
        assert len(watched.planned) == mine[0] - mine[1]


def test_what_comes_back_now_and_then_stays_planned():
    with Watched() as watched:
        paths = [without(3), without(2, 3), without(3), EVERY]
        watched.run(paths)  # what of an iteration is still there in the next is measured
        rows = watched.run(paths * 6)
        assert [unplanned for _, unplanned in rows] == [0] * len(rows)
        assert len(watched.planned) == len(list(watched.model.parameters()))


def test_who_has_more_while_a_plan_is_verified_is_planned_at_once():
    with Watched(first=without(3), count=1) as watched:
        watched.run([EVERY])
        assert len(watched.planned) == len(list(watched.model.parameters()))
        paths = [without(3), EVERY, without(0, 5), EVERY]
        watched.run(paths)  # what of an iteration is still there in the next is measured
        rows = watched.run(paths * 2)
        assert [unplanned for _, unplanned in rows] == [0] * len(rows)


def test_who_is_measured_again_and_has_less_leaves_the_longer_plan():
    with Watched(first=without(3)) as watched:
        before = watched.planned
        while len(watched.manager._stm.plans):
            watched.run([EVERY])
        watched.run([without(0, 3)] * 2)
        assert watched.planned == before


def test_who_is_measured_again_and_has_something_else_is_planned_for():
    with Watched(first=without(3)) as watched:
        while len(watched.manager._stm.plans):
            watched.run([EVERY])
        watched.run([without(0)] * 2)
        mine = [len(list(part.parameters())) for part in (watched.model, watched.model.parts[0])]
        assert len(watched.planned) == mine[0] - mine[1]


def test_saved_tensors_are_known_again_after_what_was_left_out():
    with Watched(blocks, rows=512) as watched:
        all_known, _ = watched.known(EVERY)
        some_known, alive = watched.known(without(3))
        assert alive - some_known == 0
        assert some_known < all_known


class Shares(nn.Module):
    """Each part has ``chosen`` 32nds of the rows, as experts have."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(Block() for _ in EVERY)
        self.chosen = ()

    def forward(self, x):
        rows = x.split([share * len(x) // 32 for share in self.chosen])
        return torch.cat([part(its) for part, its in zip(self.parts, rows, strict=True)])


def test_saved_tensors_are_known_whatever_share_of_the_rows_they_are_of():
    alike, others = (5, 5, 6, 6, 5, 5), [(4, 6, 6, 5, 6, 5), (6, 5, 5, 5, 5, 6), (5, 5, 7, 4, 6, 5)]
    # An allocator's segments, of up to 20 MiB, are to be small beside the budget: what strays runs under a cap on them.
    rows = 2048 * (32 if ON_CUDA or SEGMENTS else 1)
    with Watched(Shares, share=0.5, first=alike, rows=rows, row_bytes=2500) as watched:
        assert watched.manager.stats.activation_in_bytes > 0
        for path in (alike, *others):
            known, alive = watched.known(path)
            assert known >= alive - 1  # were they known by their sizes, it would be a third


@given(
    st.lists(st.tuples(st.sets(st.integers(0, 5)), st.sets(st.integers(0, 5))), max_size=6),
    st.sets(st.integers(0, 5)),
)
def test_what_is_passed_over_comes_to_the_same_as_one_after_the_other(passed, there):
    one_by_one = set(there)
    for evict, fetch in passed:
        one_by_one = one_by_one - evict | fetch
    at_once = in_the_end([Actions(evict=tuple(evict), fetch=tuple(fetch)) for evict, fetch in passed])
    assert (there - set(at_once.evict)) | set(at_once.fetch) == one_by_one
    assert not set(at_once.evict) & set(at_once.fetch)


class Heads(nn.Module):
    """One of two that are alike gives the result."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(*[nn.Linear(2 * WIDTH, 2 * WIDTH) for _ in range(40)])
        self.heads = nn.ModuleList(nn.Linear(2 * WIDTH, 16 * WIDTH) for _ in range(2))
        self.chosen = 0

    def forward(self, x):
        return self.heads[self.chosen](self.body(x))


@pytest.mark.parametrize("trains", [True, False])
def test_the_callers_part_has_its_room_where_the_last_operator_was_another(trains):
    def loop(model, optimizer, target):
        seen = []
        for chosen in [0, 0, 0, 0, 0, 1, 0, 1, 1, 0]:
            for trained in (True,) if trains else (False, True):
                model.chosen = 0 if trained is not trains else chosen
                with torch.set_grad_enabled(trained):
                    y = model(torch.randn(256, 2 * WIDTH).to(target))
                with torch.no_grad():  # takes much more than anything in the model
                    seen.append(y.repeat(6, 1).softmax(-1).amax())
                if trained:
                    y.square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
        return seen

    assert_twins(Heads, loop, share=0.55)


# -- when so much speaks against a plan that it is made anew ------------------------------------------------


def measured(iterations, parameters=16):
    """Which of ``iterations`` are followed by one that is measured: what each lost, or which moments it left out."""
    departures, again = Departures(), []
    for number, iteration in enumerate(iterations):
        if isinstance(iteration, int):
            has_departed = departures.note_more("keys", lost=iteration, parameters=parameters)
        else:
            has_departed = departures.note_less("keys", frozenset(iteration))
        if has_departed:
            departures.note_measured("keys")
            again.append(number)
    return again


def test_an_iteration_that_lost_everything_is_measured_at_once_and_ever_less_often_after_it():
    assert measured([16] * 20) == [0, 2, 6, 14]


def test_little_losses_are_added_up():
    assert measured([5] * 8) == [3]
    assert measured([0] * 8) == [7]


def test_what_is_left_out_by_all_of_eight_in_a_row_is_gone():
    assert measured([{1, 2}, {2}, {2, 3}] * 3) == [7]
    assert measured([{1}, {2}] * 30) == measured([()] * 30) == []
    assert measured(([{1}] * 7 + [()]) * 5) == []
    assert measured(([{1}] * 7 + [0]) * 5) == []


@given(st.lists(st.integers(0, 40) | st.frozensets(st.integers(0, 3)), max_size=300))
def test_however_an_iteration_changes_it_is_measured_seldom(iterations):
    again = measured(iterations)
    for times, (before, after) in enumerate(zip([-1, *again], again, strict=False)):
        lost = [row for row in iterations[before + 1 : after + 1] if isinstance(row, int)]
        in_vain = [row for row in iterations[before + 1 : after + 1] if not isinstance(row, int)]
        assert sum(max(row, 2) for row in lost) >= 16 << times or len(in_vain) >= 8 << times


class MoreAtFirst(WithMore):
    """In the first of two micro-batches, as a model that does something once for all of them."""

    def forward(self, x):
        self.more = not self.more
        return super().forward(x)


def test_who_does_more_in_the_first_micro_batch_is_not_measured_for_ever(monkeypatch):
    learned = []
    learn = PlanBook.learn

    def learns(self, keys, segments):
        known = learn(self, keys, segments)
        learned.append((known, all(segment.sampled for segment in segments)))
        return known

    monkeypatch.setattr(PlanBook, "learn", learns)

    assert_twins(MoreAtFirst, partial(losses, steps=12, micro_batches=2))
    assert sum(known for known, _ in learned) <= 4, learned
    assert not all(sampled for _, sampled in learned), "each iteration is measured"


def test_a_graph_that_is_kept_leaves_less_room_for_copies():
    """And what backward makes beside it, once one has failed amid it."""

    def build():
        parts = [part for _ in range(3) for part in (nn.Linear(64, 64), nn.GELU(), nn.BatchNorm1d(64))]
        return nn.Sequential(*parts)

    def loop(model, optimizer, target):
        seen, fails = [], False

        def fail(gradient):
            nonlocal fails
            if fails:
                fails = False
                raise ArithmeticError

        def watch(module, inputs, output):
            output.register_hook(fail)

        handle = model[0].register_forward_hook(watch)
        for iteration in range(12):
            for micro_batch in range(3):
                keeps = iteration in (5, 9) and micro_batch == 0
                loss, fails = model(batch(target, 300)).square().mean(), keeps
                if keeps:
                    with pytest.raises(ArithmeticError):
                        loss.backward(retain_graph=True)
                    model.zero_grad()  # how much has been added to gradients is undefined
                loss.backward()
                seen.append(loss)
            optimizer.step()
            optimizer.zero_grad()
        handle.remove()
        return seen

    def sgd(model):
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, foreach=False)

    assert_twins(build, loop, share=0.8, make_optimizer=sgd)


def deep():
    first, last = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
    block = first, nn.GELU(), last, nn.LayerNorm(WIDTH)
    return nn.Sequential(*(copy.deepcopy(layer) for _ in range(4) for layer in block))


@pytest.mark.parametrize("share", [0.42, 0.5, 0.65])
@pytest.mark.parametrize("returned", [False, True])
def test_backwards_for_one_part_of_the_parameters_and_then_another_keep_the_budget(returned, share):
    def loop(model, optimizer, target):
        seen = []
        for step in range(8):
            part = list((model[-4:] if step % 2 else model[0]).parameters())
            loss = model(torch.randn(8, WIDTH).to(target)).square().mean()
            if returned:
                for parameter, gradient in zip(part, torch.autograd.grad(loss, part), strict=True):
                    parameter.grad = gradient
                del gradient
            else:
                loss.backward(inputs=part)
            seen.append(loss)
            optimizer.step()
            optimizer.zero_grad()
        return seen

    assert_twins(deep, loop, share=share)


@pytest.mark.parametrize("share", [0.42, 0.65])
def test_backwards_for_more_sets_of_parameters_than_have_plans_keep_the_budget(share):
    def loop(model, optimizer, target):
        seen = []
        trained = [layer for layer in model if list(layer.parameters())]
        for chosen in list(itertools.combinations(trained, 2))[:24]:
            part = [parameter for layer in chosen for parameter in layer.parameters()]
            edges = [torch.autograd.graph.get_gradient_edge(parameter) for parameter in part]
            loss = model(torch.randn(8, WIDTH).to(target)).square().mean()
            loss.backward(inputs=part if len(seen) % 2 else edges)
            seen.append(loss)
            optimizer.step()
            optimizer.zero_grad()
        return seen

    manager = assert_twins(deep, loop, share=share)
    assert len(manager._stm.plans) <= 10  # and one of those that came after them


def test_of_iterations_that_follow_their_plan_nothing_is_kept():
    departures = Departures()
    for kind in range(100):  # such as those of sequences, of which each has a length of its own
        for is_much in (False, True, False):
            assert not departures.note_unused(kind, is_much=is_much, has_passed=False)
        assert not departures.note_less(kind, frozenset())
    assert not any(vars(departures).values())


def test_what_is_unused_for_long_is_given_up_and_later_after_twice_as_long():
    departures, again = Departures(), []
    for number in range(300):
        if departures.note_unused("keys", is_much=number != 20, has_passed=False):
            departures.note_measured("keys")
            again.append(number)
    assert again == [20 + 32, 20 + 32 + 64, 20 + 32 + 64 + 128]
