"""Gradients on their way home.

Owns what happens between the moment autograd has a parameter's gradient on the device and the moment somebody
looks at ``p.grad`` on the host. Invariant: whoever reads a gradient on the host has waited for its copy, and
device memory of a gradient is reused only after its copy.

[Note: unread gradients]
The fetch node hands autograd a host tensor whose content is still being copied. ``AccumulateGrad`` takes such
a tensor over as ``p.grad`` without reading it only if ``p.grad`` is None, nothing else contributes to it, and
no tensor hook wants to see it; otherwise it is waited for first (`_is_read_at_once`). Later readers come through
``p.grad``, which waits. Our side keeps the memory, never the tensor: a second reference to the tensor would make
autograd clone it, which is a read.
"""

from collections import deque
from dataclasses import dataclass

import torch

from hetero.devices import CopyEngine, HostArena
from hetero.stm.residency import TransferMeter
from hetero.stm.state import Kind, Ledger, StatefulTensor, Tier
from hetero.stm.tensors import ManagedTensor

__all__ = ["Gradients"]


@dataclass(slots=True)
class _Download:
    source: torch.Tensor
    event: torch.Event
    entry: StatefulTensor


class Gradients:
    """The gradients of one manager's parameters."""

    def __init__(self, engine: CopyEngine, arena: HostArena, ledger: Ledger, meter: TransferMeter) -> None:
        self._engine = engine
        self._arena = arena
        self._ledger = ledger
        self._meter = meter
        self._downloads: deque[_Download] = deque()
        self._in_flight_bytes = 0
        self._ready: dict[int, torch.Event] = {}
        self._entries: dict[int, StatefulTensor] = {}
        # How many bytes may be on their way at once; 0 hands each gradient over before the next operator runs.
        self.in_flight_limit = 0

    def hand_over(self, tensor: ManagedTensor, gradient: torch.Tensor) -> torch.Tensor:
        """``gradient`` on the host, perhaps still being copied ([Note: unread gradients])."""
        home = tensor.home
        if torch.is_grad_enabled() or gradient.layout is not torch.strided:
            # Double backward differentiates through the move; sparse gradients have no flat memory to copy.
            return gradient.to(home.device)
        gradient = self._as_home(gradient, home)
        host = self._host_tensor(tensor, gradient)
        event = self._engine.download(gradient, host)
        self._meter.count_eviction(0, gradient.nbytes)
        self._track(tensor, gradient, event)
        if self._is_read_at_once(tensor):
            self.wait(tensor)
            self._engine.host_after_download(event, host)
        else:
            self._ready[tensor.index] = event
        self.reclaim(self._in_flight_bytes - self.in_flight_limit)
        return host

    def wait(self, tensor: ManagedTensor) -> None:
        """Return once the gradient handed over last can be read on the host."""
        event = self._ready.pop(tensor.index, None)
        if event is not None:
            self._engine.host_after_download(event, tensor.parameter.grad)

    def take_arrival(self, tensor: ManagedTensor) -> torch.Event | None:
        """What `wait` would wait for. The caller does, before the gradient is read."""
        return self._ready.pop(tensor.index, None)

    def wait_all(self, tensors: list[ManagedTensor]) -> None:
        """As `wait`, for every gradient that is on its way."""
        for index in list(self._ready):
            self.wait(tensors[index])

    def reclaim(self, nbytes: int) -> None:
        """Give back at least ``nbytes`` of the device memory of gradients on their way, if there are as many.

        Copies that have finished are given back in any case.
        """
        while self._downloads and (nbytes > 0 or self._downloads[0].event.query()):
            download = self._downloads.popleft()
            self._engine.free_after_download(download.event)
            freed = download.entry.nbytes(Tier.DEVICE)
            download.entry.place(Tier.DEVICE, 0)
            self._in_flight_bytes -= freed
            nbytes -= freed

    def forget(self, tensor: ManagedTensor) -> None:
        """``p.grad`` was set: what the ledger counted for the old gradient is void."""
        entry = self._entries.pop(tensor.index, None)
        if entry is not None:
            entry.place(Tier.HOST, 0)

    # -- helpers --------------------------------------------------------------------------------------

    def _track(self, tensor: ManagedTensor, gradient: torch.Tensor, event: torch.Event) -> None:
        entry = self._entries.get(tensor.index)
        if entry is None:
            entry = StatefulTensor(self._ledger, Kind.GRADIENT, f"{tensor.name}.grad")
            entry.place(Tier.HOST, gradient.nbytes)
            self._entries[tensor.index] = entry
        if entry.nbytes(Tier.DEVICE):  # a second gradient of one parameter before the first has left
            entry = StatefulTensor(self._ledger, Kind.GRADIENT, f"{tensor.name}.grad")
        entry.place(Tier.DEVICE, tensor.device_nbytes)
        self._in_flight_bytes += tensor.device_nbytes
        self._downloads.append(_Download(gradient, event, entry))

    def _as_home(self, gradient: torch.Tensor, home: torch.Tensor) -> torch.Tensor:
        """Same values in the memory layout that autograd wants ``p.grad`` to have."""
        if gradient.stride() == home.stride() and not gradient.is_conj() and not gradient.is_neg():
            return gradient
        return torch.empty_like(home, device=gradient.device).copy_(gradient)

    def _host_tensor(self, tensor: ManagedTensor, gradient: torch.Tensor) -> torch.Tensor:
        size, stride = tuple(gradient.size()), tuple(gradient.stride())
        slot = tensor.gradient_slot
        if slot is None and gradient.numel():
            fresh = self._arena.empty_strided(size, stride, gradient.dtype)
            tensor.gradient_slot = slot = fresh.untyped_storage()
            del fresh
        # The slot is ours alone unless an older gradient still lives in it: one of several micro-batches, or one
        # that the user kept.
        if slot is None or torch._C._storage_Use_Count(slot._cdata) > 1:
            return torch.empty_strided(size, stride, dtype=gradient.dtype)
        return torch.empty(0, dtype=gradient.dtype).set_(slot, 0, size, stride)

    def _is_read_at_once(self, tensor: ManagedTensor) -> bool:
        parameter = tensor.parameter
        return (
            parameter.grad is not None
            or bool(parameter._backward_hooks)
            or not tensor.has_single_path()
            or torch.is_anomaly_enabled()
        )
