"""Whole processes: a clean exit whatever is pending or alive, and what happens without a compiler."""

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from hetero.devices.virtual import _build

PREAMBLE = """
import torch
from hetero.devices.virtual import virtual_device
device = virtual_device(bandwidth="{bandwidth}")
stream = torch.Stream(device)
host, x = torch.randn(2**18, pin_memory=True), torch.empty(2**18, device=device)
model = torch.nn.Linear(8, 8).to(device)
model(torch.randn(2, 8, device=device)).sum().backward()
torch.optim.AdamW(model.parameters()).step()
stream.wait_stream(torch.accelerator.current_stream())
with stream:
    x.copy_(host, non_blocking=True)
"""


def run(source: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", source],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **environment},
        check=False,
    )


@pytest.mark.parametrize(
    ("bandwidth", "ending", "code"),
    [
        ("10GiB/s", "stream.synchronize()", 0),
        ("1MiB/s", "torch.kept = [x, model, host]", 0),
        ("1MiB/s", "del x, host", 0),
        ("1MiB/s", "raise SystemExit(3)", 3),
    ],
)
def test_a_script_exits_cleanly(bandwidth: str, ending: str, code: int) -> None:
    done = run(PREAMBLE.format(bandwidth=bandwidth) + ending)
    assert (done.returncode, done.stderr) == (code, "")


def test_without_a_compiler_the_error_says_what_to_install(tmp_path: Path) -> None:
    source = """
    from hetero.devices.virtual import is_built, virtual_device
    from hetero.errors import DeviceError
    try:
        virtual_device()
    except DeviceError as error:
        print(is_built(), error)
    """
    done = run(textwrap.dedent(source), CXX="no-such-compiler", XDG_CACHE_HOME=str(tmp_path))
    assert done.stdout.startswith("False the virtual accelerator is compiled on first use")
    assert "'no-such-compiler' was not found: install one for C++20" in done.stdout


def test_nothing_works_before_the_device_is_made_and_importing_makes_nothing() -> None:
    source = """
    import torch
    from hetero.devices.virtual import is_built, memory_limit
    from hetero.errors import DeviceError
    assert not is_built() and not hasattr(torch, "virtual")
    try:
        memory_limit()
    except DeviceError as error:
        print(error)
    """
    assert "call hetero.virtual_device() first" in run(textwrap.dedent(source)).stdout


def test_ninja_is_found_where_the_environment_is_not_activated(monkeypatch, tmp_path):
    """pip, of which it is a requirement, puts it beside Python."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert shutil.which("ninja") is None
    with _build._scripts_on_path():
        assert shutil.which("ninja") is not None
    assert os.environ["PATH"] == str(tmp_path)


def test_each_source_is_in_one_unit(tmp_path):
    included = [
        Path(name)
        for unit in _build._write_units(tmp_path)
        for name in re.findall('#include "(.*)"', Path(unit).read_text())
    ]
    assert len(included) > 5
    assert sorted(included) == sorted(_build._SOURCES.glob("*.cpp"))
