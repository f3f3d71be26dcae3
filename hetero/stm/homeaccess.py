"""What is done with homes, by the user, by torch and by optimizers' steps.

Owns how a look at a home and a write to it meet what is still being done with it: an update that is queued or being
tried, copies that read it, a copy that has been written and not yet come back. Invariant: nobody can tell that these
were under way, except by the clock.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from hetero.autograd import outside_inference
from hetero.devices import CopyEngine
from hetero.msc import MemStatsCollector
from hetero.stm.copies.residency import Residency
from hetero.stm.deferred import Update, UpdateQueue
from hetero.stm.gradients.changes import Change
from hetero.stm.gradients.offload import Gradients
from hetero.stm.tensors.fetch import plain
from hetero.stm.tensors.inference import make_inference, ordinary_alias
from hetero.stm.tensors.managed import ManagedTensor

__all__ = ["Arrivals", "HomeAccess"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """What has to happen before a parameter's update may run: its gradient down and changed, copies of its home up."""

    gradient: torch.Event | None
    changes: tuple[Change, ...]
    uploads: tuple[torch.Event, ...]


class HomeAccess:
    """To the homes of one manager's parameters. ``check_process``: raises where homes may not be written."""

    def __init__(
        self,
        tensors: Sequence[ManagedTensor],
        residency: Residency,
        gradients: Gradients,
        updates: UpdateQueue,
        engine: CopyEngine,
        collector: MemStatsCollector,
        *,
        lock: threading.RLock,
        check_process: Callable[[], None],
    ) -> None:
        self._tensors = tensors
        self._residency = residency
        self._gradients = gradients
        self._updates = updates
        self._engine = engine
        self._collector = collector
        self._lock = lock
        self._check_process = check_process

    # -- by the user and by torch (`hetero.stm.tensors.owner.HomeOwner`) ------------------------------------

    def wait(self, tensor: ManagedTensor) -> None:
        """Return once home is what the last ``optimizer.step()`` made of it. Raises what failed in the queue."""
        if tensor.pending is not None or tensor.is_dirty or self._updates.has_failed:
            with self._lock, plain():
                self._residency.settle(tensor)

    def wait_all(self) -> None:
        """As `wait`, for every parameter."""
        with self._lock, plain():
            for tensor in self._tensors:
                self._residency.settle(tensor)

    def before_write(self, tensor: ManagedTensor) -> None:
        """It is about to be written: it is what the last step made of it, and no copy may still be reading it."""
        with self._lock:
            self._residency.before_host_write(tensor)

    def give_out(self, tensor: ManagedTensor) -> None:
        """Somebody is about to get its memory, and may write there unseen."""
        self.before_write(tensor)
        tensor.clock.note_given_out()

    def note_given_back(self, tensor: ManagedTensor) -> None:
        """Who was given its memory last has only read it, and is about to let go of it."""
        tensor.clock.note_given_back()

    def follow_unknown_writes(self, tensor: ManagedTensor) -> None:
        """Its copy is about to be used outside a forward and a backward, whose beginnings see to it themselves."""
        if tensor.clock.may_be_written_unseen:
            with self._lock, plain():
                self._residency.follow_unknown_writes([tensor])

    def after_write(self, tensor: ManagedTensor) -> None:
        """It has been: a copy that somebody else holds follows."""
        if tensor.is_stale:
            with self._lock, plain():
                if tensor.is_stale and tensor.is_held():
                    self._residency.follow_home(tensor)

    def write_back(self, tensor: ManagedTensor) -> None:
        """The device copy was written outside a forward."""
        with self._lock:
            self._collector.count_eviction(0, self._residency.write_back(tensor))

    def rebind(self, tensor: ManagedTensor, data: torch.Tensor, *, is_inference: bool) -> None:
        """``p.data`` was set: that is home now. ``is_inference``: to an inference tensor."""
        with self._lock:
            self._check_process()
            if not tensor.stays:  # what was written to it was written to what is replaced
                self._residency.discard(tensor)
            self._residency.before_host_write(tensor)
            self._residency.discard(tensor)
            with outside_inference():
                data = ordinary_alias(data) if data.is_inference() else data
                tensor.parameter.data = data
                if is_inference:
                    make_inference(tensor.parameter)
                tensor.bind_home()
            tensor.clock.watch(data)

    # -- by the optimizer's step (`hetero.stm.step.hoststep`) -----------------------------------------------

    def before_writes(self, tensors: Sequence[ManagedTensor]) -> None:
        """These are about to be written: their gradients have arrived, copies have been read."""
        with self._lock:
            uploads = self._residency.uploads.take(tensors)
            for tensor in tensors:
                self._gradients.wait(tensor)
                self._engine.host_after_uploads(uploads.get(tensor.index, ()), tensor.home)

    def begin_writes_later(self, tensors: Sequence[ManagedTensor]) -> dict[int, Arrivals]:
        """The same without waiting: what to wait for, by index. Followed by `await_updates`."""
        with self._lock:
            uploads = self._residency.uploads.take(tensors)
            arrivals = {}
            for tensor in tensors:
                gradient, changes = self._gradients.take_arrival(tensor)
                arrivals[tensor.index] = Arrivals(
                    gradient=gradient, changes=changes, uploads=tuple(uploads.get(tensor.index, ()))
                )
            return arrivals

    def await_updates(self, updates: Sequence[tuple[ManagedTensor, Update]]) -> None:
        """From now on, whoever uses one of these parameters waits for its update. Queues them."""
        with self._lock:
            for tensor, update in updates:
                self._residency.orders.await_update(tensor, update)
            self._updates.submit([update for _, update in updates])

    def finish_updates(self) -> None:
        """Nothing is queued afterwards, except what is being tried. Raises what failed in the queue."""
        with self._lock:
            self._residency.orders.finish_updates(self._tensors)

    def roll_back(self, tensors: Sequence[ManagedTensor] | None = None) -> None:
        """As if no update, or none of those of ``tensors``, had been tried."""
        with self._lock:
            for tensor in self._tensors if tensors is None else tensors:
                if tensor.is_tried:
                    self._residency.orders.roll_back(tensor)

    # -- at the end, and before a fork ------------------------------------------------------------------

    def end_updates(self) -> None:
        """Nothing is queued or tried afterwards. Raises nothing: an update's error waits."""
        with self._lock:
            self.roll_back()
            self._updates.finish_all()
            for tensor in self._tensors:
                if tensor.pending is not None and tensor.pending.done:
                    self._residency.orders.collect(tensor)
