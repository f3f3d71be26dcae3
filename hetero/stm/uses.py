"""What operators and backward do with parameters: an operator's beginning and end, saved copies, gradients that come.

Owns the order of what happens at each of these: the segment that it begins, the sampling moment, the copy that it
gets. Autograd runs backward on threads of its own, so that each entry takes the lock. Invariant: modes of the caller's
(of a selective checkpoint, of whoever counts operators) see the loop's operators, and nothing of what is done here.
"""

import contextlib
import threading
from collections.abc import Callable

import torch

from hetero.autograd import in_backward
from hetero.msc import MemStatsCollector
from hetero.stm.copies.residency import Residency
from hetero.stm.deferred import UpdateQueue
from hetero.stm.gradients.memory import owns_memory
from hetero.stm.gradients.offload import Gradients
from hetero.stm.interception.parameter import is_managed, managed_of
from hetero.stm.interception.transforms import is_transforming, outside_transforms
from hetero.stm.running.executor import Executor
from hetero.stm.running.segments import Segments
from hetero.stm.running.unseen import is_seen, unseen
from hetero.stm.standing import Standing
from hetero.stm.tensors.fetch import for_one_operator, make_identity
from hetero.stm.tensors.managed import ManagedTensor, modified_in_place
from hetero.stm.tensors.state import begin_compute, end_compute

__all__ = ["Uses"]


class Uses:
    """Of one manager's parameters (`hetero.stm.tensors.owner.UseOwner`).

    Attributes:
        try_early: may begin a parameter's update as soon as its gradient leaves; `hetero.stm.step.speculation` sets it.
    """

    def __init__(
        self,
        standing: Standing,
        segments: Segments,
        executor: Executor,
        residency: Residency,
        gradients: Gradients,
        updates: UpdateQueue,
        collector: MemStatsCollector,
        *,
        lock: threading.RLock,
        device: torch.device,
    ) -> None:
        self._standing = standing
        self._segments = segments
        self._executor = executor
        self._residency = residency
        self._gradients = gradients
        self._updates = updates
        self._collector = collector
        self._lock = lock
        self._device = device
        self.try_early: Callable[[ManagedTensor, torch.Tensor], None] | None = None
        # By index, as graphs that are alive know them, and as they are once everything is at home.
        self._versions_at_close: list[tuple[int, int]] = []

    # -- operators ------------------------------------------------------------------------------------------

    def begin_outside(self) -> None:
        """Autograd records an operator outside of the model's forward."""
        self._standing.check_process()  # before the device's counters are read, which a child cannot do
        with unseen():
            self._segments.begin_outside()

    def within_backward(self) -> contextlib.AbstractContextManager[None]:
        """Around a call of the model there: the backward's segment begins, if it has not, and the call is guarded as
        that is. A reentrant checkpoint around the whole model calls it so, in a backward that no forward of ours has
        waited for."""
        with self._lock:
            if not self._standing.is_settled:
                self._segments.enter_backward()
            return self._executor.guarded_within()

    def begin_operator(self, operands: list[ManagedTensor], name: object) -> None:
        """The pre-op sampling moment; operands are resident and in COMPUTE afterwards."""
        if self._standing.is_in_child:
            self._standing.check_process()
        if is_transforming():  # within a forward of ours: what is fetched is not part of it
            with outside_transforms():
                self.begin_operator(operands, name)
            return
        with self._lock:
            if is_seen():
                with unseen():
                    self._begin_operator(operands, name)
            else:
                self._begin_operator(operands, name)

    def _begin_operator(self, operands: list[ManagedTensor], name: object) -> None:
        # Else another thread has settled since these parameters were looked at: they are there, as themselves.
        if not self._standing.is_settled:
            if in_backward():
                self._segments.enter_backward()
            self._executor.before_operator(operands, name)
        begin_compute(operands)

    def end_operator(self, operands: list[ManagedTensor]) -> None:
        """The operator is done."""
        with self._lock:
            end_compute(operands)
            if self._collector.is_sampling:
                self._executor.after_operator()

    def note_unguarded(self) -> None:
        """An operator is about to come that cannot be tried again when it runs out of memory."""
        self._executor.note_unguarded()

    def copy_for(self, tensor: ManagedTensor) -> torch.Tensor:
        """The identity, or for a frozen parameter the bare copy."""
        if tensor.data is None:  # settled: see `begin_operator`
            return tensor.parameter
        # Without grad mode too: kernels are chosen by `requires_grad` whatever the mode (matmul folds batches by it).
        # And not a leaf with that flag, whose casts autocast would keep, and the copy with them.
        if not tensor.parameter.requires_grad:
            return tensor.data
        if tensor.is_inference:  # which has no identity
            # Within that mode nothing is recorded, but writes to the copy have to be counted.
            if torch.is_inference_mode_enabled():
                return tensor.data
            with self._lock, outside_transforms(), unseen():
                return for_one_operator(tensor)
        if tensor.identity is None:
            with self._lock, outside_transforms(), unseen():
                make_identity(tensor)
        assert tensor.identity is not None
        return tensor.identity

    # -- backward -------------------------------------------------------------------------------------------

    def load_saved(self, tensor: ManagedTensor, version: int) -> torch.Tensor:
        """A saved parameter is about to be read by backward: its copy, after autograd's version check."""
        with self._lock, unseen():
            if self._standing.is_closed:  # a graph from before: the parameter is wherever it lives now
                if (now := self._version_after_close(tensor)) != version:
                    raise modified_in_place(tensor.parameter, now, version)
                return tensor.parameter.detach().to(self._device)
            settled = self._standing.settled
            if settled is not None and settled.is_on:  # likewise
                if settled.version(tensor) != version:
                    raise modified_in_place(tensor.parameter, settled.version(tensor), version)
                return tensor.parameter.detach()
            if tensor.pending is not None or self._updates.has_failed:
                self._residency.orders.finish_update(tensor)
            if tensor.version != version:
                raise modified_in_place(tensor.home, tensor.version, version)
            self._segments.enter_backward()
            self._executor.before_operator([tensor], "backward")
            assert tensor.data is not None
            # From here on the reference count of the view stands for COMPUTE: nobody tells when backward is done
            # with it, and a copy that is held is not evicted.
            return tensor.data

    def hand_over(
        self, tensor: ManagedTensor, gradient: torch.Tensor, *, is_shared: bool
    ) -> torch.Tensor | None:
        """A parameter's gradient is complete on the device; what autograd should take for it at home, if anything."""
        with self._lock, unseen():
            if self._standing.is_closed:
                return gradient.to(tensor.parameter.device).to(tensor.parameter.dtype)
            if self._standing.is_settled:  # a graph from before: it ends at home
                return gradient.to(tensor.home.device)
            self._segments.enter_backward()
            # Autograd may add to the gradient that the queue reads.
            self._residency.orders.finish_update(tensor)
            if gradient.layout is torch.strided:  # the only ones whose bytes can be told
                own = gradient.nbytes if owns_memory(gradient, is_shared=is_shared) else 0
                self._collector.note_gradient(tensor.index, gradient.nbytes, own_nbytes=own)
            host = self._gradients.hand_over(tensor, gradient, is_shared=is_shared)
            if self.try_early is not None and host is not None:
                self.try_early(tensor, host)
            return host

    def note_activation(self, name: str) -> None:
        """A large tensor was saved, or is about to be read by backward: a sampling moment."""
        with unseen():
            if in_backward():
                self._segments.enter_backward()
            self._executor.before_operator([], name)

    # -- the end --------------------------------------------------------------------------------------------

    def note_close(self, versions: list[tuple[int, int]]) -> None:
        """Management ends: of each parameter, its version as graphs that are alive know it, and as it is now."""
        self._versions_at_close = versions

    def _version_after_close(self, tensor: ManagedTensor) -> int:
        """`ManagedTensor.version`, had management gone on; it may have begun anew."""
        record = tensor
        if is_managed(tensor.parameter):
            record = managed_of(tensor.parameter)
            record.owner.home_access.wait(record)
        before, then = self._versions_at_close[tensor.index]
        return before + record.version - then
