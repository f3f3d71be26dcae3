"""Operators on parameters outside the model's forward and backward.

Owns the rule that under ``precision`` a parameter is there what it says it is: computed with in home's type, wherever
the other operands lie, as an FSDP2 parameter is between steps. Low-precision copies belong to the model's own forward
and backward. And what is said where there is no room: that activations do not leave there.

The copies made here are ordinary tensors of the caller's: of the whole parameter, neither planned nor evicted. What is
ours makes room for them; where that is not enough, they are refused.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

import torch

from hetero.autograd import in_backward
from hetero.errors import BudgetError
from hetero.stm.tensors.managed import ManagedTensor
from hetero.stm.tensors.owner import Owner

__all__ = ["full_copies", "keeps_its_type", "note_outside", "with_relief"]

_T = TypeVar("_T")


def keeps_its_type(operands: Sequence[ManagedTensor]) -> bool:
    """An operator outside a managed forward has to compute with home's values as they are."""
    return not in_backward() and any(tensor.low is not None for tensor in operands)


def note_outside(error: BudgetError, *, parameters_leave: bool = True) -> None:
    """Add a note to ``error``, raised for an operator there, if autograd keeps what such operators read."""
    if torch.is_grad_enabled() and not in_backward():
        error.add_note(
            "hetero: this ran outside of a call of the managed model. There what is saved for backward stays on the "
            f"device, {'but for parameters' if parameters_leave else 'and under precision parameters do too'}. Call "
            "the model itself, not its methods or parts; or manage what is called"
        )


def with_relief(owner: Owner, call: Callable[[], _T]) -> _T:
    """``call()``, again and again as long as it runs out of memory and anything of ``owner``'s can leave."""
    while True:
        try:
            return call()
        except torch.OutOfMemoryError as error:
            if not owner.relief.relieve_after(error):
                raise
            owner.relief.note_answered()


@contextlib.contextmanager
def full_copies(operands: Sequence[ManagedTensor]) -> Iterator[dict[int, torch.Tensor]]:
    """Copies of ``operands`` on the device, by id of parameter, which autograd connects with the parameters. What is
    written to them goes home. Call without ``__torch_function__`` dispatch."""
    copies = {}
    for tensor in operands:
        tensor.owner.home_access.wait(tensor)
        if torch.is_grad_enabled():
            tensor.paths.note_home_graph(None)
        try:
            tensor.owner.relief.require(tensor.full_nbytes, tensor.name)
        except BudgetError as error:
            note_outside(error, parameters_leave=False)
            raise
        there = partial(tensor.parameter.to, tensor.owner.device)
        copies[id(tensor.parameter)] = with_relief(tensor.owner, there)
    versions = [copy._version for copy in copies.values()]
    yield copies
    for tensor, version in zip(operands, versions, strict=True):
        copy = copies[id(tensor.parameter)]
        if copy._version != version:
            if copy.requires_grad and torch.is_grad_enabled():
                raise RuntimeError(
                    "a leaf Variable that requires grad is being used in an in-place operation."
                )
            tensor.owner.home_access.before_write(tensor)
            with torch.no_grad():
                tensor.home.copy_(copy)
