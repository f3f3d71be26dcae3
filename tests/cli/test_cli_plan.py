"""`hetero plan`: what it prints and writes, and one line for anything that cannot be."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hetero.cli import app
from hetero.forecast import MACHINES

RUN = CliRunner()

SOURCE = """
import torch
from torch import nn

def job():
    layers = [layer for _ in range(6) for layer in (nn.Linear(256, 256), nn.GELU())]
    model = nn.Sequential(*layers, nn.Linear(256, 8))
    batches = [(torch.randn(64, 256), torch.zeros(64, dtype=torch.long))]
    return model, torch.optim.AdamW(model.parameters()), batches, nn.CrossEntropyLoss()

def number():
    return 3
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "planned_here.py"
    path.write_text(SOURCE)
    return path


def test_a_sweep_tells_each_budget_and_writes_it(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    result = RUN.invoke(app, ["plan", f"{source}:job", "--machine", "t4", "--sweep", "--json", str(out)])
    assert result.exit_code == 0, result.output
    for words in (
        "Tesla T4, 16.0 GiB",
        "unmanaged peak",
        "(modelled)",
        "everything fits",
        "60 % of the peak",
    ):
        assert words in result.output
    written = json.loads(out.read_text())
    assert written["efficiency"] == 0.5
    forecasts = written["forecasts"]
    budgets = [each["device_budget"] for each in forecasts]
    assert budgets == sorted(budgets, reverse=True)
    assert forecasts[0]["everything_fits"]
    assert forecasts[0]["device_budget"] == MACHINES["t4"].memory_bytes * 8 // 10
    assert not forecasts[-1]["everything_fits"]
    assert forecasts[-1]["moved_bytes"] > 0
    # Those that are too small are in the table alone.
    assert len(forecasts) == 7 - result.output.count("too small")


def test_half_the_efficiency_is_twice_the_time(source: Path, tmp_path: Path) -> None:
    seconds = []
    for efficiency in ("0.5", "0.25"):
        out = tmp_path / f"{efficiency}.json"
        arguments = ["plan", f"{source}:job", "--efficiency", efficiency, "--json", str(out)]
        assert RUN.invoke(app, arguments).exit_code == 0
        seconds.append(json.loads(out.read_text())["forecasts"][0]["unmanaged_seconds"])
    assert seconds[1] == pytest.approx(2 * seconds[0])  # sums of the same numbers, doubled


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--machine", "abacus"], "--machine abacus: unknown; use one of t4, l4"),
        (["--device-budget", "64KiB"], "the budget is 64.0 KiB: raise it to that"),
        (["--device-budget", "2G"], "--device-budget='2G' is ambiguous"),
        (["--device-budget", "4MiB", "--host-memory", "1MiB"], "of the host, which has 1.0 MiB"),
        (["--host-bandwidth", "40"], "expected bytes per second"),
    ],
)
def test_what_cannot_be_is_one_line(source: Path, arguments: list[str], words: str) -> None:
    result = RUN.invoke(app, ["plan", f"{source}:job", *arguments])
    assert result.exit_code == 2
    assert words in result.output
    assert "Traceback" not in result.output


def test_something_else_than_a_job_is_refused(source: Path) -> None:
    result = RUN.invoke(app, ["plan", f"{source}:number"])
    assert result.exit_code == 2
    assert "error: " in result.output
