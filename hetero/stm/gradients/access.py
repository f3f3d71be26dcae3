"""What the user does with ``p.grad``, and clipping with all of them.

Owns how a look at a gradient, a write and a norm meet what is still being done with it: its way down, changes, an
update that is queued or being tried. Invariant: nobody can tell that it was under way, except by the clock.

[Note: norms where they round alike]
A norm must not depend on where a gradient happens to be. Most are taken on the device, as gradients leave. Those that
were looked at or added to at home, or had left before anybody wanted norms, are copied up, each for the time of its
norm, unless that has the same bits at home (`hetero.devices.norms_depend_on`). Where no copy finds room, the norm is
the host's.
"""

import threading
from collections.abc import Callable, Sequence
from typing import cast

import torch

from hetero.devices import Accelerator, norms_depend_on
from hetero.stm.copies.residency import Residency
from hetero.stm.gradients.changes import Clamp, Wish, Zero
from hetero.stm.gradients.offload import Gradients
from hetero.stm.tensors.exposure import gradient_has_one_name, gradient_is_plain, gradient_is_private
from hetero.stm.tensors.fetch import plain
from hetero.stm.tensors.managed import ManagedTensor

__all__ = ["GradientAccess"]


class GradientAccess:
    """To the gradients of one manager's parameters. ``roll_back``: as if no update of these had been tried."""

    def __init__(
        self,
        gradients: Gradients,
        residency: Residency,
        accelerator: Accelerator,
        *,
        lock: threading.RLock,
        parameters: Callable[[], int],
        roll_back: Callable[[Sequence[ManagedTensor]], None],
    ) -> None:
        self._gradients = gradients
        self._residency = residency
        self._accelerator = accelerator
        self._lock = lock
        self._parameters = parameters
        self._roll_back = roll_back

    def wait(self, tensor: ManagedTensor) -> None:
        """Somebody is about to read ``p.grad``."""
        with self._lock, plain():
            self._residency.orders.finish_update(tensor)  # the queue reads it, and may write to it
            self._gradients.wait(tensor)
            self._gradients.norms.forget(tensor.index)  # whoever reads it may write to it

    def on_device(self, tensor: ManagedTensor) -> torch.Tensor:
        """For a parameter that lives there: its gradient, complete. The caller does not write to it."""
        with self._lock:
            return self._gradients.on_device(tensor)

    def own(self, tensor: ManagedTensor) -> torch.Tensor:
        """As `on_device`, for a caller who writes to it: it is ``p.grad`` from now on."""
        with self._lock:
            return self._gradients.own(tensor)

    def on_device_nbytes(self, tensor: ManagedTensor) -> int:
        """What `on_device` allocates."""
        with self._lock:
            return self._gradients.on_device_nbytes(tensor)

    def norms(self, tensors: list[ManagedTensor], norm_type: float) -> torch.Tensor:
        """Norms of their gradients, on the device, in a vector. Of gradients at home, those that were not taken as
        they left, or not of this order, are taken now: waiting for them ([Note: norms where they round alike])."""
        with self._lock, plain():
            norms = self._gradients.norms
            copies_up = norms_depend_on(self._accelerator.device, norm_type)
            norms.want(norm_type, tensors[0].home.dtype, self._parameters())
            at_home = {}
            for tensor in tensors:
                if tensor.pending is not None and not (
                    tensor.is_tried and norms.knows(tensor.index, norm_type)
                ):
                    self._residency.orders.finish_update(tensor)
                    norms.forget(tensor.index)  # the optimizer may write to gradients
                if norms.knows(tensor.index, norm_type):
                    continue
                if self._gradients.is_kept(tensor) and tensor.home.numel():
                    self._residency.room.make(self._gradients.on_device_nbytes(tensor))
                    norms.take(tensor.index, self._gradients.on_device(tensor))
                    continue
                self._gradients.wait(tensor)
                if not (copies_up and self._take_from_copy(tensor, norm_type)):
                    at_home[tensor.index] = cast(torch.Tensor, tensor.parameter.grad)
            return norms.get([tensor.index for tensor in tensors], norm_type, at_home)

    def _take_from_copy(self, tensor: ManagedTensor, norm_type: float) -> bool:
        """Of its gradient, at home, take the norm on the device; False if there is no room for a copy."""
        norm_nbytes = self._accelerator.allocated_size(1)
        if not self._residency.room.make(self._gradients.on_device_nbytes(tensor) + norm_nbytes):
            return False
        try:
            self._gradients.norms.take_once(tensor.index, norm_type, self._gradients.on_device(tensor))
        except torch.OutOfMemoryError:  # within the budget, but no gap is large enough
            self._accelerator.note_answered()
            return False
        return True

    def scale(self, tensors: list[ManagedTensor], factor: torch.Tensor) -> None:
        """Multiply their gradients: before anybody sees them, or now if somebody may be looking."""
        with self._lock, plain():
            self._change(tensors, self._gradients.changes.factor(factor))

    def clamp(self, tensors: list[ManagedTensor], most: float) -> None:
        """Bring all numbers of their gradients between ``-most`` and ``most``, likewise."""
        with self._lock, plain():
            self._change(tensors, Clamp(most))

    def zero(self, tensor: ManagedTensor) -> bool:
        """``p.grad.zero_()``, likewise; False, and nothing is done, if it is no ordinary tensor."""
        with self._lock, plain():
            if tensor.parameter.grad is None:
                return True
            if not gradient_is_plain(tensor.parameter.grad):
                return False
            self._roll_back([tensor])
            self._residency.orders.finish_update(tensor)
            self._gradients.changes.drop(tensor.index)
            self._change([tensor], Zero())
            return True

    def _change(self, tensors: list[ManagedTensor], wish: Wish) -> None:
        for tensor in tensors:
            # What is being tried stays right if it turns out to change nothing.
            tried = tensor.is_tried and gradient_has_one_name(tensor.parameter)
            if not tried:
                self._residency.orders.finish_update(tensor)
            self._gradients.norms.forget(tensor.index)
            self._gradients.changes.ask(tensor.index, wish)
            if not tried and not gradient_is_private(tensor.parameter):
                self._gradients.wait(tensor)

    def drop(self, tensor: ManagedTensor) -> None:
        """``p.grad = None``: the queue keeps what it needs of it."""
        with self._lock, plain():
            if tensor.parameter.grad is not None:
                self._roll_back([tensor])
                self._gradients.kept.forget(tensor)
                self._gradients.wait(tensor)
                self._gradients.forget(tensor)
                tensor.parameter.grad = None

    def replace(self, tensor: ManagedTensor, gradient: object) -> None:
        """``p.grad`` is about to be ``gradient``."""
        with self._lock, plain():
            self._roll_back([tensor])
            self._gradients.forget(tensor)
            self._gradients.note_given(tensor, gradient)
