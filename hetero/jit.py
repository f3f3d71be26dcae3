"""Compiling inner loops with Numba where it is installed, and running them as plain Python where it is not.

Owns the one place that imports Numba. Modules whose functions are decorated with `jit` are imported by
their callers inside functions, because importing Numba costs about a second that users who never plan
should not pay.
"""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, TypeVar, cast

__all__ = ["COMPILED", "jit"]

_Function = TypeVar("_Function", bound=Callable[..., Any])

COMPILED = find_spec("numba") is not None  # not imported before there is something to compile


def jit(function: _Function) -> _Function:
    """``function`` compiled on first call, the machine code cached beside the source; or itself."""
    if not COMPILED:
        return function
    try:
        import numba
    except ImportError:  # it is there, and does not go with this NumPy
        return function
    compiled: Any = numba.njit(cache=True, nogil=True)(function)
    return cast(_Function, compiled)
