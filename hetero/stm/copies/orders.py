"""Updates that homes still wait for, and the copies that are on order behind them.

Owns which parameter waits for which update, and how that ends. Invariant: a copy on order is filled with what its
update makes of home, or is forgotten.

[Note: copies on order]
A parameter whose update is queued (`hetero.stm.deferred`) can be prefetched all the same: memory is taken now, on
the compute stream, and the thread that writes home starts the upload right after. Until that is collected, the
copy is attached but has no event, and nobody may read it: whoever uses it waits for the update first.
"""

from collections.abc import Callable, Iterable

import torch

from hetero.devices import CopyEngine
from hetero.stm.copies.uploads import Uploads
from hetero.stm.deferred import Update, UpdateQueue
from hetero.stm.tensors.managed import ManagedTensor

__all__ = ["Orders"]


class Orders:
    """Of one manager's parameters. ``discard``: forgets a device copy that home overtakes."""

    def __init__(
        self,
        engine: CopyEngine,
        uploads: Uploads,
        updates: UpdateQueue,
        *,
        discard: Callable[[ManagedTensor], None],
    ) -> None:
        self._engine = engine
        self._uploads = uploads
        self._updates = updates
        self._discard = discard
        # Takes back an update that is being tried, or was; `hetero.stm.step.speculation` sets this.
        self.roll_back: Callable[[ManagedTensor], None] = lambda tensor: None

    def await_update(self, tensor: ManagedTensor, update: Update) -> None:
        """Home is about to be written, later, by ``update``: what was copied from it is worthless."""
        if tensor.pending is not update:  # one that was tried has its copy already, or on order
            self._discard(tensor)
        tensor.identity = None
        tensor.pending = update

    def place(self, tensor: ManagedTensor, copy: torch.Tensor) -> bool:
        """Have ``copy`` filled once home is up to date ([Note: copies on order]); False if it is already."""
        update = tensor.pending
        if update is None:
            return False
        # Not the copy itself: whoever writes through that is seen as a user who writes to the parameter.
        destination, engine = copy.data, self._engine
        allocated = engine.mark_compute()

        def upload() -> torch.Event:
            tensor.refresh_low()  # done, unless the update has failed
            return engine.upload(tensor.origin, destination, after=allocated)

        if self._updates.upload_after(update, upload):
            return True
        self.collect(tensor)
        self._uploads.refresh_low(tensor)
        return False

    def withdraw(self, tensor: ManagedTensor) -> None:
        """Nothing is on order for it any more."""
        update = tensor.pending
        if update is None or self._updates.withdraw(update):
            return
        if not update.tentative:
            self.finish(tensor)
        elif update.arrival is not None:  # what was on order is on its way
            self._uploads.note(update.arrival, tensor)
            if tensor.data is not None:
                tensor.ready = update.arrival
            update.arrival = None

    def finish(self, tensor: ManagedTensor) -> None:
        """Wait for its update, or take it back if it is being tried."""
        assert tensor.pending is not None
        if tensor.is_tried:
            self.roll_back(tensor)
            return
        self._updates.finish(tensor.pending)
        self.collect(tensor)

    def finish_update(self, tensor: ManagedTensor) -> None:
        """Home is what its update made of it, if it had one; the copy on order, if any, is on its way. One whose
        parameter lives on the device may stay behind that.

        Raises what failed in the queue, whichever parameter's update it was.
        """
        if tensor.pending is not None:
            self.finish(tensor)
        self._updates.raise_error()

    def finish_updates(self, tensors: Iterable[ManagedTensor]) -> None:
        """As `finish_update`, for all of ``tensors``, except that what is being tried may go on."""
        for tensor in tensors:
            if tensor.pending is not None and not tensor.is_tried:
                self.finish(tensor)
        self._updates.raise_error()

    def collect(self, tensor: ManagedTensor) -> None:
        """Its update, if it had one, is done: what was on order is an ordinary copy now."""
        update = tensor.pending
        if update is None:
            return
        assert update.done
        tensor.pending = None
        if update.arrival is not None:
            self._uploads.note(update.arrival, tensor)
            tensor.ready = update.arrival
            tensor.note_arrived()
        else:  # nothing was on order, or it could not be started
            self._discard(tensor)
