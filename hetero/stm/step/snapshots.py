"""Memory on the host for what trials overwrite.

Owns it, and its place in the ledger. Invariant: with it, model data on the host do not pass ``host_budget``, even when
every gradient is there, and as many activations as ever were. Where activations come to be more, it goes back.
"""

import weakref
from collections.abc import Callable, Sequence

import torch

from hetero.stm.activations.slots import HostSlots
from hetero.stm.step.trials import overwritten_by
from hetero.stm.tensors.managed import ManagedTensor
from hetero.stm.tensors.state import Kind, Ledger, StatefulTensor, Tier
from hetero.stm.updates.optimizers import Entry

__all__ = ["Snapshots"]


class Snapshots:
    """Buffers of each of ``tensors`` and its states, kept from one iteration to the next. ``slots``: with what they
    share the host's budget; ``share`` of what is free there is theirs. ``finish``: ends a parameter's update, or takes
    it back."""

    def __init__(
        self,
        ledger: Ledger,
        slots: HostSlots,
        tensors: Sequence[ManagedTensor],
        *,
        share: float,
        finish: Callable[[ManagedTensor], None],
    ) -> None:
        self._slots = slots
        self._tensors = tensors
        self._finish = finish
        self._share = share
        give_back = weakref.WeakMethod(self._give_back)
        slots.ask_back = lambda nbytes: None if (call := give_back()) is None else call(nbytes)
        self._entry = StatefulTensor(ledger, Kind.OPTIMIZER_STATE, "snapshots")
        self._buffers: dict[int, list[torch.Tensor]] = {}
        self._copied_bytes, self._copying_seconds = 0, 0.0

    @property
    def nbytes(self) -> int:
        """Of all of them."""
        return self._entry.nbytes(Tier.HOST)

    def buffers(self, tensor: ManagedTensor, entry: Entry | None) -> list[torch.Tensor] | None:
        """One for the parameter and each of its states; None if they would pass the budget."""
        wanted = overwritten_by(tensor.home, entry)
        kept = self._buffers.get(tensor.index)
        if kept is not None and len(kept) == len(wanted) and all(map(_fits, kept, wanted)):
            return kept
        if kept is not None:
            self._drop(tensor.index)
        nbytes = sum(state.nbytes for state in wanted)
        if not self._place(nbytes):
            return None
        with torch.inference_mode(False):
            made = [torch.empty_like(state) for state in wanted]
        self._buffers[tensor.index] = made
        return made

    def note_copies(self, nbytes: int, seconds: float) -> None:
        """The queue's thread has copied what the update of a parameter of ``nbytes`` overwrites."""
        self._copied_bytes += nbytes
        self._copying_seconds += seconds

    def work(self) -> tuple[int, float]:
        """Bytes of such parameters so far, and the seconds that took."""
        return self._copied_bytes, self._copying_seconds

    def release(self) -> None:
        """Give everything back."""
        self._buffers.clear()
        self._place(-self.nbytes)

    def _give_back(self, nbytes: int) -> None:
        """So many bytes, or all: first those of no trial."""
        enough = self.nbytes - nbytes
        for tensor in sorted([self._tensors[i] for i in self._buffers], key=lambda t: t.pending is not None):
            if self.nbytes <= enough:
                break
            if tensor.pending is not None:
                self._finish(tensor)
            self._drop(tensor.index)

    def _drop(self, index: int) -> None:
        self._place(-sum(buffer.nbytes for buffer in self._buffers.pop(index)))

    def _place(self, change: int) -> bool:
        """So many bytes more, or fewer; False if there is no room."""
        if not self._slots.lend(change, share=self._share):
            return False
        self._entry.place(Tier.HOST, self.nbytes + change)
        return True


def _fits(buffer: torch.Tensor, state: torch.Tensor) -> bool:
    return (buffer.dtype, buffer.size(), buffer.stride()) == (state.dtype, state.size(), state.stride())
