"""The console script itself: info, help, entry points."""

import os
import subprocess
import sys

import torch
from typer.testing import CliRunner

from hetero.cli import app

RUN = CliRunner()


def test_info_shows_versions_memory_and_the_virtual_link() -> None:
    result = RUN.invoke(app, ["info", "--virtual"])
    assert result.exit_code == 0, result.output
    for text in (
        torch.__version__,
        "host memory",
        "virtual:0 links",
        "GiB/s",
        "virtual accelerator",
        "built",
    ):
        assert text in result.output


def test_info_without_an_accelerator_says_so() -> None:
    # In a process of its own: in this one there is the virtual accelerator.
    result = subprocess.run(
        [sys.executable, "-m", "hetero", "info"],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "accelerator" in result.stdout
    assert "none; --virtual shows" in result.stdout


def test_help_lists_the_commands() -> None:
    result = RUN.invoke(app, ["--help"])
    assert result.exit_code == 0
    for command in ("demo", "info", "verify", "pool", "trace"):
        assert command in result.output


def test_it_runs_as_a_module() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "hetero", "verify", "nowhere.py:make"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 2
    assert result.stderr.startswith("error: 'nowhere.py:make': there is no file nowhere.py")
