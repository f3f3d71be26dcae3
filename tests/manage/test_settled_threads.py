"""Several threads call one model that settles, or is settled: each is answered as if it were alone."""

import copy
import threading
import time

import pytest
import torch
from loops import losses, mlp
from torch import nn
from twins import assert_same, assert_twins, device

import hetero
from hetero.stm import patches
from hetero.stm.settled.parameters import OwnParameters
from hetero.stm.settled.state import Settled
from hetero.stm.uses import Uses

PATIENCE = 60.0  # who hangs fails, and does not stop the suite


class Halves(nn.Module):
    """``between`` is called in the middle of its forward."""

    def __init__(self):
        super().__init__()
        self.first, self.second = mlp(depth=1), mlp(depth=1)
        self.between = lambda: None

    def forward(self, x):
        x = self.first(x)
        self.between()
        return self.second(x)


def begin(call):
    """On another thread; the result, once it is there, is what the function that is returned returns."""
    found = []

    def run():
        try:
            found.append(call())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def end():
        thread.join(PATIENCE)
        if isinstance(found[0], Exception):
            raise found[0]
        return found[0]

    return end


def elsewhere(call):
    return begin(call)()


def once(call):
    """Only the first time, and on this thread."""
    here, done = threading.get_ident(), []

    def run():
        if threading.get_ident() == here and not done:
            done.append(None)
            call()

    return run


def infer(model, x, target):
    with torch.no_grad():
        return model(x.to(target)).cpu()


@pytest.fixture
def inputs():
    torch.manual_seed(0)
    model, x, other = Halves(), torch.randn(4, 64), torch.randn(6, 64)
    target = device()
    twin = copy.deepcopy(model).to(target)
    return model, x, other, infer(twin, x, target), infer(twin, other, target)


def test_two_that_find_that_everything_fits_settle_once(monkeypatch, inputs):
    model, x, _, expected, _ = inputs
    target = device()
    finish, enter = OwnParameters.give_back_all, Settled.enter
    settled, asked, ends = [], threading.Event(), []

    def asking(self, *args):
        if settled:
            asked.set()
        return enter(self, *args)

    def finishing(self):
        settled.append(None)
        if len(settled) == 1:
            ends.append(begin(lambda: infer(model, x, target)))
            assert asked.wait(PATIENCE)
            time.sleep(0.1)  # it waits for us now; whether it does, makes no difference to what is asserted
        finish(self)

    monkeypatch.setattr(Settled, "enter", asking)
    monkeypatch.setattr(OwnParameters, "give_back_all", finishing)
    with hetero.manage(model, device=target, device_budget="64MiB") as manager:
        found = [infer(model, x, target) for _ in range(4)]
        assert_same([*found, ends[0]()], [expected] * 5, "outputs")
        assert manager.plan.everything_fits
        assert len(settled) == 1


def test_nobody_settles_within_another_threads_forward(inputs):
    model, x, other, expected, expected_other = inputs
    target = device()
    with hetero.manage(model, device=target, device_budget="64MiB") as manager:
        for _ in range(2):
            infer(model, x, target)
        seen = []

        def look():
            seen.append(elsewhere(lambda: infer(model, x, target)))
            seen.append(manager.plan.everything_fits)

        model.between = once(look)
        # A size that has not been measured: it is intercepted.
        assert_same(infer(model, other, target), expected_other, "output")
        assert_same(seen, [expected, False], "seen")
        assert_same([infer(model, x, target) for _ in range(4)], [expected] * 4, "outputs")
        assert manager.plan.everything_fits


def test_nobody_leaves_once_another_thread_has_been_let_in(monkeypatch, inputs):
    model, x, other, expected, expected_other = inputs
    target = device()
    with hetero.manage(model, device=target, device_budget="64MiB") as manager:
        for _ in range(3):
            infer(model, x, target)
        run, seen = Settled.run, []

        def look():
            seen.append(elsewhere(lambda: infer(model, other, target)))
            seen.append(manager.plan.everything_fits)

        first = once(look)

        def running(self, *args):
            first()
            return run(self, *args)

        monkeypatch.setattr(Settled, "run", running)
        assert_same(infer(model, x, target), expected, "output")
        assert_same(seen, [expected_other, True], "seen")
        infer(model, other, target)
        assert not manager.plan.everything_fits


@pytest.mark.usefixtures("homes_on_device")
def test_an_operator_outside_of_any_forward_begins_while_another_thread_settles(monkeypatch):
    """It has looked at its parameters; when it has its turn, they live on the device, where they are stepped."""
    begin_operator, settle, may, settled = Uses.begin_operator, Settled._settle, [], []
    monkeypatch.setattr(Settled, "_settle", lambda self, kind: bool(may) and settle(self, kind))

    def loop(model, optimizer, target):
        seen, x = [], torch.ones(8, 64)

        def train(steps):
            for _ in range(steps):
                seen.append(infer(model, x, target))
                seen.extend(losses(model, optimizer, target, 1))

        def settle_elsewhere():
            may.append(None)
            elsewhere(lambda: infer(model, x, target))
            settled.append(type(model.first[0].weight) is nn.Parameter)

        first = once(settle_elsewhere)

        def beginning(self, operands, name):
            first()
            begin_operator(self, operands, name)

        train(4)
        with torch.no_grad(), monkeypatch.context() as patch:
            patch.setattr(Uses, "begin_operator", beginning)
            seen.append(model.first[0](x.to(target)))
        train(2)
        return seen

    assert_twins(Halves, loop, budget=64 << 20)
    assert settled == [True]


def test_a_forward_goes_on_after_another_threads_has_failed_beside_it(inputs):
    """Which followed the same plan, beside more than that knew of: nothing is left of either."""
    model, x, _, expected, _ = inputs
    target = device()

    def fail():
        raise ValueError("of the other thread")

    def look():
        model.between = fail
        with pytest.raises(ValueError, match="of the other thread"):
            elsewhere(lambda: infer(model, x, target))

    with hetero.manage(model, device=target, device_budget="256KiB", device_homes=False) as manager:
        for _ in range(4):
            infer(model, x, target)
        kept = torch.empty(32 << 10, dtype=torch.uint8, device=target)
        model.between = once(look)
        assert_same(infer(model, x, target), expected, "output")
        del kept
        model.between = lambda: None
        assert_same(infer(model, x, target), expected, "output")
        assert manager.plan is not None


def test_a_manager_that_wakes_while_another_comes_to_rest_finds_everything_in_its_place(monkeypatch):
    put_back, ends, before = patches._put_back, [], torch.autograd._engine_run_backward
    first, second = object(), object()

    def putting_back(replaced):
        if not ends:
            ends.append(begin(lambda: patches.wake(second)))
            time.sleep(0.1)  # it waits for us; that it does is asserted below
        put_back(replaced)

    patches.wake(first)
    announced = torch.autograd._engine_run_backward
    monkeypatch.setattr(patches, "_put_back", putting_back)
    try:
        patches.rest(first)
        ends[0]()
        assert torch.autograd._engine_run_backward is announced is not before
    finally:
        patches.rest(second)
    assert torch.autograd._engine_run_backward is before
