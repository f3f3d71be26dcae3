"""Several managers share a device: what one has there leaves, for good or for a while, where another lacks room."""

import contextlib

import pytest
import torch
from accelerators import GAPS, ON_CUDA, SEGMENTS, device, set_memory_limit
from loops import batch, mlp
from settling import is_intercepted
from several import in_turn, sgd, twins, two_that_are_trained
from torch import nn
from twins import assert_same, plain

import hetero
from hetero.stm.running.executor import Executor
from hetero.stm.settled.who import settled_now


class Beside(nn.Module):
    """Computes with another model, which is no submodule of it: that has a manager of its own."""

    def __init__(self, other, depth):
        super().__init__()
        self.own = mlp(depth=depth)
        self.__dict__["other"] = other


def beside(kind, depth):
    """A model, one of ``kind`` beside it, and an optimizer of each."""
    other = mlp(depth=3)
    models = other, kind(other, depth)
    return models, [sgd(model) for model in models]


def test_a_model_that_has_settled_makes_way_and_goes_on():
    def loop(models, optimizers, target):
        seen = []
        for which, rows, steps in ((0, 8, 6), (1, 300, 3), (0, 8, 3), (1, 300, 3)):
            for _ in range(steps):
                loss = models[which](batch(target, rows)).square().mean()
                loss.backward()
                optimizers[which].step()
                optimizers[which].zero_grad()
                seen.append(loss)
        return seen

    stats = twins(loop, two_that_are_trained, 720 << 10)
    assert stats[0].settled_forwards > 0


def test_what_leaves_is_ordered_on_its_own_managers_stream():
    def loop(models, optimizers, target):
        apart = torch.Stream(device=target)
        seen = []
        for which, rows, steps in ((0, 8, 6), (1, 300, 3), (0, 8, 3), (1, 300, 3)):
            with apart if which == 0 else contextlib.nullcontext():
                for _ in range(steps):
                    loss = models[which](batch(target, rows)).square().mean()
                    loss.backward()
                    optimizers[which].step()
                    optimizers[which].zero_grad()
                    seen.append(loss.detach())
                del loss
        torch.accelerator.synchronize()
        return seen

    twins(loop, two_that_are_trained, 720 << 10)


def test_idle_saved_tensors_and_device_homes_make_way_within_anothers_forward():
    """Both graphs are alive, and one forward runs within the other. Until both of its contributions are there, each of
    320 KiB of gradients stays."""

    class Around(Beside):
        def forward(self, x):
            return self.own(self.other(self.own(x)))

    def loop(models, optimizers, target):
        seen = []
        for _ in range(8):
            loss = models[1](batch(target, 32)).square().mean() + models[0](batch(target, 32)).mean()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            seen.append(loss)
        return seen

    for budget in (520 << 10, 700 << 10):
        twins(loop, lambda: beside(Around, depth=2), budget)


@pytest.mark.parametrize("budget", [720 << 10, 800 << 10])
def test_a_model_that_has_settled_makes_way_for_an_operator_on_its_own_parameter(budget):
    """In the other's forward, which has the teacher's weight by itself: it is tried again, with what it was given."""

    class Student(Beside):
        def forward(self, x):
            hidden = self.own(x)
            return self.own(hidden * self.other[0].weight.repeat(10, 1, 1).sum())

    def loop(models, optimizers, target):
        seen = []
        for which, rows, steps in ((0, 8, 7), (1, 60 if budget < 800 << 10 else 300, 3), (0, 8, 2)):
            for _ in range(steps):
                loss = models[which](batch(target, rows)).square().mean()
                loss.backward()
                optimizers[which].step()
                for optimizer in optimizers:
                    optimizer.zero_grad()
                seen.append(loss.detach())
        return seen

    stats = twins(loop, lambda: beside(Student, depth=3), budget)
    assert stats[0].settled_forwards > 0


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, own, others):
        return own + others

    @staticmethod
    def backward(ctx, gradient):
        return gradient, gradient


@pytest.mark.parametrize(
    "add", [torch.add, lambda own, others: Sum.apply(own, others)], ids=["operator", "function"]
)
def test_a_model_that_has_settled_makes_way_for_an_operator_on_parameters_of_both(monkeypatch, add):
    """Between the look at what the operator was given and its running."""

    class Student(nn.Module):
        def __init__(self, teacher):
            super().__init__()
            self.w = nn.Parameter(torch.randn(128, 64))
            self.__dict__["teacher"] = teacher

        def forward(self, x):
            return x @ add(self.w, self.teacher[0].weight).t()

    def build():
        teacher = mlp(depth=1)
        models = teacher, Student(teacher)
        return models, [sgd(model) for model in models]

    def loop(models, optimizers, target):
        seen = in_turn(models[:1], optimizers[:1], target)
        for settled in list(settled_now):
            before = Executor.before_operator

            def before_operator(self, operands, name, settled=settled, before=before):
                if operands and operands[0].parameter is models[1].w:
                    assert settled.make_way()
                before(self, operands, name)

            monkeypatch.setattr(Executor, "before_operator", before_operator)
        for _ in range(2):
            loss = models[1](batch(target)).square().mean()
            loss.backward()
            seen += [loss.detach(), models[0][0].weight.grad.detach().clone()]
            optimizers[1].step()
            for optimizer in optimizers:
                optimizer.zero_grad()
        return seen

    stats = twins(loop, build, 8 << 20)
    assert stats[0].settled_forwards > 0


def test_a_model_that_has_settled_makes_no_way_within_a_transform_and_does_after_it():
    target, model = device(), mlp(depth=1)
    with hetero.manage(model, device=target, device_budget="64MiB") as manager, torch.no_grad():
        x = batch(target)
        expected = [model(x) for _ in range(6)][-1]
        assert not is_intercepted(model)
        (settled,) = settled_now
        made = []
        torch.func.vmap(lambda row: made.append(settled.make_way()) or row)(x)
        assert made == [False]
        assert not is_intercepted(model)
        assert settled.make_way()
        assert is_intercepted(model)
        assert torch.equal(model(x), expected)
        assert manager.stats.settled_forwards > 0


@pytest.mark.skipif(ON_CUDA or SEGMENTS, reason="memory is refused to the byte")
def test_a_model_that_has_settled_makes_way_for_an_operator_on_parameters_of_both_that_nobody_guards():
    """Outside of any forward: it runs out of memory, and is tried again."""
    target = device()
    torch.manual_seed(0)
    teacher, student = mlp(depth=2), mlp(depth=1)
    expected = (student[0].weight * teacher[0].weight).detach()
    keywords = {"device": target, "device_budget": "64MiB"}
    with hetero.manage(teacher, **keywords) as first, hetero.manage(student, **keywords), torch.no_grad():
        for _ in range(4):
            teacher(batch(target))
        student[0].weight * torch.ones(64, device=target)  # its copy is there
        assert first.plan.everything_fits
        set_memory_limit(torch.accelerator.memory_allocated())
        product = student[0].weight * teacher[0].weight
        set_memory_limit(256 << 20)
        assert not first.plan.everything_fits
        assert_same(plain(product), expected, "product")


@torch.library.custom_op("hetero_tests::grow", mutates_args=("w",))
def grow(w: torch.Tensor, nbytes: int) -> None:
    torch.empty(nbytes, dtype=torch.uint8, device=w.device)
    w.add_(1.0)


def grow_by_half(w, nbytes):
    w.add_(torch.ones(w.shape, dtype=torch.float16, device=w.device))  # casts it, on the virtual device


@pytest.mark.skipif(GAPS > 0, reason="memory is refused to the byte")
@pytest.mark.parametrize("grow", [grow, grow_by_half])
@pytest.mark.parametrize("trains", [False, True])
def test_a_write_to_a_parameter_of_a_model_that_makes_way_for_it_is_made_once(grow, trains):
    """In another's forward, which has not been measured: it runs out of memory, and is tried again."""
    target = device()
    torch.manual_seed(0)
    written, others = mlp(depth=2), mlp(depth=1)
    expected = [p.detach().clone() for p in written.parameters()]
    expected[0] += 1
    optimizer = torch.optim.SGD(written.parameters(), lr=0.0) if trains else None
    budget = torch.accelerator.memory_allocated() + (1 << 20)
    keywords = {"device": target, "device_budget": budget}

    class Writing(nn.Module):
        def __init__(self):
            super().__init__()
            self.others = others

        def forward(self, x):
            x = self.others[0](x)
            assert first.plan.everything_fits
            left = budget - torch.accelerator.memory_allocated()
            kept = torch.empty(left - 600, dtype=torch.uint8, device=target)
            grow(written[0].weight, 40 << 10)  # more than this model's own copies
            del kept
            return self.others[2](x)

    with (
        hetero.manage(written, optimizer, **keywords) as first,
        hetero.manage(Writing(), **keywords) as second,
    ):
        for _ in range(8):
            with torch.set_grad_enabled(trains):
                loss = written(batch(target)).mean()
            if trains:
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            del loss
        with torch.no_grad():
            second._model(batch(target))
        assert not first.plan.everything_fits
        assert_same(plain(list(written.parameters())), expected, "parameters")
    assert_same(plain(list(written.parameters())), expected, "parameters")
