"""Every example runs as a user would run it, on a machine without an accelerator, without a warning."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["train_plain", "train_hf", "train_accumulate"])
def test_example_runs(name: str) -> None:
    result = subprocess.run(
        [sys.executable, "-W", "error", str(ROOT / "examples" / f"{name}.py")],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    losses = [
        float(line.split("loss ")[1].split(",")[0]) for line in result.stdout.splitlines() if "loss " in line
    ]
    assert len(losses) >= 5
    assert losses[-1] < losses[0]
