"""Who else would notice that parameters live on the device for good (`hetero.stm.settled`).

Owns the answer, as far as it takes more than a parameter's own reference counts.

[Note: who looks]
A settled parameter's device is another than before, so whoever combined it with a tensor on the host no longer can.
Nobody settles who was seen to do so, or to keep a copy of home, in the iteration before; another optimizer over the
parameters counts for good. What is done with copies of home, or of states, such as an average that is brought up to
date every tenth step, or with gradients, is not seen: these are plain tensors. So where somebody has been given some,
everything on the host that might be one of them, or made from some, keeps parameters at home, unless it was there
before, and as it is now; or only was there before, where nothing was given but copies that were asked for as from a
device (`hetero.stm.tensors.glances`), with which an average goes on to be brought up to date. What is done with a
tensor on the host again and again keeps them there for good: a loss of theirs that is made at home, an operator with a
tensor that was there before, such as a mask, and an update, not by an optimizer, of frozen ones, as of a teacher that
is the average of a model whose parameters are at home.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from hetero.devices import storage_of
from hetero.stm.tensors.fetch import plain
from hetero.stm.tensors.inference import has_counter
from hetero.stm.tensors.instances import instances_of
from hetero.stm.tensors.managed import ManagedTensor

__all__ = ["Onlookers", "has_other_optimizer", "note_operator", "note_update"]


class Onlookers:
    """Of one manager's parameters, from before they were managed on.

    Attributes:
        have_looked: how often somebody has combined home with a tensor on the host, or may do so, since this was 0.
        have_values: how often somebody has been given some at home, and may have kept something made from them.
        have_gradients: the same of gradients, whether.
        have_copies: the same of copies on the host that were asked for as such: what was there before the parameters
            were managed may be brought up to date with them where everything fits as well.
        when_looked: called at the first look since `have_looked` was 0.
    """

    def __init__(self) -> None:
        self.have_looked = self.have_values = 0
        self.have_gradients = self.have_copies = False
        self.when_looked: Callable[[], None] = lambda: None
        with plain():  # there are other managers' parameters as well, which are not looked at by this
            self._before = {
                id(found): (weakref.ref(found), found._version)
                for found in _host_tensors()
                if not found.is_inference() and has_counter(found)
            }

    def note_look(self) -> None:
        """Somebody has been given home, a state, or what an operator made of it."""
        if not self.have_looked:
            self.when_looked()
        self.have_looked += 1
        self.have_values += 1

    def note_copy(self) -> None:
        """The last look was none: a copy on the host was asked for (`hetero.stm.tensors.glances`)."""
        self.have_looked = max(0, self.have_looked - 1)
        self.have_values -= 1
        self.have_copies = True

    def keep_something(self, tensors: Sequence[ManagedTensor], others: set[int]) -> bool:
        """On the host is a tensor that may be a copy or a gradient of these that somebody was given, or made from some:
        of the shape of a parameter, or as large as all together, none of ours, and not there before. What was made from
        copies may be of another type. ``others``: storages that are nobody's but another manager's."""
        have_values = bool(self.have_values or self.have_copies)
        if not (have_values or self.have_gradients):
            return False
        seen = [t.home for t in tensors if have_values or t.parameter.requires_grad]
        dtypes, shapes = {home.dtype for home in seen}, {home.shape for home in seen if home.dim()}
        total = sum(home.numel() for home in seen)
        ours = others | {tensor.home.untyped_storage()._cdata for tensor in tensors}
        for tensor in tensors:
            if tensor.parameter.grad is not None and tensor.parameter.grad.layout is torch.strided:
                ours.add(tensor.parameter.grad.untyped_storage()._cdata)
        known = self._is_from_before if self.have_values or self.have_gradients else self._was_there
        for found in _host_tensors():
            is_one = found.dtype in dtypes or (have_values and _may_be_values(found.dtype))
            if is_one and (found.shape in shapes or found.numel() == total):
                storage = storage_of(found)
                if (storage is None or storage._cdata not in ours) and not known(found):
                    return True
        return False

    @property
    def have_been_there(self) -> bool:
        """Somebody has been given anything."""
        return bool(self.have_looked or self.have_values or self.have_gradients or self.have_copies)

    def know_any(self, others: Sequence[torch.Tensor]) -> bool:
        """Some of these were there before, as they are: a mask, say, that parameters are multiplied by."""
        return any(map(self._is_from_before, others))

    def close(self) -> None:
        """Management ends. torch sees weak references, and swaps no tensor that has one."""
        self._before.clear()

    def _is_from_before(self, tensor: torch.Tensor) -> bool:
        return self._was_there(tensor) and tensor._version == self._before[id(tensor)][1]

    def _was_there(self, tensor: torch.Tensor) -> bool:
        found = self._before.get(id(tensor))
        return found is not None and found[0]() is tensor


def note_operator(
    operands: Sequence[ManagedTensor], others: Sequence[torch.Tensor], results: Sequence[torch.Tensor]
) -> None:
    """An operator on ``operands``, and ``others``, has made ``results`` at home."""
    settled = operands[0].owner.settled
    if settled is None:
        return
    # Numbers may be combined with tensors on any device.
    tensors = [value for value in results if value.dim()]
    if tensors:
        settled.onlookers.note_look()
    # Without gradients, views alone require them, and lead nowhere.
    is_recorded = torch.is_grad_enabled() and any(value.requires_grad for value in tensors)
    if is_recorded or settled.onlookers.know_any(_at_home(others)):
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
    """Somebody may step these parameters, with states of which we would not know. Wrappers of ours are ours, unless
    they have such: slow weights (Lookahead), which they combine with parameters now and then."""
    for found in instances_of(torch.optim.Optimizer):
        if found is ours:
            continue
        wraps = vars(found).get("optimizer") is ours
        of = ours if wraps and ours is not None else found  # a wrapper's groups may be a property
        groups: Iterable[dict[str, Any]] = vars(of).get("param_groups") or ()
        theirs = [p for group in groups for p in group["params"] if id(p) in parameters]
        is_ours = wraps or (ours is not None and vars(ours).get("optimizer") is found)
        if theirs and (not is_ours or (wraps and _has_states(found, theirs))):
            return True
    return False


def _has_states(wrapper: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> bool:
    """On the host, of the parameters' shapes; where it is not the wrapped one that has them."""
    states = vars(wrapper).get("state")
    if not isinstance(states, dict) or states is vars(vars(wrapper)["optimizer"]).get("state"):
        return False
    return any(
        isinstance(value, torch.Tensor) and value.is_cpu and value.shape == p.shape and value.dim()
        for p in parameters
        for value in (dict.get(states, p) or {}).values()
    )


def _may_be_values(dtype: torch.dtype) -> bool:
    """Not a number of something, or a place."""
    return dtype.is_floating_point or dtype.is_complex or dtype is torch.bool


def _host_tensors() -> Iterator[torch.Tensor]:
    for found in instances_of(torch.Tensor):
        # A compiler keeps fake ones, which have no values, and perhaps no numbers as their sizes. Sparse buffers are
        # about to be swapped, which torch does with none that we refer to.
        if (
            found.is_cpu
            and found.layout is torch.strided
            and not (found.is_nested or isinstance(found, FakeTensor))
        ):
            yield found
