"""Clipping and gradient scalers, beside updates that are done later: the same bits, and no gradient is read."""

import copy

import pytest
import torch
from accelerators import ON_CUDA, ON_HOST
from lateness import managed_mlp, pending, stopped
from loops import backward, batch, mlp
from torch import nn
from twins import adamw, assert_same, assert_twins, at_home, device, managed, plain, unmanaged

import hetero
from hetero.stm.copies.room import Room
from hetero.stm.gradients import access, norms
from hetero.stm.gradients.norms import GradientNorms
from hetero.stm.gradients.offload import Gradients
from hetero.stm.interception import totals
from hetero.units import parse_bytes

pytestmark = pytest.mark.usefixtures("late_queue")


def test_clipping_accumulation_and_a_scheduler():
    def loop(model, optimizer, target):
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=20)
        seen = []
        for _ in range(4):
            for _ in range(4):
                (model(batch(target)).square().mean() / 4).backward()
            seen.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        return seen

    assert_twins(mlp, loop)


class Doubles(torch.optim.Optimizer):
    """A user's own, which writes to gradients, and has its closure called whenever it likes."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1e-2})

    def step(self, closure=None):
        loss = None if closure is None else closure()
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.grad.mul_(2)
                    p.add_(p.grad, alpha=-group["lr"])
        return loss


@pytest.mark.parametrize("closure", [False, True])
@pytest.mark.parametrize("makes_states", [False, True])
@pytest.mark.parametrize("share", [0.6, 4.0])
@pytest.mark.parametrize(
    "make_optimizer",
    [
        lambda model: torch.optim.SGD(model.parameters(), 1e-2, momentum=0.9, nesterov=True, foreach=True),
        lambda model: Doubles(model.parameters()),
    ],
)
def test_gradients_that_a_step_has_written_to_are_clipped_by_what_they_are_then(
    make_optimizer, share, makes_states, closure
):
    """torch's foreach SGD adds Nesterov's momentum to them, in a step that is done later, or at once, where it makes
    states."""

    def loop(model, optimizer, target):
        states, seen = copy.deepcopy(optimizer.state_dict()), []

        def backward():
            loss = model(batch(target)).square().mean()
            loss.backward()
            return loss

        for _ in range(5):
            if not closure:
                backward()
            seen.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3))
            optimizer.step(backward if closure else None)
            seen.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3))
            optimizer.zero_grad()
            if makes_states:
                optimizer.load_state_dict(states)
        return seen

    assert_twins(mlp, loop, share=share, make_optimizer=make_optimizer)


@pytest.fixture
def norms_taken(monkeypatch):
    """For each clipping, whether it got by without reading gradients."""
    original, original_once = GradientNorms.get, GradientNorms.take_once
    answers, copied_up = [], []

    def take_once(self, index, *rest):
        copied_up.append(index)
        original_once(self, index, *rest)

    def get(self, indices, norm_type, at_home):
        answers.append(not (at_home or copied_up))
        copied_up.clear()
        return original(self, indices, norm_type, at_home)

    monkeypatch.setattr(GradientNorms, "take_once", take_once)
    monkeypatch.setattr(GradientNorms, "get", get)
    return answers


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf"), 3.0])
def test_clipping_reads_no_gradient_and_has_the_same_bits(norm_type, norms_taken):
    def loop(model, optimizer, target):
        seen = []
        for step in range(6):
            backward(model, target)
            most = 1e-3 if step < 4 else 100.0
            seen.append(torch.nn.utils.clip_grad_norm_(model.parameters(), most, norm_type))
            if step == 3:
                seen.append([p.grad.clone() for p in model.parameters()])
            optimizer.step()
            if step == 2:
                seen.append([p.grad.clone() for p in model.parameters()])
            optimizer.zero_grad()
            with torch.no_grad():  # with gradients, autograd might reach the weight by this path too
                seen.append(model[0].weight.clone())
        return seen

    assert_twins(mlp, loop)
    assert norms_taken == [False, True, True, True, True, True]


@pytest.mark.parametrize("room", ["enough", "none", "in no gap"])
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_norms_of_gradients_at_home_are_taken_on_a_device_that_rounds_otherwise(
    monkeypatch, room, micro_batches, norm_type
):
    taken, own = [], norms.norms_of_group

    def recorded(gradients, *rest, **given):
        taken.extend(gradient.device.type for gradient in gradients)
        return own(gradients, *rest, **given)

    def refused(*_):
        raise torch.OutOfMemoryError("no gap")

    monkeypatch.setattr(access, "norms_depend_on", lambda device, order: order == 2.0)
    monkeypatch.setattr(norms, "norms_of_group", recorded)
    if room == "none":
        monkeypatch.setattr(Room, "make", lambda self, nbytes, **_: False)
    elif room == "in no gap":
        monkeypatch.setattr(Gradients, "on_device", refused)
    rounds = room == "enough" and norm_type == 2.0  # the largest number is the same wherever it is looked for

    def loop(model, optimizer, target):
        seen = []
        for _ in range(3):
            for _ in range(micro_batches):
                backward(model, target)
            taken.clear()
            weight = model[0].weight.grad  # nobody knows what becomes of it
            seen.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3, norm_type=norm_type))
            if weight.is_cpu:
                assert ("cpu" in taken) is not rounds
            optimizer.step()
            optimizer.zero_grad()
        return seen

    if ON_CUDA and room != "enough" and norm_type == 2.0:  # taken at home, with the host's bits
        managed(mlp, loop, int(0.6 * unmanaged(mlp, loop)[2]), device_homes=False)
    else:
        assert_twins(mlp, loop, device_homes=False)


def _apart(parameters):
    total = torch.nn.utils.get_total_norm([p.grad for p in parameters])
    torch.nn.utils.clip_grads_with_norm_(parameters, 1e-3, total)


@pytest.mark.skipif(ON_CUDA, reason="an allocator's cap is not one to the byte there")
@pytest.mark.parametrize("copies", [0, 1, 2])
@pytest.mark.parametrize(
    "clip",
    [
        lambda parameters: torch.nn.utils.clip_grad_norm_(parameters, 1e-3),
        lambda parameters: torch.nn.utils.clip_grad_norm_(parameters, 1e-3, foreach=False),
        _apart,
    ],
    ids=["clipped", "one by one", "apart"],
)
def test_copies_for_norms_keep_to_the_budget(monkeypatch, clip, copies):
    """There is room for so many of them."""
    for module in (access, totals):
        monkeypatch.setattr(module, "norms_depend_on", lambda device, order: device.type == "virtual")
    taken = []
    for module, name in ((norms, "norms_of_group"), (totals, "norms_of_group")):
        own = getattr(module, name)

        def recorded(gradients, *rest, own=own, **given):
            taken.extend(gradient.device.type for gradient in gradients)
            return own(gradients, *rest, **given)

        monkeypatch.setattr(module, name, recorded)
    target = device()
    model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(6)])
    optimizer = adamw(model)
    budget = torch.accelerator.memory_allocated() + (400 << 10)
    with hetero.manage(model, optimizer, device=target, device_budget=budget, device_homes=False) as manager:
        for _ in range(3):
            backward(model, target)
            clip(list(model.parameters()))
            optimizer.step()
            optimizer.zero_grad()
        backward(model, target)
        parameters = list(model.parameters())
        looked_at = [parameter.grad for parameter in parameters]
        manager._stm.residency.evict_idle()
        room = copies * looked_at[0].nbytes + 5 * 512  # what clipping makes of norms
        held = torch.empty(
            budget - torch.accelerator.memory_allocated() - room, dtype=torch.uint8, device=target
        )
        torch.accelerator.reset_peak_memory_stats()
        taken.clear()
        clip(parameters)
        assert taken == (["cpu"] if copies == 0 else [target.type]) * len(parameters)
        assert torch.accelerator.max_memory_allocated() <= budget
        del held


@pytest.mark.parametrize("others", [0, 1], ids=["alone", "with a parameter of the loss"])
def test_clipping_does_not_wait(norms_taken, others):
    model, optimizer, manager, target = managed_mlp(speculate=False)
    extra = [torch.ones(64, device=target, requires_grad=True) for _ in range(others)]
    clipped = [*extra, *model.parameters()]

    def backward_and_clip():
        sum(extra, model(batch(target))).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(clipped, 1e-3)

    with manager:
        for _ in range(2):
            backward_and_clip()
            optimizer.step()
            optimizer.zero_grad()
        manager._stm.home_access.finish_updates()  # the next forward would wait for them, and let all others run
        with stopped(manager), pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                manager._stm.gradients, "wait", lambda tensor: pytest.fail("a gradient was waited for")
            )
            backward_and_clip()
            optimizer.step()
            assert pending(manager)
    assert norms_taken == [False, True, True]


def test_a_gradient_that_was_looked_at_changed_or_added_to_is_read_again(norms_taken):
    def loop(model, optimizer, target):
        seen = []
        weight = model[2].weight
        for step in range(8):
            backward(model, target)
            if step == 1:
                weight.grad.mul_(100.0)
            elif step == 2:
                weight.grad = weight.grad * 50
            elif step == 3:
                weight.grad = None
            elif step == 4:
                backward(model, target)
            elif step == 5:
                held = weight.grad.detach() if weight.grad.is_cuda else weight.grad.numpy()
                held[0, 0] = 3.0
            elif step == 6:
                (g,) = torch.autograd.grad(model(batch(target)).square().mean(), [weight])
                seen.append(g)
            seen.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3))
            seen.append(torch.nn.utils.clip_grad_norm_(list(model.parameters())[:3], 1e-4))
            optimizer.step()
            optimizer.zero_grad()
        return [seen, list(model.parameters())]

    expected = at_home(lambda: mlp(depth=2), loop)
    model, optimizer, manager, target = managed_mlp(speculate=False)
    with manager:
        torch.manual_seed(1)
        got = plain(loop(model, optimizer, target))
    assert_same(got, expected, "seen")
    # Without a gradient (3) the rest is still true; the second of each pair comes after a scaling.
    assert norms_taken[::2] == [False, False, False, True, False, False, False, True]
    assert not any(norms_taken[1::2])


def test_a_held_gradient_is_scaled_at_once_and_norms_apart_from_scaling(norms_taken):
    def loop(model, optimizer, target):
        seen = []
        for step in range(4):
            backward(model, target)
            held = [model[0].weight.grad, model[2].weight.grad.view(-1)] if step % 2 else []
            total = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
            torch.nn.utils.clip_grads_with_norm_(model.parameters(), 1e-3, total)
            seen.append([total, [h.clone() for h in held]])
            optimizer.step()
            optimizer.zero_grad()
        return seen

    assert_twins(mlp, loop)


def test_clipping_raises_on_what_is_not_finite(norms_taken):
    def loop(model, optimizer, target):
        for _ in range(3):
            backward(model, target)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()
            optimizer.zero_grad()
        (model(batch(target)).square().mean() * float("inf")).backward()
        with pytest.raises(RuntimeError, match="non-finite"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        return [p.grad.clone() for p in model.parameters()]

    assert_twins(mlp, loop)
    assert norms_taken[-1]


def test_clipping_is_torchs_own_again_after_close():
    before = torch.nn.utils.clip_grad_norm_.__closure__[0].cell_contents
    _, _, manager, _ = managed_mlp(speculate=False)
    assert torch.nn.utils.clip_grad_norm_.__closure__[0].cell_contents is not before
    manager.close()
    assert torch.nn.utils.clip_grad_norm_.__closure__[0].cell_contents is before


def test_a_scaler_and_clipping_by_value_wait_for_nothing_on_the_host(norms_taken):
    model, optimizer, manager, target = managed_mlp(speculate=False)
    scaler = torch.amp.GradScaler(target.type, init_scale=2.0**10)

    def scaled_step():
        scaler.scale(model(batch(target)).square().mean()).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)
        scaler.step(optimizer)
        scaler.update()

    with manager:
        for _ in range(2):
            scaled_step()
            optimizer.zero_grad()
        manager._stm.home_access.finish_updates()  # or the forward waits for one, which lets all of them run
        with stopped(manager), pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                manager._stm.gradients, "wait", lambda tensor: pytest.fail("a gradient was waited for")
            )
            scaled_step()
            assert pending(manager)
    assert norms_taken == [False, True, True]


@pytest.mark.parametrize("odd", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("seen_by", ["the device", "the host", "both"])
def test_one_number_that_is_not_finite_skips_the_step(odd, seen_by):
    class Spoils(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, spoils):
            ctx.spoils = spoils
            return x.view_as(x)

        @staticmethod
        def backward(ctx, gradient):
            gradient = gradient.clone()
            if ctx.spoils:
                gradient[0, 0] = odd
            return gradient, None

    def loop(model, optimizer, target):
        scaler = torch.amp.GradScaler(target.type, init_scale=2.0**10, growth_interval=2)
        seen = []
        for step in range(6):
            for micro in range(1 if seen_by == "the device" else 2):
                spoils = step == 3 and micro == 0
                scaler.scale(Spoils.apply(model(batch(target)), spoils).square().mean()).backward()
            if seen_by == "both" and step == 4:
                model[0].weight.grad[1, 1] = odd
            scaler.unscale_(optimizer)
            seen.append([p.grad.clone() for p in model.parameters()] if step == 5 else [])
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            seen.append(scaler.get_scale())
        return seen

    assert_twins(mlp, loop)


@pytest.mark.parametrize("homes", [False, True])
def test_a_parameter_without_numbers_has_no_largest(homes):
    class Empty(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.empty = mlp(depth=2), nn.Parameter(torch.zeros(0))

        def forward(self, x):
            return self.inner(x) + self.empty.sum()

    def loop(model, optimizer, target):
        scaler = torch.amp.GradScaler(target.type, init_scale=2.0**10, growth_interval=2)
        seen = []
        for _ in range(5):
            scaler.scale(model(batch(target)).square().mean()).backward()
            scaler.unscale_(optimizer)
            seen.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-2))
            with pytest.raises(RuntimeError, match="empty"):
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-2, norm_type=float("inf"))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return [*seen, scaler.get_scale()]

    assert_twins(Empty, loop, device_homes=homes)


@pytest.mark.parametrize("homes", [False, True])
def test_clipping_by_value_has_the_same_bits(homes):
    def loop(model, optimizer, target):
        seen = []
        for step in range(10):
            backward(model, target)
            if step % 3 == 1:
                seen.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-2))
            torch.nn.utils.clip_grad_value_(model.parameters(), 1e-4)
            if step % 3 == 2:
                seen.append(torch.nn.utils.clip_grad_norm_(list(model.parameters())[:3], 1e-3))
            if step % 4 == 3:
                seen.append([p.grad.clone() for p in model.parameters()])
            torch.nn.utils.clip_grad_value_(model[0].weight, 1e-5)
            optimizer.step()
            optimizer.zero_grad()
        return seen

    assert_twins(mlp, loop, device_homes=homes)


@pytest.mark.parametrize("clipped", ["every step", "every other step"])
def test_grad_scaler_with_a_forced_inf(clipped):
    def loop(model, optimizer, target):
        scaler = torch.amp.GradScaler(device().type, init_scale=2.0**10, growth_interval=2)
        seen = []
        for step in range(7):
            loss = model(batch(target)).square().mean()
            scaler.scale(loss).backward()
            if step in (3, 4):
                next(model.parameters()).grad.view(-1)[0] = float("inf")
            if step % 2 or clipped == "every step":
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            seen.append([loss, scaler.get_scale()])
        return seen

    assert_twins(mlp, loop)


@pytest.mark.skipif(ON_CUDA, reason=ON_HOST)
def test_grad_scaler_with_a_fused_optimizer_that_unscales_by_itself():
    def run(manage):
        torch.manual_seed(0)
        target = torch.device("cpu")
        model = mlp(depth=2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        manager = None
        if manage:
            target = device()
            manager = hetero.manage(model, optimizer, device=target, device_budget="4MiB")
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        torch.manual_seed(1)
        seen = []
        for step in range(6):
            loss = model(batch(target)).square().mean().cpu()
            scaler.scale(loss).backward()
            if step == 3:
                next(model.parameters()).grad.view(-1)[0] = float("inf")
            scaler.step(optimizer)
            scaler.update()
            if step == 4:
                seen.append([p.grad for p in model.parameters()])
            optimizer.zero_grad()
            seen.append([loss, scaler.get_scale()])
        if manager is not None:
            assert manager._host_step.queued > 0
            manager.close()
        return plain([*seen, list(model.parameters())])

    expected = run(manage=False)
    assert_same(run(manage=True), expected, "seen")


@pytest.mark.parametrize("share", [0.6, 1.5])
@pytest.mark.parametrize(
    "clips", ["its own", "its own by value", "some after the last", "all after the last"]
)
def test_clipping_in_hooks_of_accumulated_gradients(clips, share):
    """What is read in the hook is clipped."""

    def loop(model, optimizer, target):
        parameters = list(model.parameters())
        calls, found = [], {}

        def hook(parameter):
            calls.append(parameter)
            (index,) = [index for index, other in enumerate(parameters) if other is parameter]
            clipped = [parameter]
            if "last" in clips:
                if len(calls) % len(parameters):
                    return
                index, clipped = 0, parameters[:3] if "some" in clips else parameters
            if "value" in clips:
                torch.nn.utils.clip_grad_value_(clipped, 1e-3)
            else:
                torch.nn.utils.clip_grad_norm_(clipped, 1e-3)
            found[index] = [each.grad.clone() for each in clipped]

        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(hook)
        seen = []
        for _ in range(5):
            for _ in range(2):
                found.clear()
                backward(model, target)
                seen.append(
                    [found[index] for index in sorted(found)]
                )  # nobody says in which order they are called
            seen.append([parameter.grad for parameter in parameters])
            optimizer.step()
            optimizer.zero_grad()
        return seen

    assert_twins(mlp, loop, share=share)


@pytest.mark.parametrize("bandwidth", ["20MiB/s", "100MiB/s"])
@pytest.mark.parametrize("budget", ["250KiB", "300KiB"])
@pytest.mark.parametrize(
    "clip",
    [
        lambda parameters: torch.nn.utils.clip_grad_norm_(parameters, 1e-3),
        lambda parameters: torch.nn.utils.get_total_norm([p.grad for p in parameters]),
        lambda parameters: sum(p.grad.abs().max().cpu() for p in parameters),
    ],
    ids=["clipped", "a norm", "read"],
)
def test_on_another_stream_that_waits_and_is_waited_for(clip, budget, bandwidth):
    """What leaves meanwhile, because it was tried in vain, is given back in the order of the stream of before."""

    def loop(model, optimizer, target):
        side, seen = torch.Stream(device=target), []
        for _ in range(12):
            backward(model, target)
            before = torch.accelerator.current_stream()
            side.wait_stream(before)
            with side:
                seen.append(clip(list(model.parameters())))
            before.wait_stream(side)
            optimizer.step()
            optimizer.zero_grad()
        return seen

    assert_twins(lambda: mlp(depth=2), loop, budget=parse_bytes(budget), bandwidth=bandwidth)
