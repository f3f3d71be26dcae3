"""What lasts for some steps, a tensor that is held, a larger batch, leaves no mark: later as little moves as before."""

import pytest
import torch
from loops import batch, mlp
from residents import living
from twins import assert_same, device, managed, unmanaged

import hetero
from hetero.stm.interception.parameter import managed_in
from hetero.stm.plans import departures, homechoice, planbook, samples
from hetero.stm.plans.planbook import PlanBook

pytestmark = pytest.mark.usefixtures("homes_on_device")

BEFORE, PASSING, AFTER = 10, 5, 80


def one_step(model, optimizer, target, rows=1, zeroes=True):
    loss = torch.stack([model(batch(target)).square().mean() for _ in range(rows)]).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=zeroes)
    return loss.detach()


def held_values(model, optimizer, target, held):
    held.append([p.data for p in model.parameters()])
    return one_step(model, optimizer, target)


def held_gradients(model, optimizer, target, held):
    loss = model(batch(target)).square().mean()
    loss.backward()
    held.append([p.grad for p in model.parameters()])
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def held_states(model, optimizer, target, held):
    held.append([dict(entry) for entry in optimizer.state.values()])
    return one_step(model, optimizer, target)


def held_memory(model, optimizer, target, held):
    if not held:
        held.append(
            torch.empty(sum(p.nbytes for p in model.parameters()) // 2, dtype=torch.uint8, device=target)
        )
    return one_step(model, optimizer, target)


def zeroed_gradients(model, optimizer, target, held):
    held[:] = [lambda: optimizer.zero_grad()]
    return one_step(model, optimizer, target, zeroes=False)


def several_forwards(model, optimizer, target, held):
    return one_step(model, optimizer, target, rows=3)


def micro_batches(model, optimizer, target, held):
    for _ in range(3):
        model(batch(target)).square().mean().backward()
    return one_step(model, optimizer, target)


def larger_batch(model, optimizer, target, held):
    loss = model(torch.cat([batch(target) for _ in range(8)])).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def frozen(model, optimizer, target, held):
    first = next(model.parameters()).requires_grad_(False)
    held[:] = [lambda: first.requires_grad_()]
    return one_step(model, optimizer, target)


PASSES = [
    held_values,
    held_gradients,
    held_states,
    held_memory,
    zeroed_gradients,
    several_forwards,
    micro_batches,
    larger_batch,
    frozen,
]


@pytest.fixture
def soon(monkeypatch):
    """What has passed is given up after a few iterations, not after many."""
    for module, name in (
        (homechoice, "_UNTIL_TRIED_AGAIN"),
        (planbook, "_GONE_AFTER"),
        (departures, "_LONG"),
        (departures, "_VERY_LONG"),
        (samples, "_LONG"),
    ):
        monkeypatch.setattr(module, name, 8)


def passing_loop(passing, moved):
    """Into ``moved``, the bytes of each step, if anything is managed."""

    def loop(model, optimizer, target):
        owners = {tensor.owner for tensor in managed_in(optimizer)}
        seen, held = [], []

        def total():
            totals = [owner.collector.total for owner in owners]
            return sum(total.fetched_bytes + total.written_bytes for total in totals)

        def step(run, *given):
            before = total()
            loss = run(model, optimizer, target, *given)
            seen.append(loss.cpu())  # on the device they would take more with each step
            moved.append(total() - before)

        for _ in range(BEFORE):
            step(one_step)
        for _ in range(PASSING):
            step(passing, held)
        while held:
            if callable(passed := held.pop()):
                passed()
            del passed
        for _ in range(AFTER):
            step(one_step)
        return seen

    return loop


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("share", [0.6, 0.8, 1.3])
@pytest.mark.parametrize("passing", PASSES)
def test_in_the_end_as_little_moves_as_before(passing, share):
    moved = []
    seen, state, _ = unmanaged(mlp, passing_loop(passing, []))
    _, _, peak = unmanaged(mlp, lambda *given: [one_step(*given) for _ in range(3)])
    got, got_state, _ = managed(mlp, passing_loop(passing, moved), int(share * peak))
    assert_same(got, seen, "observed")
    assert_same(got_state, state, "state")
    # A gradient that is late counts in the step after its own.
    assert moved[-1] <= max(moved[BEFORE - 4 : BEFORE]) < max(moved)


def again_and_again(passing, times, count):
    """``passing`` in each twelfth step; into ``times``, what ``count`` has counted until then."""

    def loop(model, optimizer, target):
        seen = []
        for number in range(120):
            held = []
            run = one_step if number % 12 else lambda *given: passing(*given, held)  # noqa: B023
            seen.append(run(model, optimizer, target).cpu())
            while held:
                if callable(passed := held.pop()):
                    passed()
                del passed
            times.append(len(count))
        return seen

    return loop


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("share", [0.6, 0.8, 1.3])
@pytest.mark.parametrize("passing", PASSES)
def test_what_comes_again_and_again_is_not_given_up_for_ever(monkeypatch, passing, share):
    """Each time that it was in vain, after twice as many iterations: at last there are not as many in between."""
    given_up, times = [], []
    for name in ("measure_again", "drop"):
        inner = getattr(PlanBook, name)

        def noted(self, keys, inner=inner, **keywords):
            given_up.append(keys)
            return inner(self, keys, **keywords)

        monkeypatch.setattr(PlanBook, name, noted)
    seen, state, _ = unmanaged(mlp, again_and_again(passing, [], given_up))
    _, _, peak = unmanaged(mlp, lambda *given: [one_step(*given) for _ in range(3)])
    got, got_state, _ = managed(mlp, again_and_again(passing, times, given_up), int(share * peak))
    assert_same(got, seen, "observed")
    assert_same(got_state, state, "state")
    assert times[-1] == times[len(times) // 2]


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize(("every", "times"), [(2, 1), (12, 2)])
def test_what_the_caller_takes_between_backward_and_step_is_planned_for_as_long_as_it_comes(every, times):
    """At the moments of the plan it is never there: nor is it unused, for that. What has not come for 8 iterations has
    gone, at first."""
    target = device()
    _, _, peak = unmanaged(mlp, lambda *given: [one_step(*given) for _ in range(3)])
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    budget = torch.accelerator.memory_allocated() + int(0.65 * peak)
    taken = sum(p.nbytes for p in model.parameters()) // 2
    passed = []
    with hetero.manage(model, optimizer, device=target, device_budget=budget) as manager:
        for number in range(120):
            torch.accelerator.reset_peak_memory_stats()
            model(batch(target)).square().mean().backward()
            if number % every == 1:
                torch.empty(taken, dtype=torch.uint8, device=target)
            optimizer.step()
            optimizer.zero_grad()
            if torch.accelerator.max_memory_allocated() > budget:
                passed.append(number)
        assert living(manager)
    assert len(passed) <= times


@pytest.mark.parametrize("waits", [0, 100])
def test_what_cannot_live_there_is_tried_ever_less_often(waits):
    """Also where the choice that tries it has to wait for its time."""
    failures, tried = homechoice._Failures(), []
    failures.note()
    for number in range(3000):
        since = number - tried[-1] if tried else 0
        if since == waits + 3:
            failures.note()
        elif failures.may_try_again(is_trying=since > waits):
            tried.append(number)
    assert 4 <= len(tried) <= 6
