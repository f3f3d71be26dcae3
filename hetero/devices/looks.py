"""Functions of torch by which users look at a device's peak counter, or set it back.

Owns what is put around them for a while (`around`), and the way past it (`own`), which our own looks take. Whoever has
taken such a function out of its module before is not met.
"""

import contextlib
import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

__all__ = ["around", "own"]

_NAMES = (
    "max_memory_allocated",
    "memory_stats",
    "memory_stats_as_nested_dict",
    "memory_summary",
    "reset_max_memory_allocated",
    "reset_peak_memory_stats",
)
# What is around a function, and that function.
_own: dict[Any, Any] = {}


def own(module: ModuleType, name: str) -> Any:
    """The module's function, whatever is around it; None if it has none."""
    function = getattr(module, name, None)
    return _own.get(function, function)


def around(
    module: ModuleType, within: Callable[[], contextlib.AbstractContextManager[None]]
) -> Callable[[], None]:
    """From now on each of ``module``'s, and of `torch.accelerator`'s, runs ``within`` that. Returns what ends it."""
    put: list[tuple[ModuleType, str, Any, Any]] = []
    for place in (module, torch.accelerator):
        for name in _NAMES:
            if (function := getattr(place, name, None)) is not None:
                look = _within(function, within)
                put.append((place, name, function, look))
                setattr(place, name, look)

    def end() -> None:
        for place, name, function, look in put:
            if getattr(place, name) is look:  # else somebody else has replaced it since
                setattr(place, name, function)
            _own.pop(look, None)

    return end


def _within(function: Any, within: Callable[[], contextlib.AbstractContextManager[None]]) -> Any:
    @functools.wraps(function)
    def look(*args: Any, **kwargs: Any) -> Any:
        with within():
            return function(*args, **kwargs)

    _own[look] = _own.get(function, function)
    return look
