"""Managed forwards: within one, operators on managed parameters run on the device. And what runs at home in any case.

Owns which threads are in which (`hetero.stm.interception.operators`: [Note: where operators run]).
"""

import contextlib
import threading
from collections.abc import Iterator

from hetero.autograd import in_backward

__all__ = ["at_home", "computes", "in_scope", "is_at_home", "scope"]


class _Scope(threading.local):
    depth = 0
    is_at_home = False


_scope = _Scope()


@contextlib.contextmanager
def scope() -> Iterator[None]:
    """Within it, operators on managed parameters run on the device. Per thread; may be nested."""
    _scope.depth += 1
    try:
        yield
    finally:
        _scope.depth -= 1


def in_scope() -> bool:
    """A managed forward runs on this thread."""
    return _scope.depth > 0


@contextlib.contextmanager
def at_home() -> Iterator[None]:
    """Within it, operators on managed parameters run at home, in whatever backward or forward it is; but not those of a
    forward that begins there. Per thread; may be nested."""
    before = _scope.depth, _scope.is_at_home
    _scope.depth, _scope.is_at_home = 0, True
    try:
        yield
    finally:
        _scope.depth, _scope.is_at_home = before


def computes() -> bool:
    """Parameters are computed with on the device: in a managed forward, or a checkpoint's within backward."""
    return in_scope() or (in_backward() and not is_at_home())


def is_at_home() -> bool:
    """Something runs on this thread, outside of any forward, that is to see parameters at home."""
    return _scope.is_at_home and not _scope.depth
