"""Gradients that stay on the device: those of parameters that live there.

Owns them until the step has taken them, or somebody looks at ``p.grad``. Autograd, which insists on a gradient at home,
is given memory of which nothing is written until then; what later micro-batches contribute is added on the device, and
autograd is told that there is none. Invariant: a kept gradient is ``p.grad``, less the changes that are still to be
made, and what is at home is not.

[Note: gone in the middle]
What makes a tensor may run out of memory. It is then tried again after room has been made, perhaps by sending home what
lives on the device, with the very gradient that it is about: its result is nobody's then, and what was to be done is
done at home.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hetero.devices import CopyEngine
from hetero.msc import MemStatsCollector
from hetero.stm.gradients.changes import Changes
from hetero.stm.gradients.memory import GradientMemory, as_home, owns_memory
from hetero.stm.gradients.norms import GradientNorms
from hetero.stm.tensors.exposure import gradient_is_private, holds_alone
from hetero.stm.tensors.fetch import plain
from hetero.stm.tensors.managed import ManagedTensor
from hetero.stm.tensors.state import Tier

__all__ = ["KeptGradients", "has_gradient"]


@dataclass(slots=True)
class _Kept:
    """``is_ours``: nobody else can hold this tensor."""

    gradient: torch.Tensor
    is_ours: bool = False

    def owns(self) -> bool:
        """It may be written to: autograd has it for nobody else any more."""
        self.is_ours = self.is_ours or holds_alone(self)
        return self.is_ours


class KeptGradients:
    """Of one manager's parameters."""

    def __init__(
        self,
        engine: CopyEngine,
        memory: GradientMemory,
        changes: Changes,
        norms: GradientNorms,
        meter: MemStatsCollector,
    ) -> None:
        self._engine = engine
        self._memory = memory
        self._changes = changes
        self._norms = norms
        self._meter = meter
        self._kept: dict[int, _Kept] = {}
        self.nbytes = 0  # of all of them
        # False where nothing else tells apart what autograd returns from ``p.grad``.
        self.keeps = False

    def __contains__(self, tensor: ManagedTensor) -> bool:
        return tensor.index in self._kept

    def __len__(self) -> int:
        return len(self._kept)

    def indices(self) -> set[int]:
        """Of the parameters whose gradients are kept."""
        return set(self._kept)

    def takes(self, tensor: ManagedTensor) -> bool:
        """Its next gradient is to stay, as far as it is a matter of whoever looks at ``p.grad``."""
        parameter = tensor.parameter
        if not (tensor.stays and self.keeps) or parameter._post_accumulate_grad_hooks:
            return False
        if parameter.grad is None:
            return True
        is_nothing_at_home = self._changes.is_to_be_zero(tensor.index)
        return (tensor in self or is_nothing_at_home) and gradient_is_private(parameter)

    def keep(self, tensor: ManagedTensor, gradient: torch.Tensor, *, is_shared: bool) -> torch.Tensor | None:
        """``gradient`` stays; what autograd is given for it, None if it has been added to the one that was kept. If the
        tensor is not among these afterwards, nothing has been done ([Note: gone in the middle])."""
        kept = self._kept.get(tensor.index)
        if kept is not None:
            if self._change(tensor, kept) and self._add(tensor, kept, gradient):
                self._norms.take(tensor.index, kept.gradient)
            return None
        casts = gradient.dtype is not tensor.home.dtype
        copies = casts or not owns_memory(gradient, is_shared=is_shared)
        if copies:
            gradient = gradient.to(tensor.home.dtype) if casts else gradient.clone()
            if not tensor.stays:
                return None
        host = tensor.parameter.grad
        if host is not None:  # it is to be zeros, to which autograd would add: -0.0 becomes 0.0
            if host.stride() != gradient.stride():
                return None
            gradient.data.add_(0)  # nobody else has it
            self._changes.drop(tensor.index)
        # Many are views, such as the transposed product of a linear layer, and hold the tensor that they are a view of.
        self._put(tensor, _Kept(gradient.data, is_ours=copies))
        self._norms.take(tensor.index, gradient)
        return self._memory.host_tensor(tensor, gradient) if host is None else None

    def look(self, tensor: ManagedTensor) -> torch.Tensor | None:
        """Its gradient on the device, complete, if it is kept. The caller does not write to it."""
        kept = self._kept.get(tensor.index)
        return kept.gradient if kept is not None and self._change(tensor, kept) else None

    def look_nbytes(self, tensor: ManagedTensor) -> int:
        """What `look` allocates."""
        kept = self._kept[tensor.index]
        copies = self._changes.has_any(tensor.index) and not kept.owns()
        return tensor.full_nbytes if copies else 0

    def is_shared(self, tensor: ManagedTensor) -> bool:
        """Somebody else may hold the tensor that is kept."""
        return tensor in self and not self._kept[tensor.index].owns()

    def bring_home(self, tensor: ManagedTensor) -> None:
        """Somebody looks at ``p.grad``: it is kept no longer. The caller makes the changes that are left."""
        kept = self._kept[tensor.index]
        if kept.owns():  # else changing it takes memory, and there may be none
            self._change(tensor, kept)
        host = tensor.parameter.grad
        assert host is not None
        event = self._engine.download(kept.gradient, host)
        self._meter.count_eviction(0, kept.gradient.nbytes)
        self._engine.host_after_download(event, host)
        self._engine.free_after_download(event)
        self._take_out(tensor)

    def adopt(self, tensor: ManagedTensor, gradient: torch.Tensor) -> None:
        """``gradient``, on the device and held by nobody else, is to be ``p.grad``."""
        home = tensor.home
        if gradient.layout is not torch.strided or gradient.dtype is not home.dtype:
            tensor.parameter.grad = gradient.to(home.device)
            return
        gradient = as_home(gradient.detach(), home)
        self._put(tensor, _Kept(gradient, is_ours=True))
        tensor.parameter.grad = self._memory.host_tensor(tensor, gradient)

    def forget(self, tensor: ManagedTensor) -> None:
        """Nobody will look at it."""
        if tensor.index in self._kept:
            self._take_out(tensor)
            self._changes.drop(tensor.index)

    def forget_lost(self, tensors: Sequence[ManagedTensor]) -> None:
        """No backward runs: those that autograd has not taken over by now it never will."""
        for index in list(self._kept):
            if not has_gradient(tensors[index]):
                self.forget(tensors[index])

    def _put(self, tensor: ManagedTensor, kept: _Kept) -> None:
        if tensor.index not in self._kept:
            self.nbytes += tensor.full_nbytes
            self._meter.note_kept(tensor.full_nbytes)
        self._kept[tensor.index] = kept
        self._memory.entry(tensor).place(Tier.DEVICE, tensor.full_nbytes)

    def _take_out(self, tensor: ManagedTensor) -> None:
        del self._kept[tensor.index]
        self.nbytes -= tensor.full_nbytes
        self._memory.entry(tensor).place(Tier.DEVICE, 0)
        self._meter.note_kept(-tensor.full_nbytes)

    def _change(self, tensor: ManagedTensor, kept: _Kept) -> bool:
        """Do what is left to be done to it; False if it is gone."""
        while (wish := self._changes.first_wish(tensor.index)) is not None:
            in_place = kept.owns()  # asked first: among the arguments, there would be one more who holds it
            if not self._become(tensor, kept, wish.applied(kept.gradient, in_place=in_place)):
                return False
            self._changes.drop_first(tensor.index)
        return True

    def _add(self, tensor: ManagedTensor, kept: _Kept, gradient: torch.Tensor) -> bool:
        """False if it is gone."""
        with torch.no_grad():
            if kept.owns():
                kept.gradient.add_(gradient)
                return True
            return self._become(tensor, kept, kept.gradient + gradient)

    def _become(self, tensor: ManagedTensor, kept: _Kept, gradient: torch.Tensor) -> bool:
        """``gradient``, just made, takes its place; False if it is gone."""
        if self._kept.get(tensor.index) is not kept:
            return False
        kept.gradient, kept.is_ours = gradient, True
        return True


def has_gradient(tensor: ManagedTensor) -> bool:
    """``p.grad`` is not None."""
    with plain():  # asking through dispatch would wait for it
        return tensor.parameter.grad is not None
