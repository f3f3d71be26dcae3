"""The node by which autograd reaches a managed parameter.

Owns the only edge between a parameter at home and its identity on the device (`hetero.stm.tensors.managed`: [Note:
identity]).
"""

from typing import Any

import torch

from hetero.autograd import outside_inference, recording
from hetero.devices import storage_of
from hetero.errors import ManageError
from hetero.stm.tensors.exposure import incoming_is_shared
from hetero.stm.tensors.inference import make_inference
from hetero.stm.tensors.managed import ManagedTensor

__all__ = ["Fetch", "for_one_operator", "make_identity", "plain", "run_early", "run_in_turn"]

plain = torch._C.DisableTorchFunctionSubclass
"""Context in which managed parameters are ordinary tensors: without it, fetching would intercept itself."""


class Fetch(torch.autograd.Function):
    """Parameter at home -> its identity on the device; the gradient goes the other way.

    It *returns* the gradient, so that all of autograd's semantics hold: ``autograd.grad`` on parameters, tensor
    hooks, post-accumulate hooks, other paths to the same parameter.
    """

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, tensor: ManagedTensor) -> torch.Tensor:
        ctx.tensor = tensor
        # Where autograd has no gradient at all, ``p.grad`` must stay None and not become zeros.
        ctx.set_materialize_grads(False)
        assert tensor.data is not None
        ctx.version = tensor.data._version
        return tensor.data.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        if gradient is None:
            return None, None
        if gradient.layout is torch.strided and storage_of(gradient) is None:  # several at once, of vmap's
            raise ManageError(
                f"gradients of {ctx.tensor.name} for several outputs at once (is_grads_batched=True, or "
                "vectorize=True): their memory cannot be kept to device_budget. Ask for one output's at a time"
            )
        is_shared = incoming_is_shared(gradient)
        with plain():
            return ctx.tensor.owner.uses.hand_over(ctx.tensor, gradient, is_shared=is_shared), None


# Straight to the C implementation: `Function.apply` itself is intercepted (`hetero.stm.interception.customfunctions`).
_apply_fetch = super(torch.autograd.function._SingleLevelFunction, Fetch).apply
_LAST = (1 << 64) - 1


def run_early(tensor: torch.Tensor) -> int:
    """Let autograd go through the node that made ``tensor`` as soon as its gradient is complete, as it does for
    AccumulateGrad, and not when its turn comes, which it returns (`run_in_turn`)."""
    node: Any = tensor.grad_fn
    turn: int = node._sequence_nr()
    node._set_sequence_nr(_LAST)
    return turn


def run_in_turn(tensor: torch.Tensor, turn: int) -> None:
    """Undo `run_early`, which has returned ``turn``."""
    node: Any = tensor.grad_fn
    node._set_sequence_nr(turn)


def make_identity(tensor: ManagedTensor) -> None:
    """Give ``tensor``, which is resident, the autograd identity that operators receive (tensors: [Note: identity])."""
    tensor.take_identity(_fetched(tensor))


def for_one_operator(tensor: ManagedTensor) -> torch.Tensor:
    """An inference tensor that one operator receives, as autograd finds the parameter to be one, for a resident
    ``tensor``."""
    copy: torch.Tensor = _fetched(tensor)
    make_inference(copy)
    return copy


def _fetched(tensor: ManagedTensor) -> Any:
    # It outlives the caller's inference mode, and must be fit for training then.
    with outside_inference(), recording():
        copy = _apply_fetch(tensor.parameter, tensor)
    run_early(copy)
    tensor.paths.add_fetch_node(copy.grad_fn)
    return copy
