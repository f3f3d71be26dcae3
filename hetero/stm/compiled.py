"""Compiled submodules: operators whose operands are all of a submodule's parameters.

Owns the wrapping of `torch.compile`d submodules inside a managed model. Nothing can be intercepted inside a compiled
region, so the call as a whole is the operator: device copies of every parameter below the submodule take their
places in ``module._parameters`` while it runs, and the parameters return when it ends, however it ends.
Invariant: outside of such a call ``_parameters`` holds the user's own parameters.

Compile per block: all of a region's parameters are on the device at once, in forward and in backward.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from hetero.stm.fetch import plain
from hetero.stm.guard import unguarded
from hetero.stm.intercept import in_scope, is_managed, managed_of, substituted
from hetero.stm.outside import full_copies, keeps_its_type
from hetero.stm.tensors import ManagedTensor

__all__ = ["CompiledCalls"]

# In inference these take one fused kernel for the whole module, unless a parameter is intercepted.
_FAST_IN_EVAL = (nn.MultiheadAttention, nn.TransformerEncoderLayer)

_SLOT = "_compiled_call_impl"  # torch's own slot for a replaced call; it is not copied nor pickled


class CompiledCalls:
    """The wrapped calls of one model's compiled submodules. `attach` once, `detach` once."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._wrapped: list[tuple[nn.Module, Callable[..., Any] | None, Callable[..., Any]]] = []
        # Parameters are ordinary ones on the device (`hetero.stm.settled`).
        self._is_paused = False

    def attach(self) -> None:
        """Wrap every outermost compiled submodule (the model itself included)."""
        for name, submodule in _outermost_compiled(self._model, ""):
            own = submodule.__dict__.get(_SLOT)
            inner = own or submodule._call_impl
            label = f"compiled {name or type(submodule).__name__}"
            call = _substituting(
                submodule,
                label,
                inner,
                inference_only=isinstance(submodule, _FAST_IN_EVAL),
                is_paused=lambda: self._is_paused,
            )
            submodule.__dict__[_SLOT] = (
                call  # past OptimizedModule's __setattr__, which would set it on the original
            )
            self._wrapped.append((submodule, own, call))

    def own_call(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The user's own, if ``call`` is one of ours."""
        for submodule, own, ours in self._wrapped:
            if ours is call:
                return own or submodule._call_impl
        return call

    def pause(self) -> None:
        """Calls are the user's own until `resume`; one that somebody has wrapped since hands on."""
        self._is_paused = True
        for submodule, own, call in self._wrapped:
            if submodule.__dict__.get(_SLOT) is call:
                _set_slot(submodule, own)

    def resume(self) -> None:
        """They are ours again."""
        self._is_paused = False
        for submodule, own, call in self._wrapped:
            if submodule.__dict__.get(_SLOT) is own:
                _set_slot(submodule, call)

    def detach(self) -> None:
        """Give back the calls as they were, where nobody has replaced ours since."""
        for submodule, own, call in self._wrapped:
            if submodule.__dict__.get(_SLOT) is call:
                _set_slot(submodule, own)
        self._wrapped.clear()


def _set_slot(module: nn.Module, call: Callable[..., Any] | None) -> None:
    if call is None:
        module.__dict__.pop(_SLOT, None)
    else:
        module.__dict__[_SLOT] = call


def _outermost_compiled(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    compiled_forward = hasattr(module.__dict__.get("forward"), "_torchdynamo_orig_callable")
    if (
        isinstance(module, _FAST_IN_EVAL)
        or _is_optimized(module)
        or module.__dict__.get(_SLOT) is not None
        or compiled_forward
    ):
        yield name, module
        return
    for child_name, child in module.named_children():
        yield from _outermost_compiled(child, f"{name}.{child_name}" if name else child_name)


def _is_optimized(module: nn.Module) -> bool:
    # Not imported for this: the compiler takes longer to load than everything else of hetero.
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    return compiler is not None and isinstance(module, compiler.OptimizedModule)


def _substituting(
    submodule: nn.Module,
    label: str,
    inner: Callable[..., Any],
    *,
    inference_only: bool,
    is_paused: Callable[[], bool],
) -> Callable[..., Any]:
    @functools.wraps(inner)
    def call(*args: Any, **kwargs: Any) -> Any:
        if is_paused() or (inference_only and (submodule.training or torch.is_grad_enabled())):
            return inner(*args, **kwargs)
        places = _managed_places(submodule)
        if not places or not _on_device(places[0][2], args, kwargs):
            return inner(*args, **kwargs)
        operands: list[ManagedTensor] = []
        for _, _, parameter in places:
            tensor = managed_of(parameter)
            if tensor not in operands:
                operands.append(tensor)
        # Modes would make the compiler run everything eagerly, which is not the same arithmetic.
        outside = not in_scope() and keeps_its_type(operands)
        given = full_copies(operands) if outside else substituted(operands, label)
        with plain(), given as copies, unguarded():
            try:
                for module, key, parameter in places:
                    module._parameters[key] = copies[id(parameter)]  # type: ignore[assignment]
                with torch._C._EnableTorchFunction():
                    return inner(*args, **kwargs)
            finally:
                for module, key, parameter in places:
                    module._parameters[key] = parameter

    # What torch.compiler.disable(recursive=False) does, without loading the compiler.
    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    return call


def _managed_places(submodule: nn.Module) -> list[tuple[nn.Module, str, nn.Parameter]]:
    return [
        (module, key, parameter)
        for module in submodule.modules()
        for key, parameter in module._parameters.items()
        if parameter is not None and is_managed(parameter)
    ]


def _on_device(parameter: nn.Parameter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if in_scope() or torch._C._current_graph_task_id() != -1:
        return True
    device = managed_of(parameter).owner.device
    return any(isinstance(v, torch.Tensor) and v.device == device for v in (*args, *kwargs.values()))
