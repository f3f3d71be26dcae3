"""A clock that moves whenever a parameter's home is written: who has its memory, and what they may have done there.

Torch counts writes per tensor, and those made through `.data` on a counter of their own. Owns the counters that can be
watched, and what stands in for those that cannot: writes that we are told of, and writes that somebody may have made
who was given the memory. What a device copy is worth by this clock is `hetero.stm.tensors.managed`'s.
"""

import torch

from hetero.devices import storage_of
from hetero.stm.tensors.exposure import memory_is_private

__all__ = ["HomeClock"]


class HomeClock:
    """Of one home at a time."""

    __slots__ = ("_alias", "_doubtful", "_given_out", "_home", "_source", "_unseen")

    def __init__(self) -> None:
        self._home: torch.Tensor
        self._alias: torch.Tensor | None = None
        self._source: torch.Tensor | None = None
        self._unseen = 0
        # Of these, what somebody may have done who was given home's memory: most often they only looked.
        self._doubtful = 0
        # How often somebody was given home's memory, and may have written there, since it was last asked who has it.
        self._given_out = 0

    def bind(self, home: torch.Tensor) -> None:
        """``home`` is what it tells of from now on."""
        self._home = home
        self._alias = self._source = None
        self._given_out = 0

    def watch(self, source: torch.Tensor) -> None:
        """Home is memory that ``source`` shares, under a version counter of its own (``p.data = flat[i:j]``)."""
        self._source = source

    @property
    def now(self) -> int:
        """Moves whenever home is written, through the parameter or through its ``.data``."""
        clock = self._home._version + self._unseen
        if self._alias is not None:
            clock += self._alias._version
        if self._source is not None:
            clock += self._source._version
        return clock

    @property
    def known(self) -> int:
        """As `now`, without what was never more than a doubt: it tells nothing of iterations to come."""
        return self.now - self._doubtful

    def note_write(self) -> None:
        """Home was written by somebody who does not move version counters: fused optimizer kernels do not."""
        self._unseen += 1

    def data_alias(self) -> torch.Tensor:
        """What ``p.data`` is: same memory, with a version counter of its own, which we can watch."""
        if self._alias is None:
            self._alias = self._home.data
        return self._alias.detach()

    def note_given_out(self) -> None:
        """Somebody has home's memory: what they write through ``.data`` of a view of it moves no counter that we see.
        `note_unknown_writes` is to follow before a copy of it is used again."""
        self._given_out += 1

    def note_given_back(self) -> None:
        """Who was given home's memory last has only read it, and is about to let go of it."""
        self._given_out = max(0, self._given_out - 1)

    @property
    def may_be_written_unseen(self) -> bool:
        """By somebody who has home's memory, or had it not long ago. If not, `note_unknown_writes` does nothing."""
        return bool(self._given_out) or self._source is not None

    def note_unknown_writes(self, *, copy_is_newer: bool) -> bool:
        """Home counts as written if somebody may have done so unseen; whether it does. They are those who were given
        its memory since this was asked last, or still have it, and those who share the memory of
        ``p.data = x[i:j].data`` (``vector_to_parameters``). ``copy_is_newer``: than home, for all that is known."""
        if not self.may_be_written_unseen:
            return False
        if self._source is None and copy_is_newer:
            return False  # whoever was given home found it up to date: only the copy has been written since
        is_shared = not memory_is_private(self._home, self._ours)
        if not (self._given_out or is_shared):
            return False
        # More than one may still have it: that one gives it back tells nothing of the others.
        self._given_out = 2 if is_shared else 0
        self._doubtful += self._source is None
        self.note_write()
        return True

    def shares(self, tensor: torch.Tensor) -> bool:
        """``tensor`` lies in home's memory."""
        storage = storage_of(tensor)
        return storage is not None and storage._cdata == self._home.untyped_storage()._cdata

    def home_is_private(self) -> bool:
        """Nobody else holds home's memory."""
        return self._source is None and memory_is_private(self._home, self._ours)

    @property
    def _ours(self) -> int:
        """Tensors of its memory that we hold, beside the parameter."""
        return 1 + (self._alias is not None) + (self._source is not None)
