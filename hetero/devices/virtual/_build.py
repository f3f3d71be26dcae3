"""Compiling and loading the virtual accelerator's C++.

Owns the cache of compiled libraries: one folder per (torch version, Python version, source hash) below the
user's cache directory, built once under a file lock. Does not configure or register anything.
"""

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import torch

from hetero.errors import DeviceError

__all__ = ["build_folder", "load_extension"]

_NAME = "hetero_virtual"
_SOURCES = Path(__file__).parent / "csrc"
_FLAGS = ["-O2", "-g0"]
# Files that are compiled as one, beside all others as one: reading torch's headers is most of the work, and each file
# by itself would read the same ones again. Of three units each takes a compiler about half a minute.
_UNITS = (("autocast",), ("composites", "module"))


def load_extension() -> ModuleType:
    """The compiled extension, built by the first process that asks. Raises `DeviceError` if that fails."""
    folder = build_folder()
    built = folder / "built"
    if built.exists():
        return _import(folder / f"{_NAME}.so")
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "build.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if built.exists():
            return _import(folder / f"{_NAME}.so")
        # torch's own lock is a bare file that a killed build leaves behind; ours says nobody is building.
        (folder / "lock").unlink(missing_ok=True)
        with _scripts_on_path():
            module = _compile(folder)
        built.touch()
        return module


def build_folder() -> Path:
    """Where this torch, Python and source have, or will have, their library."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    digest = hashlib.sha256(repr((_FLAGS, _UNITS)).encode())
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.name.encode())
        digest.update(source.read_bytes())
    python = f"{sys.implementation.cache_tag}-{platform.machine()}"
    return Path(root) / "hetero" / f"virtual-torch{torch.__version__}-{python}-{digest.hexdigest()[:16]}"


def _compile(folder: Path) -> ModuleType:
    from torch.utils import cpp_extension

    compiler = os.environ.get("CXX") or "c++"
    if shutil.which(compiler) is None:
        raise DeviceError(
            f"the virtual accelerator is compiled on first use, and the compiler {compiler!r} was not found: "
            "install one for C++20 (Debian, Ubuntu: apt install g++), or set CXX to its path"
        )
    if not cpp_extension.is_ninja_available():
        raise DeviceError(
            "the virtual accelerator is compiled on first use, and ninja was not found: pip install ninja"
        )
    try:
        module: ModuleType = cpp_extension.load(
            name=_NAME,
            sources=_write_units(folder),
            build_directory=str(folder),
            extra_cflags=_FLAGS,
        )
    except (RuntimeError, ImportError, OSError, subprocess.SubprocessError) as error:
        raise DeviceError(
            f"compiling the virtual accelerator for torch {torch.__version__} with {compiler!r} in {folder} "
            "failed; it needs a C++20 compiler (g++ >= 11 or clang++ >= 14) and Python's headers "
            f"(python3-dev): {error}"
        ) from error
    return module


@contextlib.contextmanager
def _scripts_on_path() -> Iterator[None]:
    """pip puts ninja beside Python, where torch finds it only if the environment has been activated."""
    before = os.environ.get("PATH", os.defpath)
    os.environ["PATH"] = os.pathsep.join((before, sysconfig.get_path("scripts")))
    try:
        yield
    finally:
        os.environ["PATH"] = before


def _write_units(folder: Path) -> list[str]:
    """Sources in ``folder`` that include those of a unit each: their paths."""
    others = {path.stem for path in _SOURCES.glob("*.cpp")}.difference(*_UNITS)
    units = []
    for number, names in enumerate((*_UNITS, others)):
        unit = folder / f"unit{number}.cpp"
        unit.write_text("".join(f'#include "{_SOURCES / name}.cpp"\n' for name in sorted(names)))
        units.append(str(unit))
    return units


def _import(library: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(_NAME, library)
    if spec is None or spec.loader is None:
        raise DeviceError(f"{library} cannot be imported: remove the folder {library.parent} and try again")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
