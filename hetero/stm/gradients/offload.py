"""Gradients on their way home.

Owns what happens between the moment autograd has a parameter's gradient on the device and the moment somebody looks at
``p.grad`` on the host. Invariant: whoever reads a gradient on the host has waited for its copy, and device memory of a
gradient is reused only after its copy. Those that stay are `hetero.stm.gradients.kept`'s, what is added to those that
are there `hetero.stm.gradients.additions`'.

[Note: unread gradients]
The fetch node hands autograd a host tensor whose content is still being copied. ``AccumulateGrad`` takes such
a tensor over as ``p.grad`` without reading it only if ``p.grad`` is None, nothing else contributes to it, and
no tensor hook wants to see it; otherwise it is waited for first (`_is_read_at_once`). Later readers come through
``p.grad``, which waits. Our side keeps the memory, never the tensor: a second reference to the tensor would make
autograd clone it, which is a read.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hetero.devices import CopyEngine, HostArena
from hetero.eviction import OnTheirWay
from hetero.msc import MemStatsCollector
from hetero.stm.gradients.additions import Additions, can_be_added
from hetero.stm.gradients.changes import Change, Changes
from hetero.stm.gradients.kept import KeptGradients, has_gradient
from hetero.stm.gradients.memory import GradientMemory, as_home, content_nbytes
from hetero.stm.gradients.norms import GradientNorms
from hetero.stm.tensors.exposure import gradient_is_plain, gradient_is_private
from hetero.stm.tensors.fetch import plain
from hetero.stm.tensors.managed import ManagedTensor
from hetero.stm.tensors.precision import Upcast, expands, landing_place
from hetero.stm.tensors.state import Ledger, StatefulTensor, Tier

__all__ = ["Gradients"]


@dataclass(slots=True)
class _Download:
    source: torch.Tensor
    event: torch.Event
    entry: StatefulTensor


class Gradients:
    """The gradients of one manager's parameters."""

    def __init__(
        self,
        engine: CopyEngine,
        arena: HostArena,
        ledger: Ledger,
        meter: MemStatsCollector,
        additions: Additions,
    ) -> None:
        self._engine = engine
        self._meter = meter
        self._memory = GradientMemory(arena, ledger)
        self._downloads: deque[_Download] = deque()
        self._in_flight_bytes = 0
        self._ready: dict[int, torch.Event] = {}
        self._upcasts: dict[int, Upcast] = {}  # of gradients that come down in low precision
        self.additions = additions
        self.changes = Changes(engine, arena)
        self.norms = GradientNorms(engine.accelerator)
        self.kept = KeptGradients(engine, self._memory, self.changes, self.norms, meter)
        # Aliases of gradients in memory that is not torch's (NumPy's), so that nobody takes them for private.
        self._foreign: dict[int, torch.Tensor] = {}
        # Gradients with a graph have come home: a backward may go through them.
        self.have_graphs = False
        self._is_measured = True
        # How many bytes may be on their way at once; 0 hands each gradient over before the next operator runs.
        self._in_flight_limit = 0
        # Room for them beside what operators take, bytes: for no more are on their way as an operator begins.
        self._kept_free = 0

    @property
    def room_left(self) -> int:
        """What of the room that is kept free for them they do not take now, bytes."""
        return max(0, self._kept_free - self._in_flight_bytes)

    def follow(self, ways: OnTheirWay | None) -> None:
        """Before an operator: how many may be on their way until the next. None before anything is known: a gradient is
        handed over at once, and what is measured is then the operator's own memory."""
        self._is_measured = ways is None
        if ways is None:
            self._in_flight_limit = self._kept_free = 0
            return
        self._in_flight_limit, self._kept_free = ways.most, ways.begin
        if self._in_flight_bytes > ways.begin:
            self.reclaim(self._in_flight_bytes - ways.begin)

    def do_with_less(self, nbytes: int) -> None:
        """So much of the room that was planned for them is not there."""
        self._in_flight_limit = max(0, self._in_flight_limit - nbytes)
        self._kept_free = max(0, self._kept_free - nbytes)

    def hand_over(
        self, tensor: ManagedTensor, gradient: torch.Tensor, *, is_shared: bool = False
    ) -> torch.Tensor | None:
        """``gradient`` on the host, perhaps still being copied ([Note: unread gradients]), perhaps never
        (`hetero.stm.gradients.kept`); None if it has been added to ``p.grad`` already, or will be before anybody reads
        that.

        ``is_shared``: somebody else holds it as well, and may write to it afterwards."""
        home = tensor.home
        self.norms.forget(tensor.index)
        if not has_gradient(tensor):
            self.kept.forget(tensor)  # of a backward that failed before autograd took it over
        if torch.is_grad_enabled() or gradient.layout is not torch.strided:
            self.have_graphs = self.have_graphs or torch.is_grad_enabled()
            # Double backward differentiates through the move; sparse gradients have no flat memory to copy.
            self.wait(tensor)  # autograd adds to what may be on its way
            return self._move_at_once(gradient, home)
        own = as_home(gradient, home)
        is_shared = is_shared and own is gradient
        gradient = own
        if self.changes.is_to_be_zero(tensor.index) and self._arrives(tensor):
            self.wait(tensor)  # else that would be taken for what is kept
        if self.kept.takes(tensor) and not self._is_seen(tensor):
            taken = self.kept.keep(tensor, gradient, is_shared=is_shared)
            if tensor in self.kept:
                return taken
        if tensor in self.kept:  # it went home before autograd had taken this over, or somebody looks now
            self.wait(tensor)
        if self._can_add_later(tensor, gradient) and self._add_later(tensor, gradient, is_shared=is_shared):
            return None
        if gradient.dtype is not home.dtype and not expands(gradient, home.dtype):
            self.wait(tensor)
            return self._move_at_once(gradient, home)
        host = self._memory.host_tensor(tensor, gradient)
        place = host if gradient.dtype is home.dtype else landing_place(host, gradient.dtype)
        event = self._engine.download(gradient, place)
        self._note_download(tensor, gradient, event, is_shared=is_shared)
        # Before its norm is taken: there is room for that beside no more than may be on their way.
        self.reclaim(self._in_flight_bytes - self._in_flight_limit)
        if place is not host:
            self._upcast_later(tensor, gradient, host, event)
        elif self._is_read_at_once(tensor):
            self.wait(tensor)
            self._engine.host_after_download(event, host)
        else:
            self.norms.take(tensor.index, gradient)
            self._ready[tensor.index] = event
        return host

    def wait(self, tensor: ManagedTensor) -> None:
        """Return once the gradient handed over last can be read on the host."""
        with plain():  # else looking at ``p.grad`` would come here again, and do all of it in the middle
            self._wait(tensor)

    def unread_arrival(self, tensor: ManagedTensor) -> torch.Event | None:
        """When the gradient handed over last arrives, if nobody has read it and nothing is left to be done to it."""
        if tensor.index in self._upcasts or self.changes.has_any(tensor.index):
            return None
        return self._ready.get(tensor.index)

    def take_arrival(self, tensor: ManagedTensor) -> tuple[torch.Event | None, tuple[Change, ...]]:
        """What `wait` would wait for, and what it would do. The caller does, before the gradient is read."""
        if self.is_kept(tensor):  # the parameter went home before autograd had taken this over
            with plain():
                self.kept.bring_home(tensor)
        changes = self.changes.take(tensor.index)
        upcast = self._upcasts.pop(tensor.index, None)
        return self._ready.pop(tensor.index, None), changes if upcast is None else (upcast, *changes)

    @property
    def whole_bytes(self) -> int:
        """Of all gradients that there are, were they on the device."""
        return self._memory.whole_bytes

    def is_kept(self, tensor: ManagedTensor) -> bool:
        """It is on the device (`hetero.stm.gradients.kept`)."""
        return tensor in self.kept and has_gradient(tensor)

    def on_device(self, tensor: ManagedTensor) -> torch.Tensor:
        """Its gradient on the device, complete: the kept one, or a copy. The caller does not write to it."""
        kept = self.kept.look(tensor)
        if kept is not None:
            return kept
        self.wait(tensor)
        gradient = tensor.parameter.grad
        assert gradient is not None
        self._meter.count_fetch(gradient.nbytes)
        return gradient.to(self._engine.accelerator.device)

    def own(self, tensor: ManagedTensor) -> torch.Tensor:
        """As `on_device`, for whoever writes to it: it is ``p.grad`` from now on, and nobody else's memory."""
        self.kept.adopt(tensor, self.give(tensor))
        return self.on_device(tensor)

    def on_device_nbytes(self, tensor: ManagedTensor) -> int:
        """What `on_device` allocates."""
        return self.kept.look_nbytes(tensor) if tensor in self.kept else tensor.full_nbytes

    def give(self, tensor: ManagedTensor) -> torch.Tensor:
        """Take ``p.grad`` away; returns it on the device, complete, in memory of its own."""
        gradient = self.on_device(tensor)
        if self.kept.is_shared(tensor):
            gradient = gradient.clone()
        self.forget(tensor)
        tensor.parameter.grad = None
        return gradient

    def _arrives(self, tensor: ManagedTensor) -> bool:
        return tensor not in self.kept and (tensor.index in self._ready or tensor.index in self._upcasts)

    def wait_arrivals(self, tensors: Sequence[ManagedTensor]) -> None:
        """As `wait`, for every gradient that is on its way home."""
        for index in {*self._ready, *self._upcasts}:
            self.wait(tensors[index])

    def wait_all(self, tensors: Sequence[ManagedTensor]) -> None:
        """The same, and those that are on the device, or have changes left to be made, come home."""
        for index in {*self._ready, *self._upcasts} | self.changes.indices() | self.kept.indices():
            self.wait(tensors[index])

    def reclaim(self, nbytes: int) -> None:
        """Give back at least ``nbytes`` of the device memory of gradients on their way, if there are as many.

        Copies that have finished are given back in any case.
        """
        self.changes.reclaim(waits=nbytes > 0)
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
        self.changes.drop(tensor.index)
        self.kept.forget(tensor)
        self._memory.forget(tensor)
        self._foreign.pop(tensor.index, None)

    def note_given(self, tensor: ManagedTensor, gradient: object) -> None:
        """``gradient``, of the user's, becomes ``p.grad``."""
        if not (isinstance(gradient, torch.Tensor) and gradient_is_plain(gradient)):
            return
        # Whoever has the array reads it without asking us, and is not counted among those who hold it.
        if not (gradient.untyped_storage().resizable() or self._memory.is_slot_of(tensor, gradient)):
            self._foreign[tensor.index] = gradient.detach()

    def _move_at_once(self, gradient: torch.Tensor, home: torch.Tensor) -> torch.Tensor:
        """``gradient`` on the host, as torch copies it."""
        self._meter.count_eviction(0, content_nbytes(gradient))
        return gradient.to(home.device).to(home.dtype)

    def _wait(self, tensor: ManagedTensor) -> None:
        # With no ``p.grad`` autograd has not taken it over yet: there is nothing to be read.
        if self.is_kept(tensor):
            self.kept.bring_home(tensor)
        event = self._ready.pop(tensor.index, None)
        if event is not None:
            self._engine.host_after_download(event, tensor.parameter.grad)
        if self._upcasts and (upcast := self._upcasts.pop(tensor.index, None)) is not None:
            upcast.apply(self._engine)
        for change in self.changes.take(tensor.index):
            assert tensor.parameter.grad is not None
            change.apply(self._engine, tensor.parameter.grad)

    def _upcast_later(
        self, tensor: ManagedTensor, gradient: torch.Tensor, host: torch.Tensor, event: torch.Event
    ) -> None:
        """``gradient`` comes down into the end of ``host``'s memory, and is cast when it is waited for."""
        upcast = Upcast(event, host.untyped_storage(), gradient.dtype, host.dtype, gradient.numel())
        self._rehearse_norm(tensor, gradient, host.dtype)
        if self._is_read_at_once(tensor):
            self.wait(tensor)
            upcast.apply(self._engine)
        else:
            self.norms.take(tensor.index, gradient, host.dtype)
            self._upcasts[tensor.index] = upcast

    def _rehearse_norm(self, tensor: ManagedTensor, gradient: torch.Tensor, cast: torch.dtype) -> None:
        if self._is_measured:  # a CPU's kernels cast all of it first
            self.norms.rehearse(tensor.index, gradient, cast)

    def _note_download(
        self, tensor: ManagedTensor, gradient: torch.Tensor, event: torch.Event, *, is_shared: bool
    ) -> None:
        """``gradient`` is on its way down, until ``event``."""
        if is_shared:  # they write on the compute stream
            self._engine.free_after_download(event)
        self._meter.count_eviction(0, gradient.nbytes)
        self._downloads.append(_Download(gradient, event, self._memory.on_its_way(tensor)))
        self._in_flight_bytes += tensor.device_nbytes

    def _can_add_later(self, tensor: ManagedTensor, gradient: torch.Tensor) -> bool:
        """``gradient`` can be added to ``p.grad`` at home once it has come down ([Note: not by autograd])."""
        parameter = tensor.parameter
        target = parameter.grad
        if target is None or not self.kept.keeps or parameter._post_accumulate_grad_hooks:
            return False
        fits = (
            gradient_is_plain(target)
            and can_be_added(gradient, target)
            and not self.changes.has_wishes(tensor.index)
        )
        del target  # or it would be counted
        return fits and gradient_is_private(parameter) and not self._is_seen(tensor)

    def _add_later(self, tensor: ManagedTensor, gradient: torch.Tensor, *, is_shared: bool) -> bool:
        """Do so; False if there is no memory for it."""
        target = tensor.parameter.grad
        assert target is not None
        if gradient.dtype is not target.dtype:  # another time, such a batch may be the first of its iteration
            self._rehearse_norm(tensor, gradient, target.dtype)
        begun = self.additions.begin(target, gradient, self._upcasts.get(tensor.index))
        if begun is None:
            return False
        addition, event = begun
        self._upcasts.pop(tensor.index, None)
        self.changes.ask(tensor.index, addition)
        self._note_download(tensor, gradient, event, is_shared=is_shared)
        self.reclaim(self._in_flight_bytes - self._in_flight_limit)
        return True

    def _is_read_at_once(self, tensor: ManagedTensor) -> bool:
        return tensor.parameter.grad is not None or self._is_seen(tensor)

    def _is_seen(self, tensor: ManagedTensor) -> bool:
        """By somebody besides AccumulateGrad, or by that, where it is to cast it."""
        return (
            bool(tensor.parameter._backward_hooks)
            or not tensor.paths.is_single()
            or torch.is_anomaly_enabled()
            or getattr(tensor.parameter, "grad_dtype", None) not in (None, tensor.home.dtype)
        )
