"""Memory on the host for what trials overwrite.

Owns it, and its place in the ledger. Invariant: with it, model data on the host do not pass ``host_budget``, even when
every gradient is there.
"""

import torch

from hetero.stm.step.trials import tensors_of
from hetero.stm.tensors.managed import ManagedTensor
from hetero.stm.tensors.state import Kind, Ledger, StatefulTensor, Tier
from hetero.stm.updates.slices import Entry

__all__ = ["Snapshots"]


class Snapshots:
    """Buffers of each parameter and its states, kept from one iteration to the next."""

    def __init__(self, ledger: Ledger, host_budget: int) -> None:
        self._ledger = ledger
        self._budget = host_budget
        self._entry = StatefulTensor(ledger, Kind.OPTIMIZER_STATE, "snapshots")
        self._buffers: dict[int, list[torch.Tensor]] = {}
        # The most gradients that were there at once.
        self._gradient_bytes = 0

    @property
    def nbytes(self) -> int:
        """Of all of them."""
        return self._entry.nbytes(Tier.HOST)

    def buffers(self, tensor: ManagedTensor, entry: Entry | None) -> list[torch.Tensor] | None:
        """One for the parameter and each of its states; None if they would pass the budget."""
        wanted = tensors_of(tensor.home, entry)
        kept = self._buffers.get(tensor.index)
        if kept is not None and len(kept) == len(wanted) and all(map(_fits, kept, wanted)):
            return kept
        if kept is not None:
            self._place(-sum(buffer.nbytes for buffer in self._buffers.pop(tensor.index)))
        nbytes = sum(state.nbytes for state in wanted)
        gradients = self._ledger.nbytes(Tier.HOST, Kind.GRADIENT)
        coming = max(0, self._gradient_bytes - gradients)
        if self._ledger.host_bytes + coming + nbytes > self._budget:
            return None
        with torch.inference_mode(False):
            made = [torch.empty_like(state) for state in wanted]
        self._buffers[tensor.index] = made
        self._place(nbytes)
        return made

    def note_gradients(self) -> None:
        """All gradients of an iteration are there."""
        self._gradient_bytes = max(self._gradient_bytes, self._ledger.nbytes(Tier.HOST, Kind.GRADIENT))

    def release(self) -> None:
        """Give everything back."""
        self._buffers.clear()
        self._entry.place(Tier.HOST, 0)

    def _place(self, change: int) -> None:
        self._entry.place(Tier.HOST, self.nbytes + change)


def _fits(buffer: torch.Tensor, state: torch.Tensor) -> bool:
    return (buffer.dtype, buffer.size(), buffer.stride()) == (state.dtype, state.size(), state.stride())
