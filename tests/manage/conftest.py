"""Where there is a CUDA device, all tests of this folder run on it and carry the marker ``cuda``."""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch._dynamo  # noqa: F401  # the first optimizer imports it: here it is there before anything is measured
from accelerators import ON_CUDA, StepsAtHome, libraries_bytes
from torch.optim.optimizer import register_optimizer_step_pre_hook

import hetero
from hetero import config, manager
from hetero.eviction import CapacityError, HomeStep, placement
from hetero.eviction.places import spread
from hetero.stm.deferred import Update, UpdateQueue
from hetero.stm.plans import homechoice
from hetero.stm.plans.timings import Timings
from hetero.stm.step.devicehomes import DeviceHomes
from hetero.stm.step.expectation import Expectation
from hetero.stm.step.speculation import Speculation
from hetero.stm.updates import captured
from hetero.units import parse_budget


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if ON_CUDA:
        for item in items:
            if "manage" in item.path.parts:
                item.add_marker(pytest.mark.cuda)


@pytest.fixture(autouse=True)
def device_parameters_step_at_home(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[None]:
    if not ON_CUDA or getattr(request.module, "STEPS_ON_DEVICE", False):
        yield
        return
    steps, raw_step = StepsAtHome(), captured.raw_step
    # Those that live on the device are stepped by it without hooks.
    monkeypatch.setattr(captured, "raw_step", lambda kind: steps.wrapped(raw_step(kind)))
    handle = register_optimizer_step_pre_hook(steps.before)
    yield
    handle.remove()


@pytest.fixture(autouse=True)
def beside_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget that a test writes down is meant for what the test has: libraries' workspaces come on top. Who counts
    what is in use before gives a number."""
    nbytes = libraries_bytes()
    if nbytes == 0:
        return

    def parse(value: Any, total: int, *, name: str = "budget") -> int:
        budget = parse_budget(value, total, name=name)
        return budget + nbytes if isinstance(value, str) and name == "device_budget" else budget

    for module in (config, manager):
        monkeypatch.setattr(module, "parse_budget", parse)


@pytest.fixture
def late_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every update is late: whoever does not wait for it sees it missing."""
    original = UpdateQueue._run

    def late(self: UpdateQueue, update: Update) -> None:
        time.sleep(3e-4)
        original(self, update)

    monkeypatch.setattr(UpdateQueue, "_run", late)


@pytest.fixture
def speculates(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with ``speculate=True`` wherever nothing is said of it."""
    monkeypatch.setitem(hetero.manage.__kwdefaults__, "speculate", True)


@pytest.fixture
def speculating(speculates: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every update is tried as soon as its gradient has left, whatever iterations were like and whatever it costs."""
    monkeypatch.setattr(Speculation, "_is_expected", lambda self: True)


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many parameters as fit keep a place on the device, whatever it costs; updates count as begun in backward."""

    def most(order, plan, *, thorough=True):  # type: ignore[no-untyped-def]
        for count in range(len(order) // 2, 0, -1):
            chosen = spread(order, count)
            with contextlib.suppress(CapacityError):
                plan(chosen)
                return chosen
        return ()

    monkeypatch.setattr(homechoice, "choose_places", most)
    monkeypatch.setattr(placement, "choose_places", most)
    monkeypatch.setattr(placement, "_refined", lambda pairs, coarse, *limits: coarse)
    monkeypatch.setattr(
        Expectation, "is_habit", property(lambda self: True, lambda self, value: None), raising=False
    )


@pytest.fixture
def homes_on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many parameters as can live on the device, from the third step on, whatever was measured."""

    def most(order, costs, sizes, *, most_bytes, links, plan, ranking):  # type: ignore[no-untyped-def]
        movable = [index for index in order if index in costs]
        for count in range(len(movable), 0, -1):
            nbytes = sum(costs[index].nbytes for index in movable[:count])
            if nbytes <= most_bytes:
                with contextlib.suppress(CapacityError):
                    plan(tuple(movable[:count]))
                    return HomeStep(homes=tuple(movable[:count]), nbytes=nbytes, seconds=0.0, moved_bytes=0)
        plan(())
        return HomeStep(homes=(), nbytes=0, seconds=0.0, moved_bytes=0)

    monkeypatch.setattr(placement, "choose_device_homes", most)
    monkeypatch.setattr(placement, "_refined", lambda pairs, coarse, *limits: coarse)
    monkeypatch.setattr(Timings, "is_final", lambda self, keys: True)
    monkeypatch.setattr(Timings, "was_in_vain", lambda self, keys: False)
    monkeypatch.setattr(DeviceHomes, "_is_timed", lambda self, tensors: True)
