"""`hetero demo`: its exit code, its JSON, and what it refuses."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hetero.cli import app, provenance

RUN = CliRunner()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, object], Path]:
    folder = tmp_path_factory.mktemp("demo")
    arguments = [
        "demo",
        "--steps",
        "3",
        "--json",
        str(folder / "demo.json"),
        "--plot",
        str(folder / "demo.png"),
    ]
    result = RUN.invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return result.output, json.loads((folder / "demo.json").read_text()), folder / "demo.png"


def test_demo_trains_what_does_not_fit_to_the_same_bits(
    finished: tuple[str, dict[str, object], Path],
) -> None:
    output, numbers, _ = finished
    assert numbers["bit_identical"] is True
    assert numbers["peak_device_bytes"] <= numbers["device_budget"] < numbers["model_data_bytes"]
    assert "bit-identical" in output
    assert "DIFFERENT" not in output


def test_demo_counts_model_data_and_traffic_plausibly(finished: tuple[str, dict[str, object], Path]) -> None:
    _, numbers, _ = finished
    parameters = 25_383_936
    # Adam: value, gradient and two moments in float32; a step count per tensor and the mask are the rest.
    assert 16 * parameters < numbers["model_data_bytes"] < 16 * parameters + (1 << 16)
    assert numbers["unmanaged_peak_device_bytes"] > numbers["model_data_bytes"]
    assert 0 < numbers["lower_bound_bytes"] <= numbers["bytes_moved"]
    assert numbers["managed_seconds"] > 0
    assert numbers["unmanaged_seconds"] > 0
    assert len(numbers["losses"]) == numbers["steps"] == 3


def test_demo_draws_a_picture(finished: tuple[str, dict[str, object], Path]) -> None:
    assert finished[2].read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device-budget", "1GiB"], "the model data are 406142976"),
        (["--device-budget", "20G"], "ambiguous"),
        (["--json", "/nowhere/demo.json"], "there is no folder /nowhere"),
        (["--device", "cpu"], "is no accelerator"),
        (["--device", "toaster"], "no such device"),
        (["--device-budget", "1MiB"], "device_budget is 1048576 bytes"),
    ],
)
def test_demo_refuses_in_one_line(arguments: list[str], message: str) -> None:
    result = RUN.invoke(app, ["demo", *arguments])
    assert result.exit_code == 2
    assert message in result.stderr
    assert len([line for line in result.stderr.splitlines() if line.startswith("error: ")]) == 1
    assert "Traceback" not in result.output


def test_numbers_say_where_they_come_from(
    finished: tuple[str, dict[str, object], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, numbers, _ = finished
    assert numbers["accelerator"] == "virtual (operators run on the CPU)"
    assert all(numbers[name] for name in ("date", "commit", "python", "torch"))
    monkeypatch.setattr(provenance, "_ROOT", tmp_path)  # as a copy without its repository
    assert provenance.commit() == "unknown"
    (tmp_path / "COMMIT").write_text("1234567\n")
    assert provenance.commit() == "1234567"
