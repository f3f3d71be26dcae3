"""A parameter's two implementations, one at home and one on the device, and the exchange of them.

Owns what torch needs for it, and whether it can be taken back.

[Note: exchange]
``p`` keeps its identity and exchanges its implementation with a shadow, as ``torch.utils.swap_tensors`` does: the one
at home is kept for the way back, and is behind until then. No byte moves. A graph holds implementations; if it is
still alive, what it accumulates into the shadow is handed on to ``p`` (`redirect`).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from hetero.devices import storage_of
from hetero.stm.interception.parameter import is_managed, managed_of
from hetero.stm.tensors.exposure import gradient_is_private, memory_is_private
from hetero.stm.tensors.fetch import plain
from hetero.stm.tensors.instances import instances_of
from hetero.stm.tensors.managed import ManagedTensor

__all__ = ["exchange", "is_like", "let_go", "may_go_back", "redirect"]


def exchange(parameter: nn.Parameter, shadow: nn.Parameter) -> None:
    """Swap implementations ([Note: exchange]); what hangs on the Python objects stays with them."""
    hooks = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
    torch._C._swap_tensor_impl(parameter, shadow)
    parameter._backward_hooks = hooks[0]
    _set_post_accumulate(parameter, hooks[1])


def let_go(shadow: nn.Parameter, placeholder: torch.Tensor) -> None:
    """Its memory is somebody else's now: a graph that has been gone through, of which losses that the user keeps hold
    the ends, is not to keep it. ``placeholder``: one number of that type on that device."""
    if shadow._use_count() == 2 and _has_end(shadow):  # type: ignore[attr-defined]  # the name and that end
        shadow.data = placeholder.expand(shadow.shape)


def _has_end(shadow: nn.Parameter) -> bool:
    """A graph ends in it, which reads nothing there. A graph that has saved it while it was frozen has no such end: it
    holds it as often, and reads it in backward."""
    if not (shadow.is_floating_point() or shadow.is_complex()):
        return False
    trained, uses = shadow.requires_grad, shadow._use_count()  # type: ignore[attr-defined]
    shadow.requires_grad_()  # it may have been frozen since
    end = torch.autograd.graph.get_gradient_edge(shadow).node  # a new one, if there is none: one use more
    has_end: bool = shadow._use_count() == uses  # type: ignore[attr-defined]
    del end
    shadow.requires_grad_(trained)
    return has_end


# Attribute of a leaf that only graphs from before hold, and nobody else has been given.
_FORMER = "_hetero_former"


def redirect(shadow: nn.Parameter, tensor: ManagedTensor) -> None:
    """What graphs from before accumulate into the implementation that ``shadow`` has now is the parameter's.

    A backward that comes by both adds to one ``p.grad``, on two threads if it is not kept to one
    (`Segments.need_one_thread`)."""
    vars(shadow)[_FORMER] = True
    if not shadow.requires_grad or shadow._use_count() <= 1:  # type: ignore[attr-defined]
        return

    # It has the parameter alone: what a hook has is kept as long as the leaf, and Python's collector cannot see that.
    parameter = tensor.parameter

    def hand_on(leaf: torch.Tensor) -> None:
        with torch.no_grad(), plain():
            gradient, leaf.grad = leaf.grad, None
            if gradient is None:
                return
            gradient = gradient.to(parameter.device)
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                if is_managed(parameter):
                    record = managed_of(parameter)
                    record.owner.gradient_access.wait(record)
                parameter.grad += gradient
            for hook in list((parameter._post_accumulate_grad_hooks or {}).values()):
                hook(parameter)

    tensor.paths.note_former_graph(torch.autograd.graph.get_gradient_edge(shadow).node)
    _set_post_accumulate(shadow, None)
    shadow.register_post_accumulate_grad_hook(hand_on)


def _set_post_accumulate(parameter: nn.Parameter, hooks: Any) -> None:
    if hooks is None:  # which alone would leave those that the implementation has
        parameter._post_accumulate_grad_hooks = {}
    parameter._post_accumulate_grad_hooks = hooks


def may_go_back(tensors: Sequence[ManagedTensor], device: torch.device) -> bool:
    """Nobody would be left with memory on ``device`` that is no parameter's, or gradient's, any more."""
    held: set[int] = set()
    has_graph = False
    for tensor in tensors:
        parameter = tensor.parameter
        if not is_like(parameter, tensor.home, device):
            return False
        if parameter.grad is not None and not gradient_is_private(parameter):
            return False
        has_graph |= parameter._use_count() > 1  # type: ignore[attr-defined]
        if not memory_is_private(parameter, 0):
            held.add(parameter.untyped_storage()._cdata)
    if not held:
        return True
    # A graph may hold them as views that Python does not know; and one from before, which goes on to hold that memory,
    # ends in a leaf of ours. Whatever else Python knows may be the user's, whoever holds it.
    aliases = _aliases(held, {id(tensor.parameter) for tensor in tensors})
    return (has_graph or bool(aliases)) and all(_FORMER in vars(alias) for alias in aliases)


def is_like(parameter: torch.Tensor, home: torch.Tensor, device: torch.device) -> bool:
    """``parameter`` could have been made from ``home``: nobody has put other data in its place."""
    return (
        parameter.device == device
        and parameter.dtype == home.dtype
        and parameter.shape == home.shape
        and parameter.layout is torch.strided
    )


def _aliases(storages: set[int], parameters: set[int]) -> list[torch.Tensor]:
    """Tensors that Python knows, and that share one of these storages."""

    def is_one(found: torch.Tensor) -> bool:
        storage = storage_of(found)
        return id(found) not in parameters and storage is not None and storage._cdata in storages

    return list(filter(is_one, instances_of(torch.Tensor)))
