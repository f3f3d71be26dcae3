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

[Note: kept gradients]
The gradient of a parameter that lives on the device stays there. Autograd, which insists on one at home, is given
memory of which nothing is written until somebody looks at ``p.grad``; what later micro-batches contribute is added on
the device, and autograd is told that there is none.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hetero.devices import CopyEngine, HostArena
from hetero.stm.exposure import gradient_is_private
from hetero.stm.fetch import plain
from hetero.stm.norms import GradientNorms
from hetero.stm.precision import Upcast, expands, landing_place
from hetero.stm.state import Kind, Ledger, StatefulTensor, Tier
from hetero.stm.tensors import ManagedTensor
from hetero.stm.uploads import TransferMeter

__all__ = ["Factor", "Gradients"]


@dataclass(slots=True)
class _Download:
    source: torch.Tensor
    event: torch.Event
    entry: StatefulTensor


@dataclass(slots=True)
class _Kept:
    """``is_ours``: nobody else can hold this tensor."""

    gradient: torch.Tensor
    is_ours: bool = False


@dataclass(frozen=True, slots=True)
class Factor:
    """A number on its way to the host, by which gradients are to be multiplied. ``source``: the same, where it was."""

    value: torch.Tensor
    arrival: torch.Event | None
    source: torch.Tensor

    def apply(self, engine: CopyEngine, gradient: torch.Tensor) -> None:
        """Multiply. ``gradient`` has arrived."""
        if self.arrival is not None:
            engine.host_after_download(self.arrival, self.value)
        with torch.no_grad():
            gradient.mul_(self.value)


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
        self._factors: dict[int, list[Factor]] = {}
        self._upcasts: dict[int, Upcast] = {}  # of gradients that come down in low precision
        # [Note: kept gradients]. False where nothing else tells apart what autograd returns from ``p.grad``.
        self._kept: dict[int, _Kept] = {}
        self.keeps = False
        self._numbers: deque[tuple[torch.Tensor, torch.Event]] = deque()
        self._number_slots: list[torch.UntypedStorage] = []
        self.norms = GradientNorms(engine.accelerator.device)
        # How many bytes may be on their way at once; 0 hands each gradient over before the next operator runs.
        self.in_flight_limit = 0

    @property
    def room_left(self) -> int:
        """What more of them may be on their way at once, bytes."""
        return max(0, self.in_flight_limit - self._in_flight_bytes)

    @property
    def in_flight_bytes(self) -> int:
        """On their way down now, on the device."""
        return self._in_flight_bytes

    def hand_over(
        self, tensor: ManagedTensor, gradient: torch.Tensor, *, is_shared: bool = False
    ) -> torch.Tensor | None:
        """``gradient`` on the host, perhaps still being copied ([Note: unread gradients]), perhaps never
        ([Note: kept gradients]); None if it has been added to ``p.grad`` already.

        ``is_shared``: somebody else holds it as well, and may write to it afterwards."""
        home = tensor.home
        self.norms.forget(tensor.index)
        if not _has_gradient(tensor):
            self.forget_kept(tensor)  # of a backward that failed before autograd took it over
        if torch.is_grad_enabled() or gradient.layout is not torch.strided:
            # Double backward differentiates through the move; sparse gradients have no flat memory to copy.
            self.wait(tensor)  # autograd adds to what may be on its way
            return gradient.to(home.device).to(home.dtype)
        own = self._as_home(gradient, home)
        is_shared = is_shared and own is gradient
        gradient = own
        if self._is_kept(tensor):
            return self._keep(tensor, gradient, is_shared=is_shared)
        if gradient.dtype is not home.dtype and not expands(gradient, home.dtype):
            self.wait(tensor)
            return gradient.to(home.device).to(home.dtype)
        host = self._host_tensor(tensor, gradient)
        place = host if gradient.dtype is home.dtype else landing_place(host, gradient.dtype)
        event = self._engine.download(gradient, place)
        if is_shared:  # they write on the compute stream
            self._engine.free_after_download(event)
        self._meter.count_eviction(0, gradient.nbytes)
        self._track(tensor, gradient, event)
        if place is not host:
            self._upcast_later(tensor, gradient, host, event)
        elif self._is_read_at_once(tensor):
            self.wait(tensor)
            self._engine.host_after_download(event, host)
        else:
            self.norms.take(tensor.index, gradient)
            self._ready[tensor.index] = event
        self.reclaim(self._in_flight_bytes - self.in_flight_limit)
        return host

    def wait(self, tensor: ManagedTensor) -> None:
        """Return once the gradient handed over last can be read on the host."""
        # With no ``p.grad`` autograd has not taken it over yet: there is nothing to be read.
        if tensor.index in self._kept and _has_gradient(tensor):
            self._bring_home(tensor, self._kept.pop(tensor.index))
        event = self._ready.pop(tensor.index, None)
        if event is not None:
            self._engine.host_after_download(event, tensor.parameter.grad)
        if self._upcasts and (upcast := self._upcasts.pop(tensor.index, None)) is not None:
            upcast.apply(self._engine)
        for factor in self._factors.pop(tensor.index, ()):
            assert tensor.parameter.grad is not None
            factor.apply(self._engine, tensor.parameter.grad)

    def unread_arrival(self, tensor: ManagedTensor) -> torch.Event | None:
        """When the gradient handed over last arrives, if nobody has read it and nothing but a factor may be left to be
        done to it."""
        return None if tensor.index in self._upcasts else self._ready.get(tensor.index)

    def take_arrival(self, tensor: ManagedTensor) -> tuple[torch.Event | None, tuple[Factor | Upcast, ...]]:
        """What `wait` would wait for, cast and multiply by. The caller does, before the gradient is read."""
        factors: tuple[Factor | Upcast, ...] = tuple(self._factors.pop(tensor.index, ()))
        upcast = self._upcasts.pop(tensor.index, None)
        return self._ready.pop(tensor.index, None), factors if upcast is None else (upcast, *factors)

    def on_device(self, tensor: ManagedTensor) -> torch.Tensor:
        """Its gradient on the device, scaled: the kept one, or a copy. The caller does not write to it."""
        kept = self._kept.get(tensor.index)
        if kept is not None:
            self._scale_kept(tensor, kept)
            return kept.gradient
        self.wait(tensor)
        gradient = tensor.parameter.grad
        assert gradient is not None
        return gradient.to(self._engine.accelerator.device)

    def give(self, tensor: ManagedTensor) -> torch.Tensor:
        """Take ``p.grad`` away; returns it on the device, complete, in memory of its own."""
        gradient = self.on_device(tensor)
        kept = self._kept.get(tensor.index)
        if kept is not None and not kept.is_ours:
            gradient = gradient.clone()
        self.forget(tensor)
        tensor.parameter.grad = None
        return gradient

    def adopt(self, tensor: ManagedTensor, gradient: torch.Tensor) -> None:
        """``gradient``, on the device and held by nobody else, is to be ``p.grad``."""
        home = tensor.home
        if gradient.layout is not torch.strided or gradient.dtype is not home.dtype:
            tensor.parameter.grad = gradient.to(home.device)
            return
        gradient = self._as_home(gradient.detach(), home)
        self._kept[tensor.index] = _Kept(gradient, is_ours=True)
        self._entry(tensor, gradient).place(Tier.DEVICE, tensor.device_nbytes)
        tensor.parameter.grad = self._host_tensor(tensor, gradient)

    def make_factor(self, value: torch.Tensor) -> Factor:
        """Send ``value``, a number on the device or the host, home."""
        if value.device.type == "cpu":
            copy = value.detach().clone()
            return Factor(copy, None, copy)
        host = self._host_number(value.dtype)
        event = self._engine.download(value, host)
        self._numbers.append((value, event))
        return Factor(host, event, value)

    def _host_number(self, dtype: torch.dtype) -> torch.Tensor:
        """Pinned memory for one number that nobody uses any more."""
        for slot in self._number_slots:
            if torch._C._storage_Use_Count(slot._cdata) == 1 and slot.nbytes() == dtype.itemsize:
                return torch.empty(0, dtype=dtype).set_(slot, 0, (), ())
        fresh = self._arena.empty_strided((), (), dtype)
        self._number_slots.append(fresh.untyped_storage())
        return fresh

    def scale(self, tensor: ManagedTensor, factor: Factor) -> None:
        """Multiply its gradient by ``factor`` before anybody sees it."""
        self._factors.setdefault(tensor.index, []).append(factor)

    def wait_all(self, tensors: Sequence[ManagedTensor]) -> None:
        """As `wait`, for every gradient that is on its way."""
        for index in {*self._ready, *self._upcasts, *self._factors, *self._kept}:
            self.wait(tensors[index])

    def reclaim(self, nbytes: int) -> None:
        """Give back at least ``nbytes`` of the device memory of gradients on their way, if there are as many.

        Copies that have finished are given back in any case.
        """
        while self._numbers and (nbytes > 0 or self._numbers[0][1].query()):
            value, event = self._numbers.popleft()
            self._engine.free_after_download(event)
            del value  # not before
        while self._downloads and (nbytes > 0 or self._downloads[0].event.query()):
            download = self._downloads.popleft()
            self._engine.free_after_download(download.event)
            freed = download.entry.nbytes(Tier.DEVICE)
            download.entry.place(Tier.DEVICE, 0)
            self._in_flight_bytes -= freed
            nbytes -= freed

    def forget(self, tensor: ManagedTensor) -> None:
        """``p.grad`` was set: what the ledger counted for the old gradient is void."""
        self.norms.forget(tensor.index)
        self._factors.pop(tensor.index, None)
        self.forget_kept(tensor)
        entry = self._entries.pop(tensor.index, None)
        if entry is not None:
            entry.place(Tier.HOST, 0)

    def forget_kept(self, tensor: ManagedTensor) -> None:
        """Nobody will look at it."""
        if self._kept.pop(tensor.index, None) is not None:
            self._factors.pop(tensor.index, None)
            self._entries[tensor.index].place(Tier.DEVICE, 0)

    # -- kept gradients -------------------------------------------------------------------------------

    def forget_lost(self, tensors: Sequence[ManagedTensor]) -> None:
        """No backward runs: those that autograd has not taken over by now it never will."""
        for index in list(self._kept):
            if not _has_gradient(tensors[index]):
                self.forget_kept(tensors[index])

    def _is_kept(self, tensor: ManagedTensor) -> bool:
        parameter = tensor.parameter
        if (
            not (tensor.stays and self.keeps)
            or parameter._post_accumulate_grad_hooks
            or self._is_seen(tensor)
        ):
            return False
        if parameter.grad is None:
            return True
        return tensor.index in self._kept and gradient_is_private(parameter)

    def _keep(self, tensor: ManagedTensor, gradient: torch.Tensor, *, is_shared: bool) -> torch.Tensor | None:
        kept = self._kept.get(tensor.index)
        if kept is not None:
            self._scale_kept(tensor, kept)
            with torch.no_grad():
                if kept.is_ours:
                    kept.gradient.add_(gradient)
                else:
                    kept.gradient = kept.gradient + gradient
                    kept.is_ours = True
            self.norms.take(tensor.index, kept.gradient)
            return None
        # A view would hold the rest as well.
        if is_shared or gradient.untyped_storage().nbytes() != gradient.nbytes:
            gradient = gradient.clone()
        self._kept[tensor.index] = _Kept(gradient)
        self._entry(tensor, gradient).place(Tier.DEVICE, tensor.device_nbytes)
        self.norms.take(tensor.index, gradient)
        return self._host_tensor(tensor, gradient)

    def _scale_kept(self, tensor: ManagedTensor, kept: "_Kept") -> None:
        with torch.no_grad():
            for factor in self._factors.pop(tensor.index, ()):
                # Not in place at first: autograd may hold it for somebody else as well.
                kept.gradient = (
                    kept.gradient.mul_(factor.source) if kept.is_ours else kept.gradient * factor.source
                )
                kept.is_ours = True

    def _bring_home(self, tensor: ManagedTensor, kept: "_Kept") -> None:
        """Somebody looks at ``p.grad``."""
        self._scale_kept(tensor, kept)
        host = tensor.parameter.grad
        assert host is not None
        event = self._engine.download(kept.gradient, host)
        self._meter.count_eviction(0, kept.gradient.nbytes)
        self._engine.host_after_download(event, host)
        self._engine.free_after_download(event)
        self._entries[tensor.index].place(Tier.DEVICE, 0)

    # -- helpers --------------------------------------------------------------------------------------

    def _track(self, tensor: ManagedTensor, gradient: torch.Tensor, event: torch.Event) -> None:
        entry = self._entry(tensor, gradient)
        if entry.nbytes(Tier.DEVICE):  # a second gradient of one parameter before the first has left
            entry = StatefulTensor(self._ledger, Kind.GRADIENT, f"{tensor.name}.grad")
        entry.place(Tier.DEVICE, tensor.device_nbytes)
        self._in_flight_bytes += tensor.device_nbytes
        self._downloads.append(_Download(gradient, event, entry))

    def _entry(self, tensor: ManagedTensor, gradient: torch.Tensor) -> StatefulTensor:
        entry = self._entries.get(tensor.index)
        if entry is None:
            entry = StatefulTensor(self._ledger, Kind.GRADIENT, f"{tensor.name}.grad")
            entry.place(Tier.HOST, gradient.numel() * tensor.home.element_size())
            self._entries[tensor.index] = entry
        return entry

    def _as_home(self, gradient: torch.Tensor, home: torch.Tensor) -> torch.Tensor:
        """Same values in the memory layout that autograd wants ``p.grad`` to have."""
        if gradient.stride() == home.stride() and not gradient.is_conj() and not gradient.is_neg():
            return gradient
        return torch.empty_like(home, dtype=gradient.dtype, device=gradient.device).copy_(gradient)

    def _upcast_later(
        self, tensor: ManagedTensor, gradient: torch.Tensor, host: torch.Tensor, event: torch.Event
    ) -> None:
        """``gradient`` comes down into the end of ``host``'s memory, and is cast when it is waited for."""
        upcast = Upcast(event, host.untyped_storage(), gradient.dtype, host.dtype, gradient.numel())
        if self._is_read_at_once(tensor):
            self.wait(tensor)
            upcast.apply(self._engine)
        else:
            self.norms.take(tensor.index, gradient, host.dtype)
            self._upcasts[tensor.index] = upcast

    def _host_tensor(self, tensor: ManagedTensor, gradient: torch.Tensor) -> torch.Tensor:
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
            return torch.empty_strided(size, stride, dtype=dtype)
        return torch.empty(0, dtype=dtype).set_(slot, 0, size, stride)

    def _is_read_at_once(self, tensor: ManagedTensor) -> bool:
        return tensor.parameter.grad is not None or self._is_seen(tensor)

    def _is_seen(self, tensor: ManagedTensor) -> bool:
        """By somebody besides AccumulateGrad."""
        return (
            bool(tensor.parameter._backward_hooks)
            or not tensor.has_single_path()
            or torch.is_anomaly_enabled()
        )


def _has_gradient(tensor: ManagedTensor) -> bool:
    with plain():  # asking through dispatch would wait for it
        return tensor.parameter.grad is not None
