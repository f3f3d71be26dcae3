"""Who else would notice that parameters live on the device for good (`hetero.stm.settled`).

Owns the answer, as far as it takes more than a parameter's own reference counts.

[Note: who looks]
A settled parameter's device is another than before, so whoever combined it with a tensor on the host no longer can.
What is done with copies of home, such as an average that is brought up to date every tenth step, or with gradients, is
not seen: these are plain tensors. So where somebody has been given some, everything on the host that might be one of
them, or made from some, keeps parameters at home, unless it was there before, and as it is now. Nobody settles who has
looked in the iteration before; but who looks in each (clamps ``p.data``, logs norms of ``p.detach()``) may, if nothing
on the host, however old, could be what parameters are combined with. What keeps them there for good: an operator, or an
update, with a tensor on the host from before, as with a mask; a loss of theirs and such a tensor; another optimizer
over them; and an update of frozen ones, as of a teacher that is the average of a model whose parameters are at home.
"""

import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from hetero.devices import storage_of
from hetero.stm.tensors.fetch import plain
from hetero.stm.tensors.instances import instances_of
from hetero.stm.tensors.managed import ManagedTensor

__all__ = ["Onlookers", "has_other_optimizer", "note_operator", "note_update"]

_IN_EACH = 4  # iterations in a row: then there will be a look in the next one as well


class Onlookers:
    """Of one manager's parameters, from before they were managed on.

    Attributes:
        have_values, have_gradients: somebody has been given some at home, and may have kept something made from them.
    """

    def __init__(self) -> None:
        self.have_values = self.have_gradients = False
        self._have_looked = False
        self._iterations_looked_at = 0  # in a row
        with plain():  # there are other managers' parameters as well, which are not looked at by this
            self._before = {
                id(found): (weakref.ref(found), found._version)
                for found in _host_tensors()
                if not found.is_inference()
            }

    def note_look(self) -> None:
        """Somebody has been given home, or what an operator made of it."""
        self._have_looked = self.have_values = True

    def begin_iteration(self) -> bool:
        """True if somebody has looked since the one before, as does not happen in each."""
        self._iterations_looked_at = self._iterations_looked_at + 1 if self._have_looked else 0
        self._have_looked = False
        return 0 < self._iterations_looked_at < _IN_EACH

    def keep_something(self, tensors: Sequence[ManagedTensor]) -> bool:
        """On the host is a tensor that may be a copy or a gradient of these that somebody was given, or made from some:
        of the shape of a parameter, or as large as all together, none of ours, and not there before
        ([Note: who looks])."""
        if not (self.have_values or self.have_gradients):
            return False
        in_each = self._iterations_looked_at >= _IN_EACH
        seen = [t.home for t in tensors if self.have_values or t.parameter.requires_grad]
        dtypes, shapes = {home.dtype for home in seen}, {home.shape for home in seen if home.dim()}
        total = sum(home.numel() for home in seen)
        ours = {home.untyped_storage()._cdata for home in (tensor.home for tensor in tensors)}
        for tensor in tensors:
            if tensor.parameter.grad is not None and tensor.parameter.grad.layout is torch.strided:
                ours.add(tensor.parameter.grad.untyped_storage()._cdata)
        for found in _host_tensors():
            if found.dtype in dtypes and (found.shape in shapes or found.numel() == total):
                storage = storage_of(found)
                is_ours = storage is not None and storage._cdata in ours
                if not is_ours and (in_each or not self._is_from_before(found)):
                    return True
        return False

    def were_there(self, others: Sequence[torch.Tensor]) -> bool:
        """Some of these are from before, as they are: a mask, say, that parameters are multiplied by."""
        return any(map(self._is_from_before, others))

    def close(self) -> None:
        """Management ends. torch sees weak references, and swaps no tensor that has one."""
        self._before.clear()

    def _is_from_before(self, tensor: torch.Tensor) -> bool:
        found, version = self._before.get(id(tensor), (None, 0))
        return found is not None and found() is tensor and tensor._version == version


def note_operator(
    operands: Sequence[ManagedTensor], others: Sequence[torch.Tensor], results: Sequence[torch.Tensor]
) -> None:
    """An operator on ``operands``, and ``others``, has made ``results`` at home."""
    settled = operands[0].owner.settled
    if settled is None:
        return
    others = _at_home(others)
    # Numbers may be combined with tensors on any device.
    tensors = [value for value in results if value.dim()]
    if tensors:
        settled.onlookers.note_look()
    if others and (any(v.requires_grad for v in tensors) or settled.onlookers.were_there(others)):
        settled.forbid()


def note_update(operands: Sequence[ManagedTensor], others: Sequence[torch.Tensor]) -> None:
    """An operator that is given ``others``, the user's own, has written to ``operands`` at home."""
    if not _at_home(others):
        return
    for tensor in operands:
        settled = tensor.owner.settled
        if settled is not None:
            settled.onlookers.note_look()
            if settled.optimizer is None or not tensor.parameter.requires_grad:
                settled.forbid()


def _at_home(others: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [value for value in others if value.is_cpu and value.dim()]


def has_other_optimizer(ours: torch.optim.Optimizer | None, parameters: set[int]) -> bool:
    """Somebody may step these parameters, with states of which we would not know. Wrappers of ours are ours."""
    for found in instances_of(torch.optim.Optimizer):
        if found is ours:
            continue
        groups: Iterable[dict[str, Any]] = vars(found).get("param_groups") or ()
        wraps = vars(found).get("optimizer") is ours or (ours and vars(ours).get("optimizer") is found)
        if not wraps and any(id(p) in parameters for group in groups for p in group["params"]):
            return True
    return False


def _host_tensors() -> Iterator[torch.Tensor]:
    for found in instances_of(torch.Tensor):
        # A compiler keeps fake ones, which have no values, and perhaps no numbers as their sizes.
        if found.is_cpu and not (found.is_nested or isinstance(found, FakeTensor)):
            yield found
