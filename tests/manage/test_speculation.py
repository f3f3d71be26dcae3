"""Updates that are tried in backward: who sees one, what takes one back, and when they are tried at all."""

import ctypes
import itertools
import os

import pytest
import torch
from accelerators import ON_CUDA, races
from lateness import managed_mlp
from loops import backward, batch, mlp
from torch import nn
from twins import adamw, assert_same, at_home, device, plain

import hetero
from hetero.stm.step.expectation import Expectation
from hetero.stm.step.speculation import Speculation

pytestmark = pytest.mark.usefixtures("speculates")
speculating = pytest.mark.usefixtures("speculating")


def step(model, optimizer, target, most=None):
    backward(model, target)
    if most is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), most)
    optimizer.step()
    optimizer.zero_grad()


def wait_until_tried(manager):
    """All that were begun have been tried; how many."""
    attempts = [tensor.pending for tensor in manager._stm.tensors if tensor.pending is not None]
    queue = manager._stm.updates
    for attempt in attempts:
        assert attempt.tentative
        with queue._changed:
            assert queue._changed.wait_for(lambda attempt=attempt: attempt.was_tried, timeout=60)
    return len(attempts)


def everything(model, optimizer):
    states = [list(optimizer.state[p].values()) for p in model.parameters()]
    return [
        [p.detach().clone() for p in model.parameters()],
        [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        [
            [value.clone() if isinstance(value, torch.Tensor) else value for value in values]
            for values in states
        ],
        [p._version for p in model.parameters()],
        [value._version for values in states for value in values if isinstance(value, torch.Tensor)],
    ]


@speculating
@pytest.mark.parametrize("most", [None, 1e9])
def test_a_trial_that_was_right_is_not_done_again(most):
    def loop(model, optimizer, target):
        for _ in range(5):
            step(model, optimizer, target, most)
        return [p.detach().clone() for p in model.parameters()]

    expected = at_home(lambda: mlp(depth=2), loop)
    model, optimizer, manager, target = managed_mlp()
    with manager:
        torch.manual_seed(1)
        assert_same(plain(loop(model, optimizer, target)), expected, "parameters")
        stats = manager.stats
        count = len(list(model.parameters()))
        # The first step makes the states, the second was the first that could be done later.
        assert (stats.tried_updates, stats.taken_back_updates) == (4 * count, 0)
        assert races() == []


def _exception(model, optimizer, target):
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, gradient):
            raise ValueError("in the middle")

    model[0].register_forward_hook(lambda module, args, result: Failing.apply(result), prepend=True)
    with pytest.raises(ValueError, match="in the middle"):
        backward(model, target)
    model[0]._forward_hooks.clear()
    # Gradients at home are added on another thread than that which failed: how many were is a matter of chance.
    optimizer.zero_grad()


def _fork(model, optimizer, target):
    if _is_there(model[0].weight):
        return
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        seen = [float(p.detach().double().sum()) for p in model.parameters()]
        os.write(writer, repr(seen).encode())
        os._exit(0)
    os.waitpid(child, 0)
    seen = os.read(reader, 1 << 16).decode()
    os.close(reader)
    os.close(writer)
    assert seen == repr([float(p.detach().double().sum()) for p in model.parameters()])


def _floats_at(parameter, count):
    if _is_there(parameter):
        return parameter.detach().flatten()[:count].clone()
    return torch.tensor(list((ctypes.c_float * count).from_address(parameter.data_ptr())))


def _is_there(parameter):
    """Unmanaged, on a CUDA device: the host cannot look at its memory, nor a forked child use it."""
    return ON_CUDA and type(parameter) is nn.Parameter


# What happens between backward and step, or instead of the step; each may return what it has seen.
BETWEEN = {
    "nothing": lambda m, o, t: None,
    "look at a parameter": lambda m, o, t: m[2].weight.detach().clone(),
    "its version": lambda m, o, t: m[2].weight._version,
    "its address": lambda m, o, t: _floats_at(m[2].weight, 5),
    "numpy": lambda m, o, t: (
        m[2].weight.detach().clone()
        if _is_there(m[2].weight)
        else torch.from_numpy(m[2].weight.detach().numpy().copy())
    ),
    "state_dict": lambda m, o, t: [v.clone() for v in m.state_dict().values()],
    "look at a gradient": lambda m, o, t: m[2].weight.grad.clone(),
    "look at states": lambda m, o, t: [v.clone() for v in o.state[m[2].weight].values()],
    "optimizer's state_dict": lambda m, o, t: [v.clone() for v in o.state_dict()["state"][1].values()],
    "write a parameter": lambda m, o, t: m[2].weight.data.mul_(0.5),
    "replace its data": lambda m, o, t: setattr(m[2].weight, "data", m[2].weight.detach() + 1),
    "write a gradient": lambda m, o, t: m[2].weight.grad.mul_(0.5),
    "replace a gradient": lambda m, o, t: setattr(m[2].weight, "grad", torch.ones_like(m[2].weight)),
    "delete a gradient": lambda m, o, t: setattr(m[2].weight, "grad", None),
    "zero_grad": lambda m, o, t: o.zero_grad(),
    "zero_grad in place": lambda m, o, t: m.zero_grad(set_to_none=False),
    "another backward": lambda m, o, t: backward(m, t),
    "evaluation": lambda m, o, t: m.eval()(batch(t)).detach(),
    "autograd.grad": lambda m, o, t: torch.autograd.grad(m(batch(t)).sum(), [m[2].weight])[0],
    "another lr": lambda m, o, t: o.param_groups[0].update(lr=o.param_groups[0]["lr"] * 0.7),
    "another beta": lambda m, o, t: o.param_groups[0].update(betas=(0.8, 0.9)),
    "another group": lambda m, o, t: o.add_param_group({"params": [nn.Parameter(torch.ones(2))], "lr": 1.0}),
    "a state's write": lambda m, o, t: o.state[m[2].weight]["exp_avg"].mul_(2.0),
    "a state's replacement": lambda m, o, t: o.state.pop(m[2].weight) and None,
    "clipping": lambda m, o, t: torch.nn.utils.clip_grad_norm_(m.parameters(), 1e-3),
    "clipping of a few": lambda m, o, t: torch.nn.utils.clip_grad_norm_(list(m.parameters())[:3], 1e-3),
    "clipping twice": lambda m, o, t: [
        torch.nn.utils.clip_grad_norm_(m.parameters(), most) for most in (1e9, 1e-3)
    ],
    "clipping by value": lambda m, o, t: torch.nn.utils.clip_grad_value_(m.parameters(), 1e-4),
    "an exception in backward": _exception,
    "fork": _fork,
    "flush denormals": lambda m, o, t: torch.set_flush_denormal(True) and None,
}


@speculating
@pytest.mark.parametrize("steps_after", [True, False])
@pytest.mark.parametrize("name", BETWEEN)
def test_whatever_comes_between_backward_and_step_finds_no_trial(name, steps_after):
    between = BETWEEN[name]

    def loop(model, optimizer, target, manager=None):
        seen = []
        for _ in range(3):
            step(model, optimizer, target, 1e9)
        for number in range(2):
            torch.set_flush_denormal(False)
            backward(model, target)
            if manager is not None:
                assert wait_until_tried(manager) == 12 or number > 0
            seen.append(between(model, optimizer, target))
            if steps_after:
                optimizer.step()
            else:
                seen.append(everything(model, optimizer))
            optimizer.zero_grad()
            model.train()
        torch.set_flush_denormal(False)
        step(model, optimizer, target, 1e9)
        return [seen, everything(model, optimizer)]

    expected = at_home(lambda: mlp(depth=2), loop)
    model, optimizer, manager, target = managed_mlp()
    with manager:
        torch.manual_seed(1)
        got = plain(loop(model, optimizer, target, manager))
        assert manager.stats.tried_updates > 0
        if name != "nothing" or not steps_after:
            assert manager.stats.taken_back_updates > 0
        assert races() == []
    assert_same(got, expected, name)


@speculating
def test_an_alias_from_before_backward_sees_nothing_before_the_step():
    model, optimizer, manager, target = managed_mlp()
    with manager:
        for _ in range(3):
            step(model, optimizer, target)
        held, state = model[2].weight.data, optimizer.state[model[0].weight]["exp_avg"]
        before = held.clone(), state.clone()
        backward(model, target)
        manager._stm.updates.retract(manager._stm.tensors[-1].pending)
        assert [t.name for t in manager._stm.tensors if t.pending is None] == ["0.weight", "2.weight"]
        assert torch.equal(held, before[0])
        assert torch.equal(state, before[1])


@speculating
def test_a_graph_that_is_kept_runs_again_as_if_nothing_had_been_tried():
    def loop(model, optimizer, target):
        seen = []
        for number in range(5):
            loss = model(batch(target)).square().mean()
            loss.backward(retain_graph=True)
            if number > 2:
                other = model(batch(target)).square().mean()
                (loss + other).backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append([p.detach().clone() for p in model.parameters()] if number > 2 else loss.detach())
        return seen

    expected = at_home(lambda: mlp(depth=2), loop)
    model, optimizer, manager, target = managed_mlp()
    with manager:
        torch.manual_seed(1)
        got = plain(loop(model, optimizer, target))
        assert manager.stats.taken_back_updates > 0
    assert_same(got[3:], expected[3:], "parameters")


@speculating
@pytest.mark.parametrize("ends", ["close", "drop"])
def test_close_takes_back_what_no_step_has_confirmed(ends):
    model, optimizer, manager, target = managed_mlp()
    for _ in range(3):
        step(model, optimizer, target)
    before = everything(model, optimizer)
    backward(model, target)
    wait_until_tried(manager)
    if ends == "close":
        manager.close()
    else:
        del manager
    after = everything(model, optimizer)
    assert_same([after[0], after[2]], [before[0], before[2]], "values")


class WritesItsGradient(torch.optim.Optimizer):
    steps_parameters_independently = True

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                p.grad.div_(p.grad.abs().max())
                state = self.state[p]
                state["count"] = state.get("count", 0) + 1
                state["mean"] = (
                    state.get("mean", torch.zeros_like(p)) * 0.9 + p.grad
                )  # another tensor each time
                p.add_(state["mean"], alpha=-group["lr"] / state["count"])
                if p.grad.isnan().any():
                    raise ValueError("half-way")


def nesterov(parameters):
    """torch's, whose foreach kernel writes to gradients."""
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, nesterov=True, foreach=True)


@speculating
@pytest.mark.parametrize("kind", [WritesItsGradient, nesterov])
@pytest.mark.parametrize("most", [1e9, 1e-3])
@pytest.mark.parametrize("looks", [True, False])
def test_an_optimizer_that_writes_gradients_and_replaces_states(kind, most, looks):
    def loop(model, optimizer, target):
        seen = []
        for number in range(6):
            backward(model, target)
            if looks and number % 2:
                seen.append([p.grad.clone() for p in model.parameters()])
            torch.nn.utils.clip_grad_norm_(model.parameters(), most)
            optimizer.step()
            seen.append([p.grad.clone() for p in model.parameters()] if number % 3 == 0 else None)
            optimizer.zero_grad()
        return [
            seen,
            [list(optimizer.state[p].values()) for p in model.parameters()],
            list(model.parameters()),
        ]

    def make(model):
        return kind(model.parameters())

    expected = at_home(lambda: mlp(depth=2), loop, make)
    model, optimizer, manager, target = managed_mlp(make)
    with manager:
        torch.manual_seed(1)
        got = plain(loop(model, optimizer, target))
        assert manager.stats.tried_updates > 0
    assert_same(got, expected, "seen")


@speculating
@pytest.mark.usefixtures("late_queue")
def test_a_trial_that_raises_raises_when_the_step_is_waited_for_and_has_written_nothing():
    model, optimizer, manager, target = managed_mlp(lambda m: WritesItsGradient(m.parameters()))
    with manager:
        for _ in range(3):
            step(model, optimizer, target)
        before = everything(model, optimizer)
        (model(batch(target)).square().mean() * float("nan")).backward()
        wait_until_tried(manager)
        optimizer.step()
        manager._stm.updates.finish_all()
        with pytest.raises(ValueError, match="half-way"):
            model(batch(target))
        after = everything(model, optimizer)
        assert_same([after[0], after[2]], [before[0], before[2]], "values")


@speculating
def test_copies_made_of_a_wrong_trial_are_made_again():
    def loop(model, optimizer, target):
        seen = []
        for number in range(10):
            loss = model(batch(target)).square().mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3 if number % 2 else 1e9)
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.detach())
        return seen

    torch.manual_seed(0)
    target = device()
    reference = mlp(depth=2).to(target)
    torch.manual_seed(1)
    expected = plain(loop(reference, adamw(reference), target))
    model, optimizer, manager, target = managed_mlp()
    with manager:
        torch.manual_seed(1)
        got = plain(loop(model, optimizer, target))
        assert manager.stats.taken_back_updates > 0  # how many depends on how soon gradients arrive
        assert races() == []
    assert_same(got, expected, "loss")


@speculating
def test_snapshots_keep_to_the_host_budget():
    def peak(host_budget):
        torch.manual_seed(0)
        model = mlp(depth=2)
        optimizer = adamw(model)
        nbytes = sum(p.nbytes for p in model.parameters())
        with hetero.manage(
            model, optimizer, device=device(), device_budget="4MiB", device_homes=False,
            host_budget=host_budget(nbytes),
        ) as manager:  # fmt: skip
            most = 0
            for _ in range(4):
                backward(model, device())
                most = max(most, manager._stm.ledger.host_bytes)
                optimizer.step()
                optimizer.zero_grad()
            return most, manager._host_step.speculation.snapshots.nbytes, manager.stats.tried_updates

    def tight(nbytes):
        return 4 * nbytes + (1 << 9)  # less than the snapshot of a bias

    def half(nbytes):
        return 4 * nbytes + 3 * nbytes // 2

    nbytes = sum(p.nbytes for p in mlp(depth=2).parameters())
    assert peak(tight)[1:] == (0, 0)
    most, snapshots, tried = peak(half)
    assert most <= half(nbytes)
    assert 0 < snapshots <= 3 * nbytes // 2
    assert 0 < tried < 3 * 12


@speculating
@pytest.mark.parametrize("speculate", [None, True])
def test_copies_take_half_of_what_nobody_else_needs_or_all_of_it(speculate):
    homes = 4 * sum(p.nbytes for p in mlp(depth=2).parameters())
    model, optimizer, manager, target = managed_mlp(speculate=speculate, host_budget=homes + homes // 2)
    with manager:
        for _ in range(4):
            step(model, optimizer, target)
        copies = manager._host_step.speculation.snapshots.nbytes
        assert manager.stats.tried_updates > 0
    left = homes // 2  # two thirds of what copies of all would take
    assert (copies <= left // 2) == (speculate is None)
    assert 0 < copies <= left


def test_nothing_is_tried_where_the_user_says_so(monkeypatch):
    monkeypatch.setattr(Speculation, "_is_expected", lambda self: True)
    model, optimizer, manager, target = managed_mlp(speculate=False)
    with manager:
        for _ in range(4):
            step(model, optimizer, target)
        assert manager.stats.tried_updates == 0


def test_iterations_are_watched_longer_after_each_that_came_otherwise(monkeypatch):
    monkeypatch.setattr(Speculation, "_pays", lambda self, nbytes: True)
    model, optimizer, manager, target = managed_mlp()
    tried = []
    with manager:
        counts = manager._stm.trials
        for _ in range(60):
            before = counts.tried
            backward(model, target)
            manager._stm.gradient_access.wait(manager._stm.tensors[0])  # somebody looks
            optimizer.step()
            optimizer.zero_grad()
            tried.append(counts.tried > before)
    places = [number for number, was in enumerate(tried) if was]
    assert [b - a for a, b in itertools.pairwise(places)] == [2, 3, 5, 9, 17]


def test_a_loop_that_clips_every_time_is_never_tried(monkeypatch):
    monkeypatch.setattr(Speculation, "_pays", lambda self, nbytes: True)
    model, optimizer, manager, target = managed_mlp()
    with manager:
        for _ in range(10):
            step(model, optimizer, target, 1e-4)
        assert manager.stats.tried_updates == 0
        for _ in range(6):
            step(model, optimizer, target, 1e9)
        assert manager.stats.tried_updates > 0


def test_an_expectation_needs_one_backward_a_step():
    expectation = Expectation()
    for backwards in (1, 1, 2, 1):
        for _ in range(backwards):
            expectation.note_backward()
        expectation.note_clipping(changes=False)
        expectation.note_step(deferred=True, pays=True)
    assert expectation.is_open
    expectation.note_backward()
    assert expectation.is_open
    expectation.note_backward()
    assert not expectation.is_open


@speculating
def test_an_interrupt_between_backward_and_step_takes_everything_back():
    """The loop is left, and entered again."""

    def loop(model, optimizer, target):
        for _ in range(3):
            step(model, optimizer, target)
        try:
            backward(model, target)
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            optimizer.zero_grad()
        for _ in range(2):
            step(model, optimizer, target)
        return everything(model, optimizer)

    expected = at_home(lambda: mlp(depth=2), loop)
    model, optimizer, manager, target = managed_mlp()
    with manager:
        torch.manual_seed(1)
        got = plain(loop(model, optimizer, target))
    assert_same(got, expected, "everything")


def test_plans_do_not_follow_what_comes_and_goes():
    """Whether trials pay is measured: about the threshold, it changes from one iteration to the next."""
    expectation, changes, was = Expectation(), 0, False
    for number in range(2000):
        expectation.note_backward()
        expectation.note_clipping(changes=False)
        expectation.note_step(deferred=True, pays=number // 10 % 2 == 0)
        changes, was = changes + (expectation.is_habit is not was), expectation.is_habit
    assert changes == 2  # there, and away; then it does not last long enough again
    for _ in range(16):
        expectation.note_backward()
        expectation.note_step(deferred=True, pays=True)
    assert expectation.is_habit
