"""Where gradients are, and how many bytes of them.

Owns one entry of the ledger for each parameter's gradient, and its slot in host memory. Invariant: a slot is given out
only while nobody else holds it.
"""

import torch

from hetero.devices import HostArena, fills_memory
from hetero.stm.tensors.managed import ManagedTensor
from hetero.stm.tensors.state import Kind, Ledger, StatefulTensor, Tier

__all__ = ["GradientMemory", "as_home", "content_nbytes", "owns_memory"]


class GradientMemory:
    """Of one manager's parameters."""

    def __init__(self, arena: HostArena, ledger: Ledger) -> None:
        self._arena = arena
        self._ledger = ledger
        self._entries: dict[int, StatefulTensor] = {}
        self.whole_bytes = 0  # of all gradients that there are, were they on the device

    def entry(self, tensor: ManagedTensor) -> StatefulTensor:
        """What is counted for its gradient; from now on, that there is one at home."""
        entry = self._entries.get(tensor.index)
        if entry is None:
            entry = self._entries[tensor.index] = self._new_entry(tensor)
            entry.place(Tier.HOST, tensor.home.numel() * tensor.home.element_size())
            self.whole_bytes += tensor.device_nbytes
        return entry

    def on_its_way(self, tensor: ManagedTensor) -> StatefulTensor:
        """An entry for one that is on the device for the time of its copy."""
        entry = self.entry(tensor)
        if entry.nbytes(Tier.DEVICE):  # a second gradient of one parameter before the first has left
            entry = self._new_entry(tensor)
        entry.place(Tier.DEVICE, tensor.device_nbytes)
        return entry

    def forget(self, tensor: ManagedTensor) -> None:
        """It has no gradient any more."""
        entry = self._entries.pop(tensor.index, None)
        if entry is not None:
            entry.place(Tier.HOST, 0)
            self.whole_bytes -= tensor.device_nbytes

    def host_tensor(self, tensor: ManagedTensor, gradient: torch.Tensor) -> torch.Tensor:
        """Memory for ``gradient`` at home, in home's type."""
        size, stride, dtype = tuple(gradient.size()), tuple(gradient.stride()), tensor.home.dtype
        slot = tensor.gradient_slot
        if slot is None and gradient.numel():
            fresh = self._arena.empty_strided(size, stride, dtype)
            tensor.gradient_slot = slot = fresh.untyped_storage()
            del fresh
        # The slot is ours alone unless an older gradient still lives in it: one of several micro-batches, or one
        # that the user kept.
        if slot is None or torch._C._storage_Use_Count(slot._cdata) > 1:
            return torch.empty_strided(size, stride, dtype=dtype, device="cpu")
        return torch.empty(0, dtype=dtype, device="cpu").set_(slot, 0, size, stride)

    def is_slot_of(self, tensor: ManagedTensor, gradient: torch.Tensor) -> bool:
        """``gradient`` lies in its slot: what was at home is set again (``p.grad /= 2``), or returned and then set."""
        slot = tensor.gradient_slot
        return slot is not None and slot._cdata == gradient.untyped_storage()._cdata

    def _new_entry(self, tensor: ManagedTensor) -> StatefulTensor:
        return StatefulTensor(self._ledger, Kind.GRADIENT, f"{tensor.name}.grad")


def owns_memory(gradient: torch.Tensor, *, is_shared: bool) -> bool:
    """It can be kept as it is: nobody else holds it (``is_shared``), and it is no view of more, nor expanded."""
    return not is_shared and fills_memory(gradient)


def content_nbytes(gradient: torch.Tensor) -> int:
    """Of what is copied when it moves; of compressed sparse layouts, of the values alone."""
    if gradient.layout is torch.strided:
        return gradient.nbytes
    if gradient.layout is torch.sparse_coo:
        return gradient._indices().nbytes + gradient._values().nbytes
    return gradient.values().nbytes


def as_home(gradient: torch.Tensor, home: torch.Tensor) -> torch.Tensor:
    """Same values in the memory layout that autograd wants ``p.grad`` to have."""
    if gradient.stride() == home.stride() and not gradient.is_conj() and not gradient.is_neg():
        return gradient
    return torch.empty_like(home, dtype=gradient.dtype, device=gradient.device).copy_(gradient)
