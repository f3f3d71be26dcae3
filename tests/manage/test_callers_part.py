"""What the caller does between forward, backward and step, while nothing has been measured: it finds room, or is
refused as an operator of the model's is."""

import contextlib
import gc
import os

import pytest
import torch
import torch._dynamo
from accelerators import GAPS, clear_races, races
from equality import fresh_memory
from functorch.compile import make_boxed_func
from loops import batch, mlp
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from twins import adamw, assert_twins, device

import hetero
from hetero.eviction import CapacityError, HomeStep
from hetero.eviction.placement import Placement
from hetero.stm.plans import homechoice
from hetero.stm.plans.homechoice import HomeChoice

WIDTH, ROWS = 96, 32

pytestmark = pytest.mark.skipif(GAPS > 0, reason="the caller's part is not capped there")


def chain():
    return nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(WIDTH, WIDTH), nn.Tanh())])


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, fused=True)


def penalized(model, optimizer, target, steps=6, of=lambda x, model: [x]):
    """With a loss on gradients, which are wide for a while."""
    seen = []
    for _ in range(steps):
        x = batch(target, ROWS, WIDTH).requires_grad_()
        loss = model(x).square().mean()
        gradients = torch.autograd.grad(loss, of(x, model), create_graph=True)
        penalty = sum(gradient.to(target).square().sum() for gradient in gradients)
        optimizer.zero_grad()
        (loss + penalty).backward()
        optimizer.step()
        seen += [loss.detach(), penalty.detach()]
        del gradients, penalty, loss
    return seen


@pytest.mark.parametrize(
    ("of", "share"),
    [
        (lambda x, model: [x], 0.45),
        (lambda x, model: [x], 0.5),
        (lambda x, model: list(model.parameters()), 0.46),
        (lambda x, model: list(model.parameters()), 0.5),
    ],
)
def test_weights_that_a_recorded_backward_has_read_may_leave(of, share):
    assert_twins(chain, lambda *job: penalized(*job, of=of), share=share)


def wide(y, times):
    return torch.cat([y * k for k in range(1, times + 1)], 1)


@contextlib.contextmanager
def job(budget, build=chain, **keywords):
    """A model, its input, and so many bytes for both; nobody else's."""
    target = device()
    gc.collect()
    clear_races()
    fresh_memory()
    torch.manual_seed(0)
    model = build()
    optimizer = adamw(model)
    base = torch.accelerator.memory_allocated()
    with hetero.manage(model, optimizer, device=target, device_budget=base + budget, **keywords) as manager:
        torch.accelerator.reset_peak_memory_stats()
        yield model, optimizer, batch(target, ROWS, WIDTH), manager
        assert torch.accelerator.max_memory_allocated() <= base + budget
    assert _get_current_dispatch_mode_stack() == []
    torch.empty(0)  # torch knows that there are none
    assert not races()


@pytest.mark.parametrize("kind", [hetero.BudgetError, torch.OutOfMemoryError])
@pytest.mark.parametrize("after", ["forward", "a recorded backward", "backward"])
def test_what_finds_no_room_is_refused_by_name(kind, after):
    with job(300 << 10) as (model, _, x, _):
        y = model(x.requires_grad_())
        if after == "a recorded backward":
            torch.autograd.grad(y.sum(), x, create_graph=True)
        elif after == "backward":
            y.sum().backward()
        with pytest.raises(kind, match=r"aten\.\w+\.Tensor needs .* more .* raise device_budget to"):
            wide(y.detach(), 25)


def test_after_a_backward_copies_leave_for_it():
    with job(280 << 10) as (model, optimizer, x, manager):
        y = model(x)
        y.sum().backward()
        there = torch.accelerator.memory_allocated()
        expected = wide(y.detach().cpu(), 10)
        found = wide(y.detach(), 10)
        assert there + 2 * found.nbytes > manager.config.device_budget, "or it had room anyway"
        assert torch.equal(found.cpu(), expected)
        del found, y
        optimizer.step()


def test_an_evaluation_in_inference_mode_comes_between_forward_and_backward():
    with job(2 << 20) as (model, optimizer, x, _):
        y = model(x)
        assert len(_get_current_dispatch_mode_stack()) == 1
        with torch.inference_mode():
            model(x[:4])
        torch.empty(0)
        y.sum().backward()
        optimizer.step()
        assert _get_current_dispatch_mode_stack() == []


def test_a_forked_child_has_no_guard():
    with job(2 << 20) as (model, _, x, _):
        y = model(x)
        assert len(_get_current_dispatch_mode_stack()) == 1
        child = os.fork()
        if child == 0:
            os._exit(len(_get_current_dispatch_mode_stack()))
        assert os.waitpid(child, 0)[1] == 0
        y.sum().backward()


def test_whoever_drops_the_model_then_is_left_alone():
    target = device()
    gc.collect()
    base = torch.accelerator.memory_allocated()
    model = chain()
    hetero.manage(model, adamw(model), device=target, device_budget=base + (300 << 10))
    model(batch(target, ROWS, WIDTH))
    assert len(_get_current_dispatch_mode_stack()) == 1
    del model
    gc.collect()
    assert torch.empty(1 << 20, dtype=torch.uint8, device=target).nbytes > 300 << 10
    assert torch.accelerator.memory_allocated() == base
    # The next managed model takes away what is left of it.
    with job(2 << 20) as (model, optimizer, x, _):
        model(x).sum().backward()
        optimizer.step()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("under_autograd", [False, True])
def test_a_compiled_loss_is_compiled_there(under_autograd):
    ran = []

    def run_noted(module, inputs):
        def run(*args):
            ran.append(len(_get_current_dispatch_mode_stack()))
            return module(*args)

        return make_boxed_func(run) if under_autograd else run

    torch._dynamo.reset()

    @torch.compile(backend=aot_autograd(fw_compiler=run_noted) if under_autograd else run_noted)
    def loss_of(y):
        return wide(y, 3).square().mean()

    with job(2 << 20) as (model, _, x, _):
        loss = loss_of(model(x))
        assert len(ran) == 1
        assert ran[0] > 0, "within the guard"
        loss.backward()


@pytest.mark.parametrize(("budget", "more"), [(580 << 10, 40 << 10), (600 << 10, 64 << 10)])
@pytest.mark.parametrize("first", [1, 2])
def test_a_caller_that_holds_more_when_backward_comes_leaves_less_to_the_model(first, budget, more):
    """The first iteration that follows a plan is measured as well."""
    with job(budget) as (model, optimizer, x, _):
        for step in range(6):
            y = model(x)
            held = torch.empty(more if step >= first else 0, dtype=torch.uint8, device=x.device)
            wide(y, 8).square().mean().backward()
            del held, y
            optimizer.step()
            optimizer.zero_grad()


class Skipping(nn.Module):
    """Leaves out a layer where it is told to."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.skips = False

    def forward(self, x):
        for index, layer in enumerate(self.layers):
            if not (self.skips and index == 2):
                x = layer(x).tanh()
        return x


def train_in_order(order, times, model, optimizer, x):
    """Of each iteration: how many forwards its loss has; "s": one, which leaves out a layer."""
    for step, kind in enumerate(order):
        yield step
        model.skips = kind == "s"
        if kind == "2":
            loss = (model(x) + model(x)).square().mean()
        else:
            loss = wide(model(x), times).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    "order", ["2222" + "1111", "2222" + "1s11111", "22222212111122121121122", "2222222221" * 3]
)
@pytest.mark.parametrize(("budget", "times"), [(420 << 10, 6), (560 << 10, 8), (620 << 10, 8)])
def test_a_loss_after_one_forward_is_measured_where_two_had_one(budget, times, order):
    """Each forward is known by then, and so is the backward: all but what comes between them. Where parameters lived on
    the device by then, it could pass the budget once (docs/limits.md)."""
    with job(budget, Skipping, device_homes=False) as (model, optimizer, x, _):
        for _step in train_in_order(order, times, model, optimizer, x):
            pass


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("since", [6, 7, 8])
@pytest.mark.parametrize("order", ["22222212111122121121122", "2222221221222212222122221"])
def test_it_is_measured_before_more_lives_on_the_device(monkeypatch, order, since, count):
    """``since`` an iteration so many parameters live there, if they fit. Those with a loss after one forward are not
    expected."""
    choose, now, chosen = HomeChoice._choose, [0], []

    def late(self, keys):
        if now[0] >= since:
            self._spent = 0.0  # whatever the clock says
            choose(self, keys)

    def some(order, costs, *_, plan, **__):
        homes = tuple(index for index in order if index in costs)[:count]
        try:
            plan(homes, ())
        except CapacityError:
            homes = ()
        chosen.append(homes)
        return Placement(home=HomeStep(homes=homes, nbytes=0, seconds=0.0, moved_bytes=0), places=())

    monkeypatch.setattr(HomeChoice, "_choose", late)
    monkeypatch.setattr(homechoice, "choose_placement", some)
    with job(420 << 10, Skipping) as (model, optimizer, x, _):
        for step in train_in_order(order, 6, model, optimizer, x):
            now[0] = step
    assert chosen


@pytest.mark.parametrize("share", [0.4, 0.45, 0.65])
def test_a_graph_that_is_gone_through_twice_once(share):
    """The second backward begins with the caller's loss, under a plan that has come to its end."""

    def loop(model, optimizer, target):
        seen = []
        for step in range(8):
            for _ in range(2):
                loss = model(batch(target, 256)).square().mean()
                for keeps_graph in [True, False] if step == 5 else [False]:
                    loss.backward(retain_graph=keeps_graph)
                seen.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
        return seen

    assert_twins(lambda: mlp(depth=2), loop, share=share)


@pytest.mark.parametrize("budget", [400 << 10, 500 << 10])
def test_a_loss_that_keeps_some_and_takes_more_before_backward_passes_the_budget_once(budget):
    """It begins to keep some and to take more in the seventh iteration (docs/limits.md)."""
    target = device()
    torch.manual_seed(0)
    model = mlp()
    optimizer = adamw(model)
    before = torch.accelerator.memory_allocated()
    over = {}
    with hetero.manage(model, optimizer, device=target, device_budget=before + budget, device_homes=False):
        kept = []
        for step in range(14):
            loss = model(batch(target)).square().mean()
            if step >= 6:
                kept = [torch.empty(64 << 10, dtype=torch.uint8, device=target)]
                for_a_while = torch.empty(200 << 10, dtype=torch.uint8, device=target)
                more = torch.accelerator.memory_allocated() - before - budget
                if more > 0:
                    over[step] = more
                del for_a_while
            loss.backward()
            kept.clear()
            optimizer.step()
            optimizer.zero_grad()
    assert len(over) <= 1, over


class Hooked(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.hook = mlp(depth=6), None

    def forward(self, x):
        for place, layer in enumerate(self.body):
            x = layer(x)
            if self.hook is not None and place == self.place:
                self.hook_handle = x.register_hook(self.hook)
        return x


@pytest.mark.parametrize("at", [5, 9])
@pytest.mark.parametrize("share", [0.4, 0.48])
def test_a_graph_that_a_backward_has_kept_and_left_by_an_exception(share, at):
    def loop(model, optimizer, target):
        seen, model.place = [], 16

        def hook(gradient):
            model.hook_handle.remove()
            raise ValueError("of the user's")

        for step in range(at + 2):
            model.hook = hook if step == at else None
            loss = model(batch(target, 300)).square().mean()
            try:
                loss.backward(retain_graph=step == at)
            except ValueError:
                optimizer.zero_grad()
                loss.backward()
            seen.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
        return seen

    assert_twins(Hooked, loop, share=share)


@pytest.mark.parametrize("more", ["takes", "keeps"])
@pytest.mark.parametrize("share", [0.7, 0.9, 0.95])
def test_what_a_loss_takes_now_and_then_is_kept_free_once_an_iteration_that_is_planned_has_told_of_it(
    share, more
):
    """However often it came before where everything fits, and nobody sees how much it takes; iterations between do not
    have it. It may be so much that in the rest of the iteration the model would lack room beside it."""

    def train(model, optimizer, target, budget=None):
        passed, most = [], 0
        for iteration in range(64):
            y = model(batch(target))
            torch.accelerator.reset_peak_memory_stats()  # of what the model takes the manager knows
            loss = y.square().mean()
            if iteration % 10 == 9:
                if more == "keeps":
                    loss = loss + (2 * y.repeat(100, 1)).exp().mean()
                with torch.no_grad():
                    y.repeat(200, 1).mul(2)
            loss.backward()
            most = max(most, torch.accelerator.max_memory_allocated())
            if budget is not None and torch.accelerator.max_memory_allocated() > budget:
                passed.append(iteration)
            optimizer.step()
            optimizer.zero_grad()
        return passed if budget else most

    def sgd(model):
        return torch.optim.SGD(model.parameters(), lr=1e-2, foreach=False)

    def build():
        torch.manual_seed(0)
        return mlp(depth=6)

    target = device()
    base = fresh_memory()
    model = build().to(target)
    budget = base + int(share * (train(model, sgd(model), target) - base))
    del model
    fresh_memory()
    model = build()
    optimizer = sgd(model)
    with hetero.manage(model, optimizer, device=target, device_budget=budget):
        passed = train(model, optimizer, target, budget)
    assert passed[0] == 9
    assert passed[-1] <= 29  # settled twice, the second time after some iterations without, and once planned


# With more, everything fits until then, and nobody sees it begin.
@pytest.mark.parametrize(
    ("named", "share"), [(sgd, 0.6), (sgd, 0.65), (adamw, 0.6), (adamw, 0.65), (adamw, 0.7), (adamw, 0.75)]
)
def test_a_penalty_on_weights_that_begins_in_the_middle_of_training(named, share):
    """Its operators on parameters are the first that come there. What runs short then may not be refused with nobody
    there who makes room."""

    def loop(model, optimizer, target):
        seen, anchors = [], []
        for number in range(10):
            loss = model(batch(target, ROWS, WIDTH)).square().mean()
            if number == 4:
                anchors = [p.detach().to(target, copy=True) for p in model.parameters()]
            if anchors:
                distances = ((p - a).square().sum() for p, a in zip(model.parameters(), anchors, strict=True))
                loss = loss + 1e-2 * sum(distances).to(target)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.detach())
        return seen

    def build():
        wide = 3 * WIDTH
        layers = [
            (nn.LayerNorm(WIDTH), nn.Linear(WIDTH, wide), nn.GELU(), nn.Linear(wide, WIDTH)) for _ in range(6)
        ]
        return nn.Sequential(*[layer for block in layers for layer in block])

    assert_twins(build, loop, share=share, make_optimizer=named)
