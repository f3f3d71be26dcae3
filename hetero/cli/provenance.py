"""Where numbers come from: the date, the commit, the versions, the device and its driver.

Owns what every file of numbers says of that (`hetero demo --json`, the benchmarks). Reads only.
"""

import datetime
import platform
import subprocess
from pathlib import Path

import torch

import hetero
from hetero.devices.host import driver_version
from hetero.units import format_bytes

__all__ = ["commit", "describe_device", "provenance"]

_ROOT = Path(hetero.__file__).resolve().parents[1]


def provenance(device: torch.device | None) -> dict[str, object]:
    """Ready for JSON. ``device`` None: nothing was computed on one."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "accelerator": None if device is None else describe_device(device),
    }


def describe_device(device: torch.device) -> str:
    """Its name, its memory, and, of a real one, the driver's version and that of what torch was built with."""
    if device.type == "virtual":
        return "virtual (operators run on the CPU)"
    module = torch.get_device_module(device)
    facts = [format_bytes(module.get_device_properties(device).total_memory)]
    driver = driver_version()
    if driver is not None:
        facts.append(f"driver {driver}")
    for name, version in (("CUDA", torch.version.cuda), ("ROCm", torch.version.hip)):
        if version is not None:
            facts.append(f"{name} {version}")
    return f"{module.get_device_name(device)} ({', '.join(facts)})"


def commit() -> str:
    """The commit that is checked out, and whether what is measured was changed since. A copy without its ``.git`` may
    have it in a file COMMIT."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=_ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        if not (_ROOT / ".git").exists():  # git would find whoever's repository this is installed in
            return (_ROOT / "COMMIT").read_text().strip()
        # Only what is measured counts as changed: a run rewrites its own results.
        changed = git("status", "--porcelain", "--", "hetero", "benchmarks/*.py")
        return git("rev-parse", "HEAD") + (" with changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
