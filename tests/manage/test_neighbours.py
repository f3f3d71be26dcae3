"""Several managers share a device and a budget: what one does not use is no obstacle to another."""

import contextlib
import functools
import gc

import pytest
import torch
from accelerators import GAPS, ON_CUDA, device
from equality import fresh_memory
from loops import batch, mlp
from random_graphs import WIDTH, Graph, Net, Node
from settling import is_intercepted
from several import in_turn, sgd, twins, two_that_are_trained
from torch import nn
from torch.nn.utils import parametrizations
from twins import adamw

import hetero
from hetero.stm.gradients.offload import Gradients
from hetero.stm.running.between import Between
from hetero.stm.running.relief import Relief


def adversaries(models, optimizers, target, steps=16):
    """The discriminator is called with what is real, with what is made, and, for the generator's sake, with what is
    made and wants a gradient: backward has more to do then."""
    generator, discriminator = models
    for_generator, for_discriminator = optimizers
    seen = []
    for _ in range(steps):
        for_discriminator.zero_grad()
        discriminator(batch(target)).square().mean().backward()
        made = generator(batch(target))
        loss = discriminator(made.detach()).mean()
        loss.backward()
        for_discriminator.step()
        for_generator.zero_grad()
        discriminator(made).mean().neg().backward()
        for_generator.step()
        seen.append(loss.item())
    return seen


@pytest.mark.parametrize(("budget", "settles"), [(16 << 20, True), (260 << 10, False)])
def test_adversaries_follow_their_plans_or_settle(budget, settles):
    steps = 16
    generator, discriminator = twins(
        lambda *given: adversaries(*given, steps=steps), two_that_are_trained, budget
    )
    if settles:
        assert generator.settled_forwards > steps // 2
        assert discriminator.settled_forwards > 3 * steps // 2
    else:
        for stats in (generator, discriminator):
            assert stats.settled_forwards == 0
            assert stats.lower_bound_bytes is not None  # the last iteration has followed its plan


def by_turns(models, optimizers, target, steps=8):
    """Each is frozen while the other learns."""
    (generator, discriminator), (for_generator, for_discriminator) = models, optimizers
    seen = []
    for _ in range(steps):
        generator.requires_grad_(False)
        for_discriminator.zero_grad()
        loss = discriminator(batch(target)).square().mean() + discriminator(generator(batch(target))).mean()
        loss.backward()
        for_discriminator.step()
        generator.requires_grad_(True)
        discriminator.requires_grad_(False)
        for_generator.zero_grad()
        discriminator(generator(batch(target))).mean().neg().backward()
        for_generator.step()
        discriminator.requires_grad_(True)
        seen.append(loss.item())
    return seen


@pytest.mark.usefixtures("homes_on_device")
@pytest.mark.parametrize("budget", [1050 << 10, 1150 << 10])
def test_one_whose_parameters_are_frozen_settles_only_where_there_is_room_for_their_states(budget):
    twins(by_turns, two_with_adam, budget)


def test_who_is_frozen_for_a_while_stays_settled(request):
    """And settles with what the queue has left of its step, however late that is."""
    steps, settled = 16, []
    for fixture in ("monkeypatch", "late_queue"):
        request.getfixturevalue(fixture)
        generator, discriminator = twins(
            lambda *given: by_turns(*given, steps=steps), two_that_are_trained, 16 << 20
        )
        assert generator.settled_forwards > 2 * steps // 2  # of two in each step
        assert discriminator.settled_forwards > 3 * steps // 2
        settled.append((generator.settled_forwards, discriminator.settled_forwards))
    assert settled[0] == settled[1]


def two_with_adam():
    models = mlp(depth=3), mlp(depth=3)
    return models, [torch.optim.Adam(model.parameters(), lr=1e-3, foreach=False) for model in models]


def taught():
    student, teacher = mlp(depth=3), mlp(depth=3)
    teacher.load_state_dict(student.state_dict())
    return (student, teacher.requires_grad_(False)), [sgd(student), None]


def distil(models, optimizers, target, steps=10, own=lambda p: p.data):
    """A student learns from a teacher, which is the average of what it has been. ``own``: what is averaged there."""
    student, teacher = models
    seen = []
    for _ in range(steps):
        x = batch(target)
        with torch.no_grad():
            aim = teacher(x)
        loss = (student(x) - aim + 1).square().mean()
        loss.backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
        with torch.no_grad():
            for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
                own(slow).mul_(0.9).add_(fast.detach(), alpha=0.1)
        seen.append(loss)
    return seen


def distil_in_place(models, optimizers, target):
    return distil(models, optimizers, target, own=lambda p: p)


def prefer(models, optimizers, target, steps=8):
    """A policy is called twice for each backward, in which its gradients add up beside what a frozen reference has."""
    policy, reference = models
    seen = []
    for _ in range(steps):
        good, bad = batch(target), batch(target)
        with torch.no_grad():
            aims = reference(good), reference(bad)
        loss = ((policy(good) - aims[0]).square() - (policy(bad) - aims[1])).mean()
        loss.backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
        seen.append(loss)
    return seen


def ask_afterwards(models, optimizers, target, steps=8):
    """What a frozen reference says is asked for once the policy is waiting for its backward."""
    policy, reference = models
    seen = []
    for _ in range(steps):
        x = batch(target, rows=256)
        y = policy(x)
        with torch.no_grad():
            aim = reference(x)
        loss = (y - aim).square().mean()
        loss.backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
        seen.append(loss.item())
    return seen


def two_with_one_optimizer():
    models = mlp(depth=2), mlp(depth=2)
    optimizer = torch.optim.Adam([p for model in models for p in model.parameters()], lr=1e-2)
    return models, [optimizer, optimizer]


def in_a_chain(models, optimizers, target, steps=14):
    """The second one trains for longer before its kind of iteration comes again."""
    first, second = models
    optimizer = optimizers[0]
    if not is_intercepted(first):
        optimizer.param_groups[0]["fused"] = True  # what is chosen for a managed one
    seen = []
    for number in range(steps):
        loss = second(first(batch(target))).square().mean()
        if number < 6:
            loss = loss + second(batch(target, 9 + number)).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.detach())
    return seen


@pytest.mark.usefixtures("homes_on_device")
def test_one_that_settles_leaves_the_others_parameters_of_one_optimizer_alone():
    """They live on the device, and are stepped there: what moves the versions of their homes would undo that."""
    for stats in twins(in_a_chain, two_with_one_optimizer, 16 << 20):
        assert stats.settled_forwards > 0


def wide(depth):
    layers = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(depth)]
    return nn.Sequential(*layers)


def two_in_a_loop():
    """Whose step is a for-loop, with copies of a parameter for a while."""
    models = wide(4), wide(3)
    parameters = [p for model in models for p in model.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, foreach=False)
    return models, [optimizer, optimizer]


@pytest.mark.parametrize("budget", range(2_600_000, 3_600_000, 100_000))
def test_what_lives_on_the_device_leaves_room_for_the_step_of_one_that_has_settled(budget):
    target = device()
    gc.collect()
    torch.manual_seed(0)
    models, optimizers = two_in_a_loop()
    budget += torch.accelerator.memory_allocated()
    with contextlib.ExitStack() as stack:
        for model, optimizer in zip(models, optimizers, strict=True):
            stack.enter_context(hetero.manage(model, optimizer, device=target, device_budget=budget))
        for _ in range(12):
            models[1](models[0](torch.randn(16, 64).to(target))).square().mean().backward()
            torch.accelerator.reset_peak_memory_stats()
            optimizers[0].step()
            assert torch.accelerator.max_memory_allocated() <= budget + GAPS
            optimizers[0].zero_grad()


def there_and_back(models, optimizers, target, steps=6):
    """One backward comes through the first model, the second, and the first again."""
    first, second = models
    seen = []
    for _ in range(steps):
        loss = first(second(first(batch(target, rows=128)))).square().mean()
        loss.backward()
        seen.append(loss)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return seen


# Each model has 196 KiB of parameters, and 587 KiB with gradients and states. Of one, an operator needs 98 KiB.
@pytest.mark.parametrize("budget", [130 << 10, 250 << 10, 400 << 10, 2 << 20])
@pytest.mark.parametrize(("loop", "build"), [(in_turn, two_that_are_trained), (distil, taught)])
def test_what_one_model_needs_another_does_not_keep(loop, build, budget):
    twins(loop, build, budget)


@pytest.mark.parametrize("budget", [500 << 10, 600 << 10])
def test_a_teacher_that_would_fit_is_averaged_in_place_with_a_student_that_does_not(budget):
    twins(distil_in_place, taught, budget)


# Where what the second half of its backward takes counts as nothing, both are passed.
@pytest.mark.parametrize("budget", [700 << 10, 800 << 10])
def test_a_model_that_a_backward_comes_back_to_is_measured_there_as_well(budget):
    twins(there_and_back, two_that_are_trained, budget)


def test_another_models_idle_copies_are_no_growth():
    stats = twins(distil, taught, 400 << 10)
    # Were the teacher's copies kept free twice over for good, all of the student's would be fetched as they are needed.
    student = len(list(mlp(depth=3).parameters()))
    assert stats[0].unplanned_fetches < student


# When it is measured the reference leaves in the middle of backward; when it follows its plan, it is there again.
@pytest.mark.parametrize("budget", [340 << 10, 380 << 10, 460 << 10])
def test_what_another_model_gave_in_the_middle_of_an_operator_it_may_have_again(budget):
    twins(prefer, taught, budget)


class Recurrent(nn.Module):
    """What takes much more in an operator than it saves, forward and backward."""

    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(64, 64)

    def forward(self, x):
        return x + self.gru(x[None])[0][0]


# One backward comes through both models, and is guarded by either.
@pytest.mark.skipif(
    ON_CUDA, reason="cuDNN's backward of it asks for 20 MiB at once: refused under these budgets"
)
@pytest.mark.parametrize("budget", [1700 << 10, 2120 << 10])
def test_what_another_models_guard_let_go_in_the_middle_of_an_operator_may_be_there_again(budget):
    def build():
        wide = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.Linear(64, 64))
        models = [nn.Sequential(nn.Linear(64, 64), Recurrent(), nn.Linear(64, 64)), wide]
        return models, [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]

    def loop(models, optimizers, target):
        seen = []
        for step in range(8):
            loss = sum(models[1](models[0](batch(target, 256))) for _ in range(2)).square().mean()
            for keeps_graph in [True, False] if step == 0 else [False]:
                loss.backward(retain_graph=keeps_graph)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            seen.append(loss.detach())
        return seen

    twins(loop, build, budget)


def test_what_backward_finds_to_be_stale_has_left_before_anyone_looks_at_what_there_is(monkeypatch):
    """Otherwise a caller's part is measured with another model's copies, and its backward runs without them; next time
    they may stay."""
    there, left = [], []
    before_backward = Between.before_backward

    def looked(self):
        before_backward(self)
        there.append(torch.accelerator.memory_allocated())

    monkeypatch.setattr(Between, "before_backward", looked)

    def loop(models, optimizers, target):
        seen = []
        for _ in range(5):
            loss = models[1](models[0](batch(target))).square().mean()
            given = [p.detach() for p in models[1].parameters()]  # and may have been written to
            there.clear()
            before = torch.accelerator.memory_allocated()
            loss.backward()
            if len(there) == 2:  # else one has settled
                assert there[0] == there[1]
                left.append(before - there[0])
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            seen.append(loss.detach())
            del given
        return seen

    twins(loop, two_that_are_trained, 1 << 20)
    assert max(left) > 64 << 10, "or there was nothing that could leave"


class Beside(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return x + self.inner(x.to(next(self.inner.parameters()).dtype))


# Found among random programs. In an iteration that is planned, and measured once more, the first model's idle copies
# leave for an operator of the second's; later it finds them there, and its own within what the plan allows.
@pytest.mark.parametrize("budget", [916 << 10, 1048 << 10])
def test_what_others_gave_for_an_operator_they_are_asked_for_again(budget):
    def build():
        kinds = (("linear", 2, 2), ("linear", 1, 0), ("residual", 2, 3), ("residual", 1, 1))
        first = Graph(tuple(Node(*kind) for kind in kinds), 3, frozenset({1}))
        kinds = (("checkpoint", 1, 2), ("weight only", 1, 3), ("dropout", 0, 0), ("linear", 1, 3))
        kinds += (("dropout", 1, 2), ("linear", 1, 2), ("norm", 0, 3))
        second = Graph(tuple(Node(*kind) for kind in kinds), 2, frozenset())
        normed = parametrizations.spectral_norm(nn.Linear(64, 64))
        parts = Beside(normed), Beside(nn.Linear(64, 64).bfloat16()), Beside(nn.BatchNorm1d(64))
        models = [
            nn.Sequential(nn.Linear(64, WIDTH), Net(first), nn.Linear(WIDTH, 64), nn.Linear(64, 64)),
            nn.Sequential(nn.Linear(64, WIDTH), Net(second), nn.Linear(WIDTH, 64), *parts, nn.Linear(64, 64)),
        ]
        first_sgd = torch.optim.SGD(models[0].parameters(), 0.001, momentum=0.9, nesterov=True)
        return models, [first_sgd, torch.optim.SGD(models[1].parameters(), 0.001)]

    def loop(models, optimizers, target):
        seen = []
        for step in range(7):
            together = step % 2 == 0
            model = nn.Sequential(*models[not together :])
            for _ in range(3 if together else 1):
                x = batch(target, 250)
                loss = model(x).square().mean()
                if together:
                    with torch.no_grad():
                        seen.append(model(x).sum())
                loss.backward()
                seen.append(loss.detach())
            for optimizer in optimizers[not together :]:
                optimizer.step()
                optimizer.zero_grad()
        return seen

    twins(loop, build, budget, warmup_steps=2, prefetch=False)


class Gated(nn.Module):
    """The product of two: an operator saves its operands, and then takes as much again."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.gate, self.up = nn.Linear(32, 64, bias=False), nn.Linear(32, 64, bias=False)
        self.down = nn.Linear(64, 32, bias=False)

    def forward(self, x):
        y = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


def two_gated():
    models = [nn.Sequential(*(Gated() for _ in range(4))) for _ in range(2)]
    return models, [adamw(model) for model in models]


train_gated = functools.partial(in_turn, steps=4, rows=functools.partial(batch, rows=36, width=32))


@pytest.mark.parametrize("budget", [106496, 115712, 123904, 128512])
def test_who_finds_no_room_when_operands_are_saved_has_it_of_another_model(budget):
    twins(train_gated, two_gated, budget)


@pytest.mark.skipif(GAPS > 0, reason="the cap is on segments there, and none of it is refused")
@pytest.mark.parametrize("budget", [106496, 128512])
def test_an_operator_that_is_under_way_when_nothing_can_leave_is_refused_in_words(monkeypatch, budget):
    monkeypatch.setattr(Relief, "frees", lambda self, nbytes: False)
    with pytest.raises(
        hetero.NoRoomError, match=r"had begun before room ran short needs .* raise device_budget"
    ):
        twins(train_gated, two_gated, budget)


def test_who_runs_out_of_memory_takes_no_more_of_another_model_than_that():
    stats = twins(lambda *given: prefer(*given, steps=12), taught, 420 << 10)
    # Of 24 forwards: had it to give all whenever the policy lacks something, it would fetch half as much more.
    reference = sum(p.nbytes for p in mlp(depth=3).parameters())
    assert stats[1].total_fetched_bytes < 24 * reference * 2 // 3


# The loss takes 385 KiB beside what the policy has saved, of which 513 KiB, or less, can stay.
@pytest.mark.parametrize("budget", [900 << 10, 1050 << 10, 1200 << 10, 1350 << 10])
def test_what_the_caller_takes_after_two_models_is_kept_free_by_both(budget):
    policy, _ = twins(ask_afterwards, taught, budget)
    assert policy.activation_in_bytes > 0
    assert policy.unplanned_fetches == 0


class Wide(nn.Module):
    """Takes several times as much as it is given, forward and backward."""

    def __init__(self, times):
        super().__init__()
        self.times = times

    def forward(self, x):
        return torch.cat([x] * self.times, 1).square().view(len(x), self.times, -1).sum(1)


def chain_of(*layers):
    """Of layers of so many outputs, times that the next one takes."""
    modules, inputs = [], 64
    for outputs, times in (*layers, (64, 0)):
        modules += [nn.Linear(inputs, outputs), nn.Tanh(), *([Wide(times)] if times else [])]
        inputs = outputs
    return nn.Sequential(*modules)


def in_one_graph(models, optimizers, target):
    """Iterations of two backwards, now through both, now through the second alone."""
    first, second = models
    for step in range(10):
        x = torch.randn(32, 64).to(target)
        for _ in range(2):
            with torch.autograd.graph.save_on_cpu():
                y = second(first(x) if step % 4 < 2 else x)
            loss = y.square().mean()
            del y  # which backward frees
            loss.backward()
        for optimizer in optimizers if step % 4 < 2 else optimizers[1:]:
            optimizer.step()
            optimizer.zero_grad()


def test_beside_what_another_has_on_the_device_fewer_gradients_are_on_their_way(monkeypatch):
    """Than planned: what they would take was measured without it. None arrives before it is waited for."""
    reclaim = Gradients.reclaim
    monkeypatch.setattr(
        Gradients, "reclaim", lambda self, nbytes: reclaim(self, nbytes) if nbytes > 0 else None
    )
    target = device(bandwidth="100GiB/s", latency="1us")
    torch.manual_seed(0)
    models = [chain_of((32, 0), (64, 2)), chain_of((256, 4), (128, 0))]
    optimizers = [adamw(model) for model in models]
    limit = fresh_memory() + (1005 << 10)
    with contextlib.ExitStack() as stack:
        for model, optimizer in zip(models, optimizers, strict=True):
            stack.enter_context(hetero.manage(model, optimizer, device=target, device_budget=limit))
        in_one_graph(models, optimizers, target)
        assert torch.accelerator.max_memory_allocated() <= limit + GAPS
