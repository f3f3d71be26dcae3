"""What an optimizer's ``param_groups`` are while it steps.

Owns who sees what of them meanwhile. The step is given what it has to do itself, and nothing of that is anybody else's
affair: a thread that looks, to log a learning rate or to save ``state_dict()``, finds the user's groups.
"""

import threading
from collections.abc import Iterable, Iterator
from typing import Any

from hetero.stm.updates.optimizers import Group

__all__ = ["GroupsOfStep"]


class GroupsOfStep(list[Group]):
    """``groups``, to the thread that makes this; ``users``, to all others.

    Attributes:
        present: of those that the step goes through, the one that came last.
    """

    def __init__(self, groups: Iterable[Group], *, users: list[Group]) -> None:
        super().__init__(groups)
        self._users = users
        self._thread = threading.get_ident()
        self.present: Group = {}

    def __iter__(self) -> Iterator[Group]:
        return self._followed() if self._is_mine() else iter(self._users)

    def __reversed__(self) -> Iterator[Group]:
        return super().__reversed__() if self._is_mine() else reversed(self._users)

    def __len__(self) -> int:
        return super().__len__() if self._is_mine() else len(self._users)

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(index) if self._is_mine() else self._users[index]

    def __reduce__(self) -> Any:
        """Copies are ordinary lists."""
        return list, (list(self),)

    def _followed(self) -> Iterator[Group]:
        for self.present in super().__iter__():
            yield self.present

    def _is_mine(self) -> bool:
        return self._thread == threading.get_ident()
