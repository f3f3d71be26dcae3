"""The virtual accelerator, fast and roomy, and no race left over from one test to the next."""

from collections.abc import Iterator

import pytest
import torch

from hetero.devices.virtual import clear_races, races, virtual_device
from hetero.errors import StreamRaceError


@pytest.fixture
def device() -> Iterator[torch.device]:
    yield virtual_device("512MiB", bandwidth="64GiB/s", latency="0us")
    found = races()
    clear_races()
    torch.accelerator.synchronize()
    clear_races()
    assert found == [], "a test that expects races must clear them"


@pytest.fixture
def slow_device(device: torch.device) -> torch.device:
    """A link on which a copy of 4 MiB takes 40 ms: what is not waited for has not happened."""
    return virtual_device("512MiB", bandwidth="100MiB/s", latency="10us")


@pytest.fixture
def expect_race() -> object:
    """``with expect_race("stream 1 writes")``: a race is raised with this text, and forgotten."""

    class ExpectRace:
        def __call__(self, match: str) -> "ExpectRace":
            self.raises = pytest.raises(StreamRaceError, match=match)
            return self

        def __enter__(self) -> object:
            return self.raises.__enter__()

        def __exit__(self, *exc: object) -> object:
            handled = self.raises.__exit__(*exc)  # type: ignore[arg-type]
            clear_races()
            return handled

    return ExpectRace()
