"""Reading ``FILE.py:FUNCTION`` from the command line and calling what it names.

Owns those errors. A fault in the user's own code comes out as a `ConfigError` that names where it was raised,
with the original as its cause.
"""

import importlib.util
import os
import sys
import traceback
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from hetero.errors import ConfigError, HeteroError

__all__ = ["call", "load_function"]


def load_function(target: str) -> Callable[[], Any]:
    """The function that ``FILE.py:FUNCTION`` names; the file's folder is importable, as if it had been run. The file
    may have any name, that of a library as well.

    Raises `ConfigError`.
    """
    file, colon, name = target.rpartition(":")
    if not colon or not file or not name:
        raise ConfigError(f"{target!r}: expected FILE.py:FUNCTION, such as train.py:make")
    path = Path(file)
    if not path.is_file():
        raise ConfigError(f"{target!r}: there is no file {path}")
    name_of_module = _module_name(path)
    spec = importlib.util.spec_from_file_location(name_of_module, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{target!r}: {path} is no Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.absolute().parent))
    sys.modules[name_of_module] = module
    call(spec.loader.exec_module, module, what=f"loading {path}")
    function = getattr(module, name, None)
    if not callable(function):
        there = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        wrong = "is not a function" if hasattr(module, name) else "is not there"
        raise ConfigError(f"{path} has {', '.join(there) or 'no functions'}; {name} {wrong}")
    return function  # type: ignore[no-any-return]


def _module_name(path: Path) -> str:
    """Its stem, by which worker processes find again what it defines, unless whoever imports that means something else
    (a file called ``torch.py``)."""
    folder, loaded = str(path.absolute().parent), sys.modules.get(path.stem)
    if loaded is not None:
        is_taken = getattr(loaded, "__file__", None) != str(path.absolute())
    else:
        elsewhere = [entry for entry in sys.path if os.path.abspath(entry) != folder]
        is_taken = PathFinder.find_spec(path.stem, elsewhere) is not None
    return f"_hetero_{path.stem}" if is_taken else path.stem


def call(function: Callable[..., Any], *args: Any, what: str) -> Any:
    """``function(*args)``, where its errors become a `ConfigError` saying ``what`` raised them and where."""
    try:
        return function(*args)
    except HeteroError:
        raise
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        raise ConfigError(
            f"{what} raised {type(error).__name__}: {error} ({where.filename}, line {where.lineno}); "
            "--debug shows the traceback"
        ) from error
