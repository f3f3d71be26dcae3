"""A managed model within a transform of ``torch.func``, and a transform within its forward.

Owns the question whether there is one, and the refusal. Within a transform every tensor is wrapped, also those of ours,
and nothing can be fetched. A transform within the model's forward is another matter: what its parameters are used for
there is fetched outside of it, and what it differentiates or maps over is their device copies. Invariant: a call whose
parameters are all the caller's (``torch.func.functional_call``) is the model's own, and no other is let in.
"""

import functools
from typing import Any

import torch
from torch import nn
from torch._C import _functorch
from torch._functorch import eager_transforms, vmap
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from hetero.errors import ManageError
from hetero.stm.interception.parameter import is_managed
from hetero.stm.interception.scopes import computes

__all__ = ["REPLACEMENTS", "check_transformed", "is_transforming", "outside_transforms"]

is_transforming = _functorch.peek_interpreter_stack
"""Truthy within ``torch.func.grad``, ``vmap`` and the like, on this thread."""


outside_transforms = temporarily_clear_interpreter_stack
"""Context in which there is no transform, in the middle of one."""


def check_transformed(model: nn.Module) -> None:
    """Raises `ManageError` if ``model``, called within a transform, has parameters that are managed."""
    for name, parameter in model.named_parameters():
        if is_managed(parameter):
            raise ManageError(
                f"{type(model).__name__} is called within a transform of torch.func (grad, vmap ...), where its "
                f"parameter {name} cannot be fetched: give functional_call all parameters, on the device ({{n: "
                "p.detach().to(manager.device) for n, p in model.named_parameters()}), or use torch.autograd.grad"
            )


def _over_copies(wrap: Any) -> Any:
    """``wrap``, of which torch tells nobody, with the copy of a managed parameter that gradients go back from."""

    @functools.wraps(wrap)
    def wrapped(value: torch.Tensor, *args: Any) -> Any:
        # Not while it is compiled: there, copies have taken their place already.
        if not torch.compiler.is_compiling() and is_managed(value) and computes():
            with outside_transforms():
                value = value.view_as(value)
        return wrap(value, *args)

    return wrapped


REPLACEMENTS: list[tuple[Any, str, Any]] = [
    (eager_transforms, "_wrap_for_grad", _over_copies(vars(eager_transforms)["_wrap_for_grad"])),
    (vmap, "_add_batch_dim", _over_copies(vars(vmap)["_add_batch_dim"])),
]
