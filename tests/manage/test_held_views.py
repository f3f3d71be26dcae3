"""Views of weights that a model takes within its forward and keeps see every step; to write to them is to write to the
parameter, as without hetero."""

import pytest
import torch
from accelerators import device, races
from loops import batch
from torch import nn
from twins import adamw, assert_same, assert_twins, managed, unmanaged

import hetero

VIEWS = {
    "transposed": lambda w: w.detach().t(),
    "all of it": lambda w: w.detach(),
    "data": lambda w: w.data,
    "some rows": lambda w: w.detach()[:, 8:40].t(),
    "with its graph": lambda w: w.t(),
}


class Keeps(nn.Module):
    """Takes a view of a weight in its first forward and uses it in all."""

    def __init__(self, view):
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.rest = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
        self.last = nn.Linear(64, 64)
        self.view = view
        self.kept = None

    def forward(self, x):
        y = self.rest(self.first(x))
        if self.kept is None:
            self.kept = self.view(self.last.weight)
        kept = self.kept
        # Before the weight itself is used, so that nothing brings the view up to date by chance.
        y = y + (x[:, : kept.shape[0]] @ kept).mean(1, keepdim=True)
        return self.last(y)


def _build(view):
    return lambda: Keeps(VIEWS[view])


def _train(model, optimizer, target, steps=8, between=lambda model, step: None):
    seen = []
    for step in range(steps):
        loss = model(batch(target)).square().mean()
        loss.backward()
        between(model, step)
        optimizer.step()
        seen.append([loss, model.kept.sum()])
        optimizer.zero_grad()
    return seen


@pytest.mark.parametrize("share", [0.7, 1.6])
@pytest.mark.parametrize("view", VIEWS)
def test_a_kept_view_sees_every_step(view, share):
    assert_twins(_build(view), _train, share=share)


@pytest.mark.parametrize("view", VIEWS)
def test_a_kept_view_sees_every_step_on_the_device(homes_on_device, view):
    assert_twins(_build(view), _train, share=1.6)


@pytest.mark.parametrize("view", VIEWS)
def test_a_kept_view_sees_every_step_that_would_be_tried_early(speculating, view):
    assert_twins(_build(view), _train, share=1.0)


def test_a_kept_view_sees_every_step_where_everything_fits():
    assert_twins(_build("transposed"), _train, share=8)


@pytest.mark.parametrize("steps", [1, 6])
def test_what_is_written_to_a_kept_view_is_written_to_the_parameter(late_queue, steps):
    def between(model, step):
        with torch.no_grad():
            model.kept.mul_(0.9)

    def loop(model, optimizer, target):
        seen = _train(model, optimizer, target, steps)
        for step in range(4):
            seen += _train(model, optimizer, target, 1, between)
            with torch.no_grad():
                model.kept.add_(0.01)
            # Not on the device, where it may come to fit all the time: copies there are the caller's.
            seen.append(model.last.weight.detach().cpu())
            if step == 2:
                seen.append([value.cpu() for value in model.state_dict().values()])
        return seen

    assert_twins(_build("transposed"), loop, share=0.9)


def test_what_the_forward_writes_to_a_kept_view_is_written_to_the_parameter():
    class Decays(Keeps):
        def forward(self, x):
            y = super().forward(x)
            with torch.no_grad():
                self.kept.mul_(0.99)
            return y

    # Backward reads the weight's transpose as it was saved: unmanaged that is an error as well.
    def loop(model, optimizer, target):
        seen = []
        for _ in range(4):
            with torch.no_grad():
                seen.append(model(batch(target)))
            seen.append(model.last.weight.detach().clone())
        return seen

    assert_twins(lambda: Decays(VIEWS["transposed"]), loop, share=0.9)


WRITES = {
    "in place": lambda p: p.mul_(0.5),
    "copied": lambda p: p.copy_(torch.ones_like(p)),
    "data": lambda p: p.data.add_(0.25),
    "foreach": lambda p: torch._foreach_mul_([p], 0.75),
    "initialised": lambda p: nn.init.constant_(p, 0.125),
    "replaced": lambda p: setattr(p, "data", p.data * 2),
}


@pytest.mark.parametrize("write", WRITES)
def test_writes_to_the_parameter_reach_a_kept_view(write):
    def between(model, step):
        with torch.no_grad():
            WRITES[write](model.last.weight)

    def loop(model, optimizer, target):
        seen = []
        for _ in range(5):
            seen += _train(model, optimizer, target, 1, between)
            if write not in ("data", "replaced"):
                between(model, 0)
                seen.append(model.kept.clone())
        return seen

    assert_twins(_build("transposed"), loop, share=0.9)


def test_steps_of_another_optimizer_reach_a_kept_view():
    def make(model):
        optimizer = adamw(model)
        optimizer.other = torch.optim.SGD([model.last.weight], lr=0.1, foreach=False)
        return optimizer

    def loop(model, optimizer, target):
        seen = []
        for _ in range(5):
            seen += _train(model, optimizer, target, 1)
            model(batch(target)).square().mean().backward()
            optimizer.other.step()
            seen.append(model.kept.clone())
        return seen

    assert_twins(_build("transposed"), loop, share=0.9, make_optimizer=make)


def test_a_backward_through_what_a_step_has_written_is_refused_as_without_hetero():
    def loop(model, optimizer, target):
        seen = []
        _train(model, optimizer, target, 3)
        for steps in (False, True):
            x = batch(target).requires_grad_()
            out = (x @ model.kept).sum()  # saves the view outside the model's forward
            if steps:
                _train(model, optimizer, target, 1)
            try:
                out.backward()
                seen.append(x.grad)
            except RuntimeError as error:
                seen.append("modified by an inplace operation" in str(error))
        return seen

    assert_twins(_build("transposed"), loop, share=0.9)


def test_a_view_that_is_let_go_costs_nothing_any_more():
    def loop(model, optimizer, target):
        seen = _train(model, optimizer, target, 4)
        for _ in range(3):
            model.kept = None
            optimizer.zero_grad()
            loss = model(batch(target)).square().mean()
            loss.backward()
            model.kept = None
            optimizer.step()
            seen.append(loss)
        return seen

    managed_by = assert_twins(_build("transposed"), loop, share=0.9)
    step = managed_by._host_step
    assert step is not None
    assert step.queued > 0


def test_a_held_copy_counts_against_the_budget():
    target = device()
    model = Keeps(VIEWS["transposed"])
    optimizer = adamw(model)
    keywords = {"device": target, "device_budget": "1MiB", "device_homes": False}
    with hetero.manage(model, optimizer, **keywords) as manager:
        _train(model, optimizer, target, 3)
        tensor = model.last.weight._hetero
        manager._stm.residency.evict_idle()
        assert tensor.is_resident
        assert manager._stm.ledger.device_bytes >= tensor.device_nbytes
        model.kept = None
        manager._stm.residency.evict_idle()
        assert not tensor.is_resident
    assert races() == []


def test_writes_to_both_whose_order_nobody_knows_are_refused():
    target = device()
    model = Keeps(VIEWS["transposed"])
    optimizer = adamw(model)
    with hetero.manage(model, optimizer, device=target, device_budget="1MiB"), torch.no_grad():
        with torch.enable_grad():
            _train(model, optimizer, target, 2)
        for look in (lambda: model(batch(target)), optimizer.step, model.state_dict):
            data = model.last.weight.data
            model.kept.mul_(0.5)
            data.add_(1.0)
            expected = data.clone()
            with pytest.raises(hetero.ManageError, match=r"last\.weight \(64, 64\) .* which came first"):
                look()
            assert torch.equal(model.last.weight, expected)
            model(batch(target))
            assert torch.equal(model.kept.cpu(), expected.t())


def test_in_low_precision_a_kept_view_follows_too():
    def loop(model, optimizer, target):
        seen = _train(model, optimizer, target, 5)
        return [
            seen,
            model.kept.dtype == torch.bfloat16,
            torch.equal(model.kept, model.last.weight.detach().to(torch.bfloat16).t().to(target)),
        ]

    seen, _, _ = managed(_build("transposed"), loop, 1 << 20, precision=torch.bfloat16)
    assert seen[1:] == [True, True]


def test_twins_compare_something():
    with pytest.raises(AssertionError):
        assert_same(
            unmanaged(_build("transposed"), _train)[0], unmanaged(_build("some rows"), _train)[0], "seen"
        )
