"""Objects that are known for as long as somebody else keeps them.

Owns none of them. Unlike with `weakref.WeakSet`, whoever goes through them is not disturbed by another thread that adds
one meanwhile: there that is a RuntimeError.
"""

import weakref
from collections.abc import Iterator
from typing import Generic, TypeVar

__all__ = ["Living"]

T = TypeVar("T")


class Living(Generic[T]):
    """A set, by identity."""

    def __init__(self) -> None:
        self._references: set[weakref.ref[T]] = set()

    def __iter__(self) -> Iterator[T]:
        """Those of now."""
        for reference in list(self._references):
            if (one := reference()) is not None:
                yield one

    def add(self, one: T) -> None:
        """Know it from now on."""
        self._references.add(weakref.ref(one, self._references.discard))

    def discard(self, one: T) -> None:
        """Know it no longer."""
        self._references.discard(weakref.ref(one))
