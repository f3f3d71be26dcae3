"""A managed model within a transform of ``torch.func``.

Owns the question whether there is one, and the refusal. Within a transform every tensor is wrapped, also those of ours,
and nothing can be fetched. A transform within the model's forward is another matter: of that, parameters are constants,
fetched outside of it. Invariant: a call whose parameters are all the caller's (``torch.func.functional_call``)
is the model's own, and no other is let in.
"""

from torch import nn
from torch._C import _functorch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from hetero.errors import ManageError
from hetero.stm.interception.parameter import is_managed

__all__ = ["check_transformed", "is_transforming", "outside_transforms"]

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
