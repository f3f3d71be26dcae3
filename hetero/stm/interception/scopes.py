"""Managed forwards: within one, operators on managed parameters run on the device.

Owns which threads are in one (`hetero.stm.interception.operators`: [Note: where operators run]).
"""

import contextlib
import threading
from collections.abc import Iterator

__all__ = ["in_scope", "scope"]


class _Scope(threading.local):
    depth = 0


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
