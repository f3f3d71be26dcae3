"""Operators on managed parameters that run at home, on the parameters themselves.

Invariant: home is then what the last ``optimizer.step()`` made of it, and whoever keeps a way to its memory is known.
"""

from collections.abc import Callable
from typing import Any

import torch

from hetero.stm.interception.arguments import tensors_in
from hetero.stm.interception.inplace import writes_in_place
from hetero.stm.interception.operands import collect
from hetero.stm.interception.parameter import is_managed
from hetero.stm.tensors.glances import note_detached
from hetero.stm.tensors.graphpaths import marked
from hetero.stm.tensors.listwrites import count_writes, versions_of_list
from hetero.stm.tensors.managed import ManagedTensor
from hetero.stm.tensors.onlookers import note_operator, note_update

__all__ = ["run_at_home"]

# They take tensors of two devices.
_COPIES = frozenset({torch.Tensor.copy_, torch.Tensor.__setitem__})


def run_at_home(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``func(*args, **kwargs)`` on the parameters themselves."""
    operands: list[ManagedTensor] = []
    collect((*args, *kwargs.values()), operands)
    for tensor in operands:
        tensor.owner.home_access.wait(tensor)
    writes = writes_in_place(func) or "out" in kwargs
    if writes:
        for tensor in operands:
            tensor.owner.check_process()
            tensor.owner.home_access.before_write(tensor)
    listed = versions_of_list(args) if writes else []
    result = func(*args, **kwargs)
    if writes:
        count_writes(listed)
        for tensor in operands:
            if tensor.is_inference:  # nobody counts these within that mode
                tensor.clock.note_write()
            tensor.owner.home_access.after_write(tensor)
    # ``buffer[:] = p`` returns nothing.
    written = (*args[:1], kwargs.get("out")) if writes else ()
    results = [value for value in tensors_in((result, *written)) if not is_managed(value)]
    others = [] if func in _COPIES else [v for v in tensors_in((args, kwargs)) if not is_managed(v)]
    for tensor in operands:
        if any(tensor.clock.shares(value) for value in results):
            tensor.owner.home_access.give_out(tensor)
    _note_graph(operands, results)
    note_operator(operands, others, results)
    if func is torch.Tensor.detach:
        note_detached(operands[0], result)
    if writes:
        note_update(operands, others)
    return result


def _note_graph(operands: list[ManagedTensor], results: list[torch.Tensor]) -> None:
    """Autograd may now reach these parameters from ``results`` (gradients: [Note: unread gradients])."""
    # What ``detach()`` gives, in ``state_dict()``, does not.
    made = [value for value in results if value.requires_grad]
    if made and torch.is_grad_enabled():
        mark = marked(made)
        for tensor in operands:
            tensor.paths.note_home_graph(mark)
