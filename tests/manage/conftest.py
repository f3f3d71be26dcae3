"""Where there is a CUDA device, all tests of this folder run on it and carry the marker ``cuda``."""

import time
from collections.abc import Iterator

import pytest
from accelerators import ON_CUDA, StepsAtHome
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hetero.stm.deferred import Update, UpdateQueue


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if ON_CUDA:
        for item in items:
            if "manage" in item.path.parts:
                item.add_marker(pytest.mark.cuda)


@pytest.fixture(autouse=True)
def device_parameters_step_at_home() -> Iterator[None]:
    if not ON_CUDA:
        yield
        return
    steps = StepsAtHome()
    handles = register_optimizer_step_pre_hook(steps.before), register_optimizer_step_post_hook(steps.after)
    yield
    for handle in handles:
        handle.remove()


@pytest.fixture
def late_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every update is late: whoever does not wait for it sees it missing."""
    original = UpdateQueue._run

    def late(self: UpdateQueue, update: Update) -> None:
        time.sleep(3e-4)
        original(self, update)

    monkeypatch.setattr(UpdateQueue, "_run", late)
