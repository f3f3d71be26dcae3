"""Autograd's thread for the device: a backward that runs on it alone, in autograd's own order, and its end.

Owns both. Autograd has a thread for each device and uses the caller's for the host; whichever of two
contributions to a gradient is there first is added first, and the sum of three depends on the order in its last bit.
Unmanaged, all nodes are on the device, and one thread takes them by their sequence numbers. Managed, a loss on
parameters' gradients (``create_graph=True``) or on parameters at home (a penalty) has nodes on both. And where a
backward begins another within (a reentrant checkpoint), what each contributes to the gradient of a weight that both use
is accumulated at home, by the caller's thread and by the device's. So is, where a model has left its settled state
between two forwards of one backward, what the graph of the first has for a parameter that is at home again.

A backward that is begun within a node of the device's thread runs on that thread, nodes of the host included, in the
order of one queue. So here it is: torch's own way for reentrant backward, used as it is.

Whoever is interrupted, or raises, on the caller's thread is out of backward at once; the device's thread finishes the
node that it is in, which may read copies that what comes next drops and fills again.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["await_device_thread", "run_on_device_thread"]


class _Begin(torch.autograd.Function):
    """Its backward runs ``call``, and puts the result into ``box``."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, call: Callable[[], Any], box: list[Any]) -> torch.Tensor:
        ctx.call, ctx.box = call, box
        return anchor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, None]:
        call, ctx.call = ctx.call, None
        ctx.box.append(call())
        return None, None, None


# Straight to the C implementation, as for `hetero.stm.tensors.fetch.Fetch`.
_apply_begin = super(torch.autograd.function._SingleLevelFunction, _Begin).apply
_autograd: Any = torch.autograd
_engine: Any = torch.autograd.Variable._execution_engine
_run_backward = _autograd._engine_run_backward  # before it is replaced by `hetero.stm.interception.backwards`


def run_on_device_thread(device: torch.device, call: Callable[[], Any], *, captures: bool) -> Any:
    """``call()``, which runs a backward, on autograd's thread for ``device``; ``captures``: one that returns gradients.
    Raises what it raises."""
    box: list[Any] = []
    with torch.inference_mode(False), torch.enable_grad():
        anchor = torch.empty(0, device=device, requires_grad=True)
        root = _apply_begin(anchor, call, box)
    # As what runs in it: torch refuses `backward` where gradients are batched, and checkpoints in `grad`.
    inputs = (anchor,) if captures else ()
    _run_backward(
        (root,), (root.detach(),), False, False, inputs, allow_unreachable=True, accumulate_grad=not captures
    )
    return box[0]


def await_device_thread(device: torch.device) -> None:
    """Return once autograd's thread for ``device``, if there is one, is out of every node: what a backward that failed
    had still to do, it leaves out by itself. Not within a backward."""
    without_thread = contextlib.suppress(RuntimeError)  # it came late, or this is a forked child
    with without_thread, torch._C._DisableTorchDispatch(), torch.inference_mode(False), torch.enable_grad():
        root = torch.empty(0, device=device, requires_grad=True).clone()
        # Not by Python's function: an interrupt is let through there (`hetero.stm.interception.interrupts`).
        _engine.run_backward(
            (root,), (root.detach(),), False, False, (), allow_unreachable=True, accumulate_grad=True
        )
