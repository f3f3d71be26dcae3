"""Parameters that live on the device: who does, until when, and that nobody can tell."""

import gc
import weakref

import pytest
import torch
from accelerators import GAPS, ON_CUDA, ON_HOST, races
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from loops import ACTIONS, backward, batch, losses, mixed_loop, mlp, square_loss, train, two_optimizers
from residents import living, managed_mlp, step
from torch import nn
from twins import adamw, assert_same, assert_twins, device

import hetero
from hetero.stm import Kind, Tier
from hetero.stm.plans.samples import Samples
from hetero.stm.plans.timings import Timings
from hetero.stm.running.executor import Executor

pytestmark = pytest.mark.usefixtures("homes_on_device", "late_queue")


@pytest.mark.parametrize("share", [0.5, 0.8, 1.5])
def test_a_training_loop(share):
    manager = assert_twins(mlp, lambda m, o, t: losses(m, o, t, 8), share=share)
    assert share < 1 or manager._stm.plans.device_homes


def look_at_largest(model):
    return [p.max().item() for p in model.parameters()]  # with a graph, for a moment


def test_parameters_that_were_looked_at_live_there_all_the_same():
    target = device()
    gc.collect()
    torch.manual_seed(0)
    model = mlp()
    optimizer = adamw(model)
    with hetero.manage(model, optimizer, device=target, device_budget="1300KiB") as manager:
        look_at_largest(model)
        losses(model, optimizer, target, 16)
        here = living(manager)
        assert here
        look_at_largest(model)
        losses(model, optimizer, target, 2)
        assert living(manager) == here
        before = manager.stats
        losses(model, optimizer, target, 2)
        after = manager.stats
    others = sum(p.nbytes for name, p in model.named_parameters() if name not in here)
    assert after.total_written_bytes - before.total_written_bytes == 2 * others  # their gradients


def test_parameters_of_a_penalty_at_home_live_there():
    def loop(model, optimizer, target):
        seen = []
        for _ in range(12):
            penalty = torch.stack([p.square().sum() for p in model.parameters()]).sum()
            (square_loss(model, target) + penalty.to(target)).backward()
            seen.append(look_at_largest(model))
            optimizer.step()
            optimizer.zero_grad()
            seen.append(look_at_largest(model))
        return seen

    manager = assert_twins(mlp, loop, budget=64 << 20)
    assert manager.stats.settled_forwards == 0
    assert manager.stats.bytes_moved > 0


@pytest.mark.parametrize("share", [0.5, 0.8, 1.5])
@pytest.mark.parametrize("first", [1, 2, 7])
def test_parameters_are_taken_out_of_the_optimizer(share, first):
    def loop(model, optimizer, target):
        seen = losses(model, optimizer, target, first)
        group = optimizer.param_groups[0]
        taken, group["params"] = group["params"][:5], group["params"][5:]
        seen += losses(model, optimizer, target, 6)
        optimizer.add_param_group({"params": taken, "lr": 1e-3})
        return seen + losses(model, optimizer, target, 6)

    assert_twins(mlp, loop, share=share)


def test_fewer_live_there_under_a_smaller_budget_and_the_peak_keeps_to_it():
    counts = []
    for budget in (900 << 10, 1300 << 10):
        model, optimizer, manager, target = managed_mlp(budget)
        with manager:
            torch.accelerator.reset_peak_memory_stats()
            for _ in range(8):
                step(model, optimizer, target)
            assert torch.accelerator.max_memory_allocated() <= budget + GAPS
            counts.append(len(living(manager)))
        assert races() == []
    assert 0 < counts[0] < counts[1]


def test_values_states_and_gradients_are_seen_as_they_are():
    def loop(model, optimizer, target):
        seen = []
        held = None
        for number in range(12):
            backward(model, target)
            if number == 4:
                seen.append([p.detach().clone() for p in model.parameters()])
            elif number == 5:
                seen.append([v.clone() for s in optimizer.state.values() for v in s.values()])
            elif number == 6:
                seen.append({k: v.clone() for k, v in model.state_dict().items()}["0.weight"])
            elif number == 7:
                with torch.no_grad():
                    model[0].weight.mul_(0.5)
                    model[2].bias.data.add_(1.0)
            elif number == 8:
                optimizer.state[model[0].weight]["exp_avg"].mul_(0.5)
            elif number == 9:
                model.eval()
                with torch.no_grad():
                    seen.append(model(batch(target, 4)))
                model.train()
            elif number == 10:
                held = model[0].weight.data  # seen to change with the step
            elif number == 11:
                seen.append(held.clone())
            optimizer.step()
            optimizer.zero_grad()
        seen.append(held.clone())
        return seen

    assert_twins(mlp, loop, share=1.2)


def test_operators_whose_copies_are_there_pay_no_more_where_the_caller_keeps_something(monkeypatch):
    """A list of losses, say: by the plan there is more on the device in each moment than was measured."""
    model, optimizer, manager, target = managed_mlp("64MiB")
    calls = []
    change = Executor._change_layout
    monkeypatch.setattr(
        Executor, "_change_layout", lambda self, *given: calls.append(given[1]) or change(self, *given)
    )

    def operators_that_pay():
        calls.clear()
        step(model, optimizer, target)
        return [indices for indices in calls if indices]

    with manager:
        manager._settled.forbid()
        for _ in range(12):
            step(model, optimizer, target)
        assert living(manager) == {name for name, _ in model.named_parameters()}
        assert operators_that_pay() == []
        kept = torch.empty(1 << 20, dtype=torch.uint8, device=target)
        assert operators_that_pay() == []
        growth, plan = manager._stm.executor._growth, manager._stm.plans.last
        assert growth.drift >= kept.nbytes
        assert growth._all_stay(plan)
        manager._stm.residency.move_home(manager._stm.tensors[0])
        assert not growth._all_stay(plan)
        step(model, optimizer, target)  # at which it comes back
        assert growth._all_stay(plan)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    actions=st.lists(st.sampled_from(ACTIONS), min_size=6, max_size=24),
    share=st.sampled_from([0.6, 1.0, 1.6]),
)
# A backward adds to gradients that live there, which in all iterations before had been dropped by then.
@example(actions=["micro-batch", "step", "clip", *["micro-batch"] * 3], share=1.0)
def test_any_loop(actions, share):
    lead = ["micro-batch", "step", "zero"] * 3
    assert_twins(
        lambda: mlp(depth=2), mixed_loop([*lead, *actions]), share=share, make_optimizer=two_optimizers
    )


def test_an_unknown_shape_that_needs_the_memory_gets_it():
    def loop(model, optimizer, target):
        seen = []
        for number in range(12):
            rows = 600 if number in (6, 9) else 8
            loss = model(batch(target, rows)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss)
        return seen

    assert_twins(mlp, loop, share=0.95)


def test_checkpoints_go_on_with_the_same_numbers():
    def loop(model, optimizer, target):
        seen = train(model, optimizer, target, 6)
        saved = [
            {k: v.clone() for k, v in model.state_dict().items()},
            torch.utils._pytree.tree_map(
                lambda v: v.clone() if isinstance(v, torch.Tensor) else v, optimizer.state_dict()
            ),
        ]
        train(model, optimizer, target, 2)
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        return [*seen, *train(model, optimizer, target, 4)]

    assert_twins(mlp, loop, share=1.2)


@pytest.mark.skipif(ON_CUDA, reason=ON_HOST)
def test_close_brings_everything_home():
    model, optimizer, manager, target = managed_mlp("64MiB")
    before = torch.accelerator.memory_allocated()
    twin = mlp()
    twin.load_state_dict(model.state_dict())
    plain = adamw(twin)
    torch.manual_seed(1)
    steps = 0
    while not manager._stm.ledger.nbytes(
        Tier.DEVICE, Kind.OPTIMIZER_STATE
    ):  # by the clock, they may leave again
        step(model, optimizer, target)
        steps += 1
        assert steps < 12
    manager.close()
    assert torch.accelerator.memory_allocated() == before
    assert all(v.device.type == "cpu" for s in optimizer.state.values() for v in s.values())
    torch.manual_seed(1)
    for _ in range(steps):
        step(twin, plain, torch.device("cpu"))
    assert_same([*model.parameters()], [p.detach() for p in twin.parameters()], "parameters")
    step(model, optimizer, torch.device("cpu"))


@pytest.mark.parametrize("keeps_optimizer", [False, True])
def test_a_manager_dropped_without_close_goes_with_its_model(keeps_optimizer):
    model, optimizer, manager, target = managed_mlp("64MiB")
    before = torch.accelerator.memory_allocated()
    for _ in range(6):
        step(model, optimizer, target)
    assert living(manager)
    gone = weakref.ref(manager)
    kept = optimizer if keeps_optimizer else None
    del model, manager, optimizer
    gc.collect()
    assert gone() is None
    del kept
    gc.collect()
    assert torch.accelerator.memory_allocated() == before


def test_trim_sends_home_what_has_no_room():
    model, optimizer, manager, target = managed_mlp("8MiB")
    with manager:
        for _ in range(6):
            step(model, optimizer, target)
        assert living(manager)
        manager.trim(600 << 10)
        step(model, optimizer, target)
        torch.accelerator.reset_peak_memory_stats()
        for _ in range(4):
            step(model, optimizer, target)
        assert torch.accelerator.max_memory_allocated() <= (600 << 10) + GAPS


def test_deterministic_algorithms_and_the_switch_keep_everything_at_home():
    target = device()
    model = mlp()
    optimizer = adamw(model)
    with hetero.manage(model, optimizer, device=target, device_budget="64MiB", device_homes=False) as manager:
        for _ in range(6):
            step(model, optimizer, target)
        assert not living(manager)


def test_the_plan_says_where_parameters_live_and_what_moves():
    # Parameters alone: whether activations move as well is a matter of measured times.
    model, optimizer, manager, target = managed_mlp(1100 << 10, activations=False)
    with manager:
        assert manager.plan is None
        for _ in range(6):
            step(model, optimizer, target)
        plan = manager.plan
        names = {name for name, _ in model.named_parameters()}
        assert living(manager) == set(plan.lives_on_device)
        assert set(plan.lives_on_device) | set(plan.lives_at_home) == names
        assert set(plan.lives_at_home)
        fetched = [name for moment in plan.moments for name in moment.fetches]
        assert set(fetched) == set(plan.lives_at_home)
        sizes = {tensor.name: tensor.device_nbytes for tensor in manager._stm.tensors}
        assert sum(sizes[name] for name in fetched) == plan.fetched_bytes >= plan.lower_bound_bytes > 0
        assert {moment.phase for moment in plan.moments} == {"forward", "backward", "step"}
        assert "live on the device" in str(plan)
        (kernels,) = plan.host_kernels  # foreach=False: nothing to choose
        assert (kernels.fused, kernels.others, kernels.chosen) == (0, len(plan.lives_at_home), False)


def test_aliases_of_states_are_never_stale():
    def loop(model, optimizer, target):
        losses(model, optimizer, target, 5)
        first, second = (optimizer.state[p] for p in list(model.parameters())[:2])
        read, written = first["exp_avg"].detach(), second["exp_avg_sq"].view(-1)
        seen = []
        for _ in range(3):
            losses(model, optimizer, target, 1)
            written.mul_(0.5)
            seen.append([read.clone(), written.clone()])
        return seen

    assert_twins(mlp, loop, share=1.2)


def test_looking_at_states_brings_them_home_until_the_next_step():
    model, optimizer, manager, target = managed_mlp(
        1160 << 10
    )  # all of it, but not all that an iteration takes
    with manager:
        for _ in range(8):
            step(model, optimizer, target)
            assert {v.device.type for s in optimizer.state.values() for v in s.values()} == {"cpu"}
            assert manager._stm.ledger.nbytes(Tier.DEVICE, Kind.OPTIMIZER_STATE) == 0
        step(model, optimizer, target)
        assert living(manager) == {name for name, _ in model.named_parameters()}
        assert manager._stm.ledger.nbytes(Tier.DEVICE, Kind.OPTIMIZER_STATE) > 0


def test_a_look_at_one_parameters_states_brings_home_these_alone_and_counts_their_bytes():
    model, optimizer, manager, target = managed_mlp(1160 << 10)

    def there():
        entries = dict.items(optimizer.state)  # nobody learns of this
        return {id(p) for p, entry in entries if entry["exp_avg"].device.type != "cpu"}

    with manager:
        for _ in range(8):
            step(model, optimizer, target)
        before, sent = there(), manager._stm.collector.total.written_bytes
        first = next(p for p in model.parameters() if id(p) in before)
        assert first in optimizer.state
        assert len(optimizer.state) == len(list(optimizer.state)) == len(optimizer.state.keys())
        assert there() == before
        entry = optimizer.state[first]
        moved = sum(entry[name].nbytes for name in ("exp_avg", "exp_avg_sq"))
        assert there() == before - {id(first)}
        assert manager._stm.collector.total.written_bytes == sent + moved
        del entry
        fetched = manager._stm.collector.total.fetched_bytes
        step(model, optimizer, target)
        assert there() == before
        assert manager._stm.collector.total.fetched_bytes >= fetched + moved


@pytest.mark.parametrize("share", [0.5, 0.85])
@pytest.mark.parametrize("extra", [0.25, 0.75])
def test_those_whose_states_find_no_room_after_a_look_are_stepped_at_home(share, extra):
    """The loop keeps something more from some iteration on, and looks at states after each."""

    def loop(model, optimizer, target):
        seen, kept = [], []
        size = int(extra * sum(p.nbytes for p in model.parameters()))
        for which in range(10):
            result = model(batch(target))
            if which == 7:
                kept.append(torch.empty(size, dtype=torch.uint8, device=target))
            loss = result.square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.item())
            optimizer.state_dict()
        return seen

    assert_twins(lambda: nn.Sequential(*(nn.Linear(64, 64) for _ in range(16))), loop, share=share)


def test_those_that_were_there_in_vain_leave_before_the_next_plan_is_followed(monkeypatch):
    judged = []

    def in_vain(timings, keys):
        judged.append(keys)
        return True

    monkeypatch.setattr(Timings, "was_in_vain", in_vain)
    model, optimizer, manager, target = managed_mlp("64MiB", speculate=False)
    manager._stm.settled.forbid()
    monkeypatch.setattr(manager._stm.home_choice, "everything_fits", lambda: False)
    lived = []
    with manager:
        for _ in range(8):
            before = len(judged)
            model(batch(target)).square().mean().backward()
            assert not (len(judged) > before and living(manager))
            optimizer.step()
            optimizer.zero_grad()
            lived.append(bool(living(manager)))
        assert any(lived)
        assert judged
        assert not living(manager)


def test_gradients_that_plans_do_not_know_of_are_guarded_until_they_do(monkeypatch):
    """Also after a forward that failed, of which nothing is learned."""
    news = []
    own = Samples.note_gradients

    def noted(self, key):
        news.append(own(self, key))
        return news[-1]

    monkeypatch.setattr(Samples, "note_gradients", noted)
    model, optimizer, manager, target = managed_mlp("1MiB")

    def fail(*_):
        raise ValueError("of the user's")

    with manager:
        for _ in range(6):
            step(model, optimizer, target)
        assert living(manager)
        assert not any(news)
        backward(model, target)
        optimizer.step()
        handle = model[2].register_forward_hook(fail)
        with pytest.raises(ValueError, match="of the user's"):
            backward(model, target)
        handle.remove()
        assert news == [True]
        news.clear()
        backward(model, target)
        assert news == [True, True]  # forward and backward
        optimizer.step()
        news.clear()
        backward(model, target)
        assert news == [False, False]


def test_they_can_leave_amid_an_iteration_whichever_it_is():
    """After a step they are the same bytes, and another tensor: nobody but us has either."""
    model, optimizer, manager, target = managed_mlp("64MiB", speculate=False)
    manager._stm.settled.forbid()
    with manager:
        for _ in range(6):
            loss = model(batch(target)).square().mean()
            copies = list(manager._stm.residency.resident.values())
            assert not [tensor.name for tensor in copies if tensor.is_held()]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert living(manager)


@pytest.mark.skipif(ON_CUDA, reason="a real allocator's cap is on segments")
def test_a_loss_that_takes_more_at_times_makes_them_leave():
    def loop(model, optimizer, target):
        seen = []
        for iteration in range(24):
            y = model(batch(target))
            loss = y.square().mean()
            if iteration % 10 == 9:
                loss = loss + (y.repeat(100, 1) * 2).exp().mean()
            loss.backward()
            seen.append(loss)
            optimizer.step()
            optimizer.zero_grad()
        return seen

    def narrow():
        return nn.Sequential(
            *[part for _ in range(6) for part in (nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))]
        )

    def sgd(model):
        return torch.optim.SGD(model.parameters(), lr=1e-2, foreach=False)

    target = device()
    gc.collect()
    torch.manual_seed(0)
    model = narrow()
    optimizer = sgd(model)
    with hetero.manage(model, optimizer, device=target, device_budget=970444):  # 0.9 of its peak
        managed = loop(model, optimizer, target)
    torch.manual_seed(0)
    model = narrow().to(target)
    assert_same(managed, loop(model, sgd(model), target), "losses")
