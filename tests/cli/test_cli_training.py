"""Running a job: the reference that steps on the host is the plain run wherever both round alike."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hetero.cli import training
from hetero.cli.comparison import compare
from hetero.cli.placing import choose_device
from hetero.cli.training import Job, train_managed, train_unmanaged


def job() -> Job:
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 64), nn.Linear(64, 1)
    )
    return Job(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), foreach=False),
        batches=[{"x": torch.randn(8, 32), "y": torch.randn(8, 1)} for _ in range(4)],
        loss_fn=loss_fn,
        seed=3,
    )


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.mse_loss(model(batch["x"]), batch["y"])


def ignore(step: int, loss: float) -> None:
    """Nobody watches."""


def test_stepping_on_the_host_gives_the_plain_runs_bits_where_arithmetic_is_the_same() -> None:
    device = choose_device("virtual")
    plain = train_unmanaged(job(), device, step_on_host=False, on_step=ignore)
    on_host = train_unmanaged(job(), device, step_on_host=True, on_step=ignore)
    assert [row for row in compare(on_host, plain) if row.fault] == []
    assert {kind for kind, _ in plain.tensors} == {
        "parameter",
        "gradient",
        "buffer",
        "step",
        "exp_avg",
        "exp_avg_sq",
    }


def test_a_change_in_one_batch_is_seen_from_its_step_on() -> None:
    device = choose_device("virtual")
    one, other = job(), job()
    other.batches[2]["x"][0] += 0.01
    ran = [train_unmanaged(each, device, step_on_host=False, on_step=ignore) for each in (one, other)]
    faulty = [row.name for row in compare(*ran) if row.fault and row.kind == "loss"]
    assert faulty == ["step 2", "step 3"]


def test_the_managed_run_reports_the_allocators_peak_within_its_budget() -> None:
    device = choose_device("virtual")
    seen: list[int] = []
    managed = train_managed(
        job(), device, device_budget=64 << 10, on_step=lambda step, loss: seen.append(step)
    )
    assert seen == [0, 1, 2, 3]
    assert 0 < managed.peak_device_bytes <= 64 << 10
    assert managed.stats is not None
    assert managed.model_data_bytes > 64 << 10


@pytest.mark.parametrize("differ", [False, True])
def test_where_the_device_rounds_otherwise_every_step_is_the_hosts(
    differ: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = choose_device("virtual")
    monkeypatch.setattr(training, "steps_differ", lambda device: differ)
    long = replace(job(), batches=2 * job().batches)
    managed = train_managed(long, device, device_budget=64 << 20, on_step=ignore)
    assert managed.stats is not None
    # Settled, the optimizer's own step is on the device.
    assert (managed.stats.settled_forwards == 0) is differ
