"""Files: what can be said of a path before any work is done, and writing one whole or not at all.

Owns the one way in which traces, placements and forecasts reach the disk: a temporary file beside the target,
renamed over it when complete. Invariant: after an error or a crash the target is what it was before, and after an
error nothing else is left.
"""

import os
import tempfile
from pathlib import Path

from hetero.errors import ConfigError

__all__ = ["check_readable", "check_writable", "write_text"]


def check_readable(path: str | os.PathLike[str]) -> None:
    """Raise `ConfigError` for a path where there is no file, or a folder."""
    if not Path(path).is_file():
        raise ConfigError(f"{path}: {'this is a folder' if Path(path).is_dir() else 'there is no such file'}")


def check_writable(*paths: str | os.PathLike[str] | None) -> None:
    """Raise `ConfigError` for a path in a folder that is missing or closed to us, or that is a folder."""
    for path in (Path(path) for path in paths if path is not None):
        folder = path.absolute().parent
        if not folder.is_dir():
            raise ConfigError(f"{path}: there is no folder {folder}; make it first")
        if path.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
            raise ConfigError(f"{path} cannot be written: choose another place")


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Replace the file at ``path`` by ``text`` in UTF-8; raises `OSError` with the target untouched."""
    target = Path(path)
    descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".part")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes files private; this one is to have the permissions of any other new file.
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
