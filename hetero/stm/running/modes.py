"""The dispatch modes of a thread.

Owns their order: torch has one stack of them, and those of others are entered and left in an order of their own, so
what is put in or taken away here leaves them where they are.
"""

import contextlib
from collections.abc import Iterator
from typing import TypeVar

import torch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

__all__ = ["active", "agree", "has_others", "put_below", "remove", "take_away", "without", "without_others"]

Mode = TypeVar("Mode", bound=TorchDispatchMode)

_KEYS = torch._C.DispatchKey.Python, torch._C.DispatchKey.PythonTLSSnapshot


def active(kind: type[Mode]) -> list[Mode]:
    """Those of this kind."""
    return [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, kind)]


def agree() -> None:
    """Torch looks for modes on this thread if, and only if, there are some."""
    there = torch._C._len_torch_dispatch_stack() > 0
    for key in _KEYS:
        if torch._C._dispatch_tls_is_dispatch_key_included(key) != there:
            torch._C._dispatch_tls_set_dispatch_key_included(key, there)


def put_below(mode: TorchDispatchMode) -> None:
    """Outermost, if it is not among them yet: modes that others have entered since leave in their own order."""
    modes = _pop_all()
    if mode not in modes:
        _push_mode(mode)
    _push_all(modes)


def remove(*gone: TorchDispatchMode) -> None:
    """They are not among them any more."""
    _push_all([mode for mode in _pop_all() if mode not in gone])


def take_away(kind: type[Mode]) -> list[Mode]:
    """As `remove`, all of this kind; which these were."""
    gone = active(kind)
    remove(*gone)
    return gone


@contextlib.contextmanager
def without(kind: type[Mode]) -> Iterator[list[Mode]]:
    """Within it, none is of this kind; those that were. What others do to the stack meanwhile is undone."""
    if not active(kind):
        yield []
        return
    modes = _pop_all()
    _push_all([mode for mode in modes if not isinstance(mode, kind)])
    try:
        yield [mode for mode in modes if isinstance(mode, kind)]
    finally:
        _pop_all()
        _push_all(modes)


def has_others(kind: type[Mode]) -> bool:
    """There is one, at any depth, that is not of this kind, which is ours."""
    count: int = torch._C._len_torch_dispatch_stack()
    return any(not isinstance(torch._C._get_dispatch_stack_at(place), kind) for place in range(count))


@contextlib.contextmanager
def without_others(kind: type[Mode]) -> Iterator[None]:
    """Within it, those that are not of this kind see nothing; ours may come and go meanwhile."""
    modes = _pop_all()
    _push_all([mode for mode in modes if isinstance(mode, kind)])
    try:
        yield
    finally:
        _push_all([*(mode for mode in modes if not isinstance(mode, kind)), *_pop_all()])


def _pop_all() -> list[TorchDispatchMode]:
    """From the innermost on."""
    return [_pop_mode() for _ in range(torch._C._len_torch_dispatch_stack())]


def _push_all(modes: list[TorchDispatchMode]) -> None:
    for mode in reversed(modes):
        _push_mode(mode)
