"""``optimizer.state`` that is up to date whenever somebody looks.

Owns the dict that stands in its place. Invariant: every access to the dict itself calls ``before`` first, with the keys
of the entries that it hands out, and ``after`` for the entry that was looked at before this one. Entries and tensors
that were taken out of it earlier are plain objects: `hetero.stm.tensors.exposure` knows of them.
"""

import copy
from collections import defaultdict
from collections.abc import Callable, ItemsView, Iterator, Mapping, Sequence, ValuesView
from typing import Any

__all__ = ["WatchedState"]


class WatchedState(defaultdict[Any, dict[str, Any]]):
    """``before(writes, keys)`` is called before each access, ``keys`` None for all; ``after(key)`` when somebody has
    had that entry and goes on to another one. Copies and pickles are plain dicts."""

    def __init__(
        self,
        content: Mapping[Any, dict[str, Any]],
        before: Callable[[bool, Sequence[Any] | None], None],
        after: Callable[[Any], None],
    ) -> None:
        self._before: Callable[[bool, Sequence[Any] | None], None] = lambda writes, keys: None
        self._after = after
        self._latest: Any = None
        super().__init__(dict, content)
        self._before = before

    @property
    def watcher(self) -> object:
        """Whose method ``before`` is."""
        return getattr(self._before, "__self__", None)

    def plain(self) -> defaultdict[Any, dict[str, Any]]:
        """The same content in an ordinary dict."""
        self._before(False, None)
        return defaultdict(self.default_factory, dict.items(self))

    def note_entry(self, key: Any) -> None:
        """The entry of ``key`` is being handed out."""
        latest, self._latest = self._latest, key
        if latest is not None and latest is not key:
            self._after(latest)

    def items(self) -> Any:
        """As a dict's."""
        self._before(False, None)
        return _Items(self)

    def values(self) -> Any:
        """As a dict's."""
        self._before(False, None)
        return _Values(self)

    def __or__(self, other: Any) -> Any:
        return self.plain() | (other.plain() if isinstance(other, WatchedState) else other)

    def __ror__(self, other: Any) -> Any:
        return other | self.plain()

    @classmethod
    def fromkeys(cls, keys: Any, value: Any = None) -> Any:
        """As a `defaultdict`'s: there is nobody to watch."""
        return defaultdict.fromkeys(keys, value)

    def __copy__(self) -> defaultdict[Any, dict[str, Any]]:  # type: ignore[override]
        return self.plain()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.plain(), memo)


class _Items(ItemsView[Any, dict[str, Any]]):
    _mapping: WatchedState

    def __iter__(self) -> Iterator[tuple[Any, dict[str, Any]]]:
        for key, entry in dict.items(self._mapping):
            self._mapping.note_entry(key)
            yield key, entry


class _Values(ValuesView[dict[str, Any]]):
    _mapping: WatchedState

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for _, entry in _Items(self._mapping):
            yield entry


def _watched(name: str, *, writes: bool) -> Any:
    method = getattr(defaultdict, name)
    hands_out = name in ("__getitem__", "get", "setdefault")
    is_about_keys = name in ("__contains__", "__iter__", "__len__", "__reversed__", "keys")

    def access(self: WatchedState, *args: Any, **kwargs: Any) -> Any:
        self._before(writes, () if is_about_keys else args[:1] if hands_out and args else None)
        if hands_out and args:
            self.note_entry(args[0])
        return method(self, *args, **kwargs)

    access.__name__ = name
    return access


_READS = (
    *("__contains__", "__eq__", "__getitem__", "__iter__", "__len__", "__ne__", "__repr__", "__reversed__"),
    *("get", "keys"),
)
_WRITES = ("__delitem__", "__ior__", "__setitem__", "clear", "pop", "popitem", "setdefault", "update")
for _name in _READS:
    setattr(WatchedState, _name, _watched(_name, writes=False))
for _name in _WRITES:
    setattr(WatchedState, _name, _watched(_name, writes=True))
# Last, because its name hides the module's within the class.
WatchedState.copy = WatchedState.plain  # type: ignore[assignment, method-assign]
