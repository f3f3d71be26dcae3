"""Out of the settled state for other inputs or for want of memory: the same numbers, and back into it where that is
right."""

import functools
import gc
import time

import pytest
import torch
from accelerators import GAPS, ON_CUDA, STEPS_AT_HOME, races, set_memory_limit
from backward_ends import wait_for_backward_ends
from loops import batch, losses, mlp, square_loss
from settling import (
    BLOCKS,
    PLENTY,
    assert_leaves_and_comes_back,
    is_intercepted,
    managed_mlp,
    settle,
    step,
)
from torch import nn
from twins import adamw, assert_same, assert_twins, managed, plain, unmanaged

import hetero

pytestmark = pytest.mark.usefixtures("homes_on_device")


# -- other inputs --------------------------------------------------------------------------------------


@pytest.mark.skipif(ON_CUDA, reason=BLOCKS)
def test_what_a_graph_of_before_holds_is_there_without_it_as_well():
    """Else what was measured beside it would be too little once it is gone."""
    model, optimizer, manager, target = managed_mlp()
    with manager:
        settle(model, optimizer, manager, target)
        loss = step(model, optimizer, target)
        step(model, optimizer, target, rows=16)
        assert is_intercepted(model)
        gc.collect()
        value, before = loss.detach(), torch.accelerator.memory_allocated()
        del loss
        assert torch.accelerator.memory_allocated() == before
        del value


def test_a_batch_of_another_size():
    def loop(model, optimizer, target, note):
        seen = losses(model, optimizer, target, 6)
        note(True)
        for rows in (11, 8, 11, 11, 8, 8):
            seen.append(step(model, optimizer, target, rows))
            if len(seen) == 7:
                note(False)
        note(True)  # both sizes are known now
        seen.append(step(model, optimizer, target, 11))
        note(True)
        return seen

    assert_leaves_and_comes_back(loop)


def test_a_smaller_batch_is_not_measured():
    """Nor is one that is as large in each dimension as some known one."""

    def loop(model, optimizer, target, note):
        seen = []
        for shape in [(8, 4, 64)] * 3 + [(4, 16, 64)] * 6 + [(3, 4, 64), (4, 2, 64), (1, 16, 64)] * 2:
            loss = model(torch.randn(shape).to(target)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss)
            if len(seen) > 7:
                note(True)
        seen.append(model(torch.randn(5, 5, 64).to(target)).square().mean())
        note(False)
        return seen

    assert_leaves_and_comes_back(loop)


@pytest.mark.parametrize("rows", [400, 6400])
def test_one_batch_that_is_too_large(rows):
    """It is planned for as long as it may come again. The larger one is refused as a whole, and cut into pieces."""
    budget, pieces = 3 << 20, 16
    refused = []

    def attempt(model, x):
        try:
            model(x).square().mean().backward()
        except torch.OutOfMemoryError:
            refused.append(len(x))

    def loop(model, optimizer, target, note):
        seen = losses(model, optimizer, target, 8)
        note(True)
        x = batch(target, rows)
        attempt(model, x)
        optimizer.zero_grad()
        for piece in x.chunk(pieces if rows > 400 else 1):
            seen.append(model(piece).square().mean())
            seen[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
        note(False)
        seen += losses(model, optimizer, target, 8)
        note(False)
        seen += losses(model, optimizer, target, 72)
        note(True)
        return seen

    assert_leaves_and_comes_back(loop, budget=budget)
    assert refused == ([rows] if rows > 400 else [])


class TakesMoreForLess(nn.Module):
    """Of one row, for a while, a megabyte."""

    def __init__(self):
        super().__init__()
        self.inner = mlp()

    def forward(self, x):
        if len(x) == 1:
            torch.ones(1 << 20, dtype=torch.uint8, device=x.device)
        return self.inner(x)


@pytest.mark.skipif(ON_CUDA, reason=BLOCKS)
def test_a_smaller_batch_that_takes_more_passes_the_budget_once():
    budget = 1500 << 10
    model, optimizer, manager, target = managed_mlp(budget, build=TakesMoreForLess)
    with manager:
        settle(model, optimizer, manager, target)
        torch.accelerator.reset_peak_memory_stats()
        step(model, optimizer, target, rows=1)
        assert torch.accelerator.max_memory_allocated() > budget
        step(model, optimizer, target)
        assert is_intercepted(model)
        for rows in (1, 8, 8, 8, 8, 1, 8):
            torch.accelerator.reset_peak_memory_stats()
            step(model, optimizer, target, rows)
            assert torch.accelerator.max_memory_allocated() <= budget


def test_a_batch_of_another_size_with_a_loss_that_is_not_tried_again():
    """Room is made before its backward: not by what lives on the device, as if memory had run short."""

    def loop(model, optimizer, target, note):
        seen = []
        for rows in (8, 8, 8, 8, 8, 8, 11, 11, 8, 8, 11, 8):
            targets = torch.rand(rows, 64).to(target)
            seen.append(nn.functional.binary_cross_entropy_with_logits(model(batch(target, rows)), targets))
            seen[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
            if len(seen) == 6:
                note(True)
        note(True)
        return seen

    assert_leaves_and_comes_back(loop)


def test_evaluation_between_steps_and_in_the_middle_of_one():
    def build():
        return nn.Sequential(mlp(), nn.Dropout(0.5), nn.BatchNorm1d(64))

    def loop(model, optimizer, target, note):
        seen = losses(model, optimizer, target, 6)
        note(True)
        for _ in range(4):
            model.eval()
            with torch.no_grad():
                seen.append(model(batch(target)))
            model.train()
            note(True)  # it takes no more than training
            loss = square_loss(model, target)
            with torch.no_grad():
                seen.append(model(batch(target)))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen += losses(model, optimizer, target, 2)
        note(True)
        return seen

    assert_leaves_and_comes_back(loop, build=build)


def test_a_graph_of_the_settled_state_is_gone_through_after_it_has_ended():
    def loop(model, optimizer, target, note):
        seen = losses(model, optimizer, target, 6)
        # Each by itself: which of two parameters is first is left to autograd's threads. In another type: what might be
        # a gradient would keep the parameters at home.
        hooked, after = [], []
        list(model.parameters())[2].register_hook(lambda g: hooked.append(g.double()))
        list(model.parameters())[3].register_post_accumulate_grad_hook(
            lambda p: after.append(p.grad.double())
        )
        for number in range(2):
            first = square_loss(model, target)
            note(True)
            second = model(batch(target, 11)).square().mean()
            note(number > 0)  # after that, its size is known
            second.backward()
            first.backward()
            seen.append([first, second, *[p.grad.double() for p in model.parameters()]])
            optimizer.step()
            optimizer.zero_grad()
        return [*seen, *losses(model, optimizer, target, 4), *hooked, *after]

    assert_leaves_and_comes_back(loop)


def test_a_graph_that_is_kept_stands_in_nobodys_way():
    """Nor does one from before it has settled again, which still holds what parameters lay in."""

    def loop(model, optimizer, target, note):
        seen = losses(model, optimizer, target, 6)
        graph = square_loss(model, target)
        for rows in (16, 32):
            note(True)
            seen.append(step(model, optimizer, target, rows))
            note(False)
            seen += losses(model, optimizer, target, 6)
        return [*seen, graph.detach()]

    assert_leaves_and_comes_back(loop)


HOLDERS = {
    "a view": lambda weight: weight.chunk(2)[0],
    "a view of a view": lambda weight: weight.chunk(2)[0].t(),
    "an alias": lambda weight: weight.detach(),
}


@pytest.mark.parametrize("gives_away", [False, True])
@pytest.mark.parametrize("held", HOLDERS)
def test_what_a_user_holds_beside_graphs_keeps_it_settled(held, gives_away):
    """Whoever writes there expects the parameter to follow. ``gives_away``: as a gradient of something, so that no name
    in Python holds it."""

    def loop(model, optimizer, target, note):
        seen = losses(model, optimizer, target, 6)
        graphs = [square_loss(model, target)]
        seen.append(step(model, optimizer, target, 16))
        seen += losses(model, optimizer, target, 6)
        graphs.append(square_loss(model, target))
        alias = HOLDERS[held](next(model.parameters()))
        holder = torch.zeros_like(alias)
        if gives_away:
            holder.grad = alias
            del alias
        note(True)
        seen.append(step(model, optimizer, target, 32))
        note(True)
        with torch.no_grad():
            (holder.grad if gives_away else alias).zero_()
        seen.append(step(model, optimizer, target, 32))
        return [*seen, *[graph.detach() for graph in graphs]]

    assert_leaves_and_comes_back(loop)


@pytest.mark.parametrize("unfreezes", [False, True])
def test_a_graph_through_frozen_parameters_is_gone_through_after_it_has_ended(unfreezes):
    """It has saved them, and has no accumulator of theirs: a generator's loss through its critic. ``unfreezes``: it is
    the critic's turn before that."""

    def build():
        return mlp().requires_grad_(False)

    def through(model, target, rows=8):
        x = batch(target, rows).requires_grad_()
        return x, model(x).square().mean()

    def loop(model, optimizer, target, note):
        seen = []
        for _ in range(6):
            x, loss = through(model, target)
            loss.backward()
            seen.append(x.grad)
        note(True)
        x, loss = through(model, target)
        model.requires_grad_(unfreezes)
        other, beside = through(model, target, 11)
        note(False)
        loss.backward()
        beside.backward()
        return [*seen, loss, x.grad, beside, other.grad]

    assert_leaves_and_comes_back(loop, build=build, make_optimizer=lambda model: None)


@pytest.mark.parametrize(
    "fused", [None, False]
)  # None: hetero chooses the kernels, by a step of its own around torch's
@pytest.mark.skipif(ON_CUDA, reason=STEPS_AT_HOME)
def test_a_closure_with_a_batch_of_another_size(fused):
    """It is called by torch's own step, which goes on with parameters and states where they were."""
    settled = []

    def loop(model, optimizer, target):
        seen = []

        def closure(rows):
            optimizer.zero_grad()
            loss = model(batch(target, rows)).square().mean()
            loss.backward()
            return loss

        for rows in (8, 8, 8, 8, 8, 8):
            seen.append(step(model, optimizer, target, rows))
        settled.append(not is_intercepted(model))
        calls, inner = [], optimizer.step

        def wrapped(*args, **kwargs):  # a user's own: an average, a counter
            calls.append(None)
            return inner(*args, **kwargs)

        optimizer.step = wrapped
        for rows in (8, 11, 8, 11, 11, 8):
            seen.append(optimizer.step(functools.partial(closure, rows)))
            settled.append(not is_intercepted(model))
        assert len(calls) == 6
        model(batch(target)).square().mean().backward()
        optimizer.step(None)
        optimizer.step(closure=None)
        return [*seen, *(step(model, optimizer, target, rows) for rows in (8, 11, 8))]

    def make_optimizer(model):
        return torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=fused, fused=fused)

    def make_plain(model):
        return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

    make_twin = make_plain if fused is None else make_optimizer
    expected, parameters, _ = unmanaged(mlp, loop, make_twin)
    settled.clear()
    got, state, _ = managed(mlp, loop, PLENTY, make_optimizer)
    assert_same(got, expected, "losses")
    assert_same(state, parameters, "parameters")
    assert settled[:3] == [True, True, False]  # ended by the first closure with other inputs


@pytest.mark.skipif(ON_CUDA, reason=STEPS_AT_HOME)
@pytest.mark.parametrize("schedules", [False, True])  # a scheduler wraps the method that it finds
@pytest.mark.parametrize("kept", [0, 6, 9])  # before it settles, settled, and when it has left again
def test_a_step_method_that_was_kept_steps_with_the_same_kernels(kept, schedules):
    settled = []

    def loop(model, optimizer, target):
        seen, run = [], optimizer.step
        for number, rows in enumerate((8, 8, 8, 8, 8, 8, 8, 11, 11, 8, 8, 8, 11, 8, 8, 8)):
            if number == kept:
                if schedules:
                    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n))
                run = optimizer.step
            loss = model(batch(target, rows)).square().mean()
            settled.append(not is_intercepted(model))
            loss.backward()
            (run if number >= kept else optimizer.step)()
            if schedules and number >= kept:
                scheduler.step()
            optimizer.zero_grad()
            seen.append(loss)
        return seen

    def make_fused(model):
        return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

    def make_optimizer(model):
        return torch.optim.AdamW(model.parameters(), lr=1e-2)

    expected, parameters, _ = unmanaged(mlp, loop, make_fused)
    settled.clear()
    got, state, _ = managed(mlp, loop, PLENTY, make_optimizer)
    assert_same(got, expected, "losses")
    assert_same(state, parameters, "parameters")
    assert (settled[6], settled[7], settled[-1]) == (True, False, True)


@pytest.mark.skipif(ON_CUDA, reason=STEPS_AT_HOME)
@pytest.mark.parametrize("fused", [None, False])
def test_closures_alone_settle_as_well(fused):
    """All forwards are within a step, as in a framework's loop."""

    def loop(model, optimizer, target):
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: 1 / (1 + number))

        def closure(rows):
            loss = model(batch(target, rows)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            return loss

        seen = []
        for rows in (8, 8, 8, 8, 8, 8, 11, 8, 8, 8):
            seen.append(optimizer.step(functools.partial(closure, rows)))
            scheduler.step()
        return seen

    def make_optimizer(model):
        return torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=fused, fused=fused)

    def make_plain(model):
        return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

    expected, parameters, _ = unmanaged(mlp, loop, make_plain if fused is None else make_optimizer)
    got, state, manager = managed(mlp, loop, PLENTY, make_optimizer)
    assert_same(got, expected, "losses")
    assert_same(state, parameters, "parameters")
    assert manager.stats.settled_forwards > 3


def test_micro_batches_of_which_one_is_new():
    def loop(model, optimizer, target, note):
        seen = losses(model, optimizer, target, 6)
        note(True)
        for rows in ((8, 8), (8, 11, 8), (8, 8)):
            for count in rows:
                loss = model(batch(target, count)).square().mean()
                loss.backward()
                seen.append(loss)
            note(rows == (8, 8))
            seen.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-2))
            optimizer.step()
            optimizer.zero_grad()
        return seen + losses(model, optimizer, target, 5)

    assert_leaves_and_comes_back(loop)


@pytest.mark.parametrize("kernels", [{"foreach": False}, {"fused": True}])
def test_a_backward_through_a_settled_forward_and_one_after_the_end_of_it(kernels):
    """Both add to the same gradients: the caller's thread, which is late here, and the device's."""

    def loop(model, optimizer, target, note):
        def late(gradient):
            if gradient.device.type == "cpu":  # at home
                time.sleep(0.1)

        next(reversed(list(model.parameters()))).register_hook(late)
        seen = losses(model, optimizer, target, 6)
        note(True)
        for rows in ((8, 11), (8, 8), (8, 11), (8,)):
            loss = sum(model(batch(target, count)).square().mean() for count in rows)
            note(rows != (8, 11) or len(seen) > 6)
            loss.backward()
            seen.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
        return seen + losses(model, optimizer, target, 5)

    assert_leaves_and_comes_back(
        loop, make_optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3, **kernels)
    )


def _fused_adamw(model):
    """Its kernel moves no version of a parameter."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def _fused_sgd(model):
    """And this one counts no steps."""
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, fused=True)


@pytest.mark.parametrize(
    ("make_optimizer", "share", "rows"),
    [
        *[(make, share, (8, 8)) for make in (adamw, _fused_adamw) for share in (1.14, 1.16, 1.18)],
        *[(_fused_sgd, share, (8, 8)) for share in (1.18, 1.22, 1.26)],
        *[(adamw, share, (64, 63)) for share in (1.18, 1.22, 1.26)],
    ],
)
def test_of_several_forwards_for_one_backward_all_fit_if_the_first_does(make_optimizer, share, rows):
    """Less is free as they begin. To leave between two of them would add up gradients in another order. ``rows``: of a
    batch, and of the last one of an epoch."""

    def penalised(model, optimizer, target):
        seen = []
        for number in range(16):
            count = rows[number in (7, 11)]
            # Forwards of one kind.
            x, real, made = (batch(target, count).requires_grad_() for _ in range(3))
            slope = torch.autograd.grad(model(x).sum(), x, create_graph=True)[0]
            optimizer.zero_grad()
            loss = model(made).mean() - model(real).mean() + (slope.norm(dim=1) - 1).square().mean()
            loss.backward()
            optimizer.step()
            seen.append(loss.detach())
        return seen

    manager = assert_twins(lambda: mlp(depth=2), penalised, share=share, make_optimizer=make_optimizer)
    assert manager.stats.settled_forwards > 30


def _with_penalties(model, optimizer, target):
    """On all gradients, of three micro-batches a step."""
    seen = []
    for number in range(18):
        loss = model(batch(target)).square().mean()
        gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        loss = loss + sum(gradient.square().sum().to(target) for gradient in gradients)
        loss.backward()
        del gradients
        if number % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
        seen.append(loss.detach())
    return seen


def _with_norms(model, optimizer, target):
    """Of all gradients, which are held while others are made."""
    seen = []
    for _ in range(14):
        loss = model(batch(target)).square().mean()
        gradients = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        loss.backward()
        seen += [loss.detach(), sum(gradient.norm().to(target) for gradient in gradients)]
        del gradients
        optimizer.step()
        optimizer.zero_grad()
    return seen


@pytest.mark.parametrize("loop", [_with_penalties, _with_norms])
@pytest.mark.parametrize("share", [0.85, 0.9, 0.95, 1.0, 1.5])
def test_gradients_that_are_returned_count_where_everything_would_fit_without_them(loop, share):
    """They are at home until then, and on the device from then on, with what is made of them."""
    manager = assert_twins(lambda: mlp(64, depth=4), loop, share=share)
    if share == 1.5:
        assert manager.stats.settled_forwards > 0


def test_as_many_forwards_as_had_a_backward_each_do_not_all_wait_for_one():
    """Two micro-batches fit, one after the other. What both have saved does not."""
    budget = 2300 << 10
    model, optimizer, manager, target = managed_mlp(budget)
    with manager:
        for _ in range(6):
            for _ in range(2):
                model(batch(target, 128)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert manager.plan.everything_fits
        torch.accelerator.reset_peak_memory_stats()
        sum(model(batch(target, 128)).square().mean() for _ in range(2)).backward()
        assert torch.accelerator.max_memory_allocated() <= budget + GAPS
        optimizer.step()


def test_a_larger_batch_that_does_not_fit_beside_everything():
    model, optimizer, manager, target = managed_mlp("2200KiB")
    torch.accelerator.reset_peak_memory_stats()
    torch.manual_seed(1)
    rows = [8] * 7 + [300] + [8] * 3
    with manager:
        seen = []
        for count in rows:
            seen.append(step(model, optimizer, target, count))
            if len(seen) == 7:
                assert manager.plan.everything_fits
        assert torch.accelerator.max_memory_allocated() <= (2200 << 10) + GAPS
        got = plain([*seen, *model.parameters()])
    assert races() == []
    torch.manual_seed(0)
    twin = mlp().to(target)
    plain_optimizer = adamw(twin)
    torch.manual_seed(1)
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    expected = [step(twin, plain_optimizer, target, count) for count in rows]
    assert torch.accelerator.max_memory_allocated() - before > 2200 << 10  # it would not have fitted
    assert_same(got, plain([*expected, *twin.parameters()]), "seen")


def test_memory_that_somebody_else_takes_ends_it_before_the_budget_is_passed():
    model, optimizer, manager, target = managed_mlp("4MiB")
    with manager:
        settle(model, optimizer, manager, target)
        budget = manager.config.device_budget
        free = budget - torch.accelerator.memory_allocated()
        gradients = sum(p.nbytes for p in model.parameters())
        taken = torch.empty(free - gradients, dtype=torch.uint8, device=target)
        torch.accelerator.reset_peak_memory_stats()
        for _ in range(3):
            step(model, optimizer, target)
            assert is_intercepted(model)
        assert torch.accelerator.max_memory_allocated() <= budget + GAPS
        del taken


@pytest.mark.skipif(ON_CUDA, reason=BLOCKS)
@pytest.mark.parametrize("where", ["forward", "backward", "step"])
def test_running_out_of_memory_ends_it_for_good(where):
    model, optimizer, manager, target = managed_mlp()
    with manager:
        settle(model, optimizer, manager, target)
        x = batch(target)
        run = functools.partial(model, x)
        if where != "forward":
            run = run().square().mean().backward
        if where == "step":
            run()
            run = optimizer.step
        set_memory_limit(torch.accelerator.memory_allocated())
        with pytest.raises(torch.OutOfMemoryError):
            run()
        del run
        wait_for_backward_ends(target)
        assert not is_intercepted(model)  # nobody of ours was called
        optimizer.zero_grad()
        model(x)  # leaving takes no memory, and what is managed needs less
        assert is_intercepted(model)
        set_memory_limit(256 << 20)
        for _ in range(5):
            step(model, optimizer, target)
            assert is_intercepted(model)


@pytest.mark.skipif(ON_CUDA, reason=BLOCKS)
def test_errors_that_another_manager_has_answered_do_not_end_it():
    model, optimizer, manager, target = managed_mlp()
    with manager:
        settle(model, optimizer, manager, target)
        torch.manual_seed(0)
        other = mlp()
        second = adamw(other)
        budget = torch.accelerator.memory_allocated() + (300 << 10)
        with hetero.manage(other, second, device=target, device_budget=budget):
            before = torch.accelerator.memory_stats()["num_ooms"]
            for rows in (8, 64, 8, 100, 100):
                step(other, second, target, rows)
                step(model, optimizer, target)
                assert manager.plan.everything_fits
            assert torch.accelerator.memory_stats()["num_ooms"] > before
        torch.accelerator.reset_accumulated_memory_stats()
        step(model, optimizer, target)
        assert manager.plan.everything_fits
