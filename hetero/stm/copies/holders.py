"""Device copies that somebody besides us holds, while an iteration is measured.

Owns which copies have to be asked for that. Invariant: nobody holds any other. Who holds a copy has been given it as an
operand, and a copy that was let go of is held again only after it was one again: so those are asked that were held when
last asked, and the operands since then. To ask all at each sampling moment would take time by the square of their
number.
"""

from collections.abc import Mapping, Sequence

from hetero.stm.tensors.managed import ManagedTensor

__all__ = ["Holders"]


class Holders:
    """Of one manager's copies. ``resident``: those that there are, by index."""

    def __init__(self, resident: Mapping[int, ManagedTensor]) -> None:
        self._resident = resident
        self._asked: list[ManagedTensor] = []

    def begin(self) -> None:
        """A segment begins that is measured. Of operators before it nobody has told us: all are asked once."""
        self._asked = list(self._resident.values())

    def held(self, coming: Sequence[ManagedTensor]) -> tuple[int, ...]:
        """Copies that cannot leave now, by index, but for the operands ``coming``, which are given out next."""
        held = [t for t in self._asked if t.is_resident and (t.users or t.is_held())]
        held = [tensor for tensor in held if tensor not in coming]
        self._asked = [*held, *coming]
        return tuple(tensor.index for tensor in held)
