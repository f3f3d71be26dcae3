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
        self._references: dict[int, weakref.ref[T]] = {}  # by id: some compare by what they are made of

    def __iter__(self) -> Iterator[T]:
        """Those of now."""
        for reference in list(self._references.values()):
            if (one := reference()) is not None:
                yield one

    def add(self, one: T) -> None:
        """Know it from now on."""
        key, references = id(one), self._references

        def forget(reference: "weakref.ref[T]") -> None:
            if references.get(key) is reference:  # else another has that id by now
                del references[key]

        references[key] = weakref.ref(one, forget)

    def discard(self, one: T) -> None:
        """Know it no longer."""
        self._references.pop(id(one), None)
