"""Modules of torch that compute otherwise where no parameter is intercepted: the fast paths of its transformer.

Owns when a call would take one. In evaluation `nn.MultiheadAttention` and `nn.TransformerEncoderLayer` are one kernel
each, unless gradients are wanted or a parameter has ``__torch_function__``, as managed ones do; so such a call has
device copies in their places (`hetero.stm.interception.compiled`). An `nn.TransformerEncoder` that is given a padding
mask looks at its first layer's parameters to decide whether its layers are to compute without the padding (as a nested
tensor, in which padding comes out as zeros). That is a look, and no operand: it sees others in their places.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from hetero.stm.interception.arguments import tensors_in
from hetero.stm.interception.parameter import managed_places

__all__ = ["FAST_IN_EVAL", "WHOLE_MODULE", "give_back_shown", "showing_first_layer", "takes_fast_path"]

FAST_IN_EVAL = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
WHOLE_MODULE = (
    "hetero: in evaluation torch computes it as one operator, with all its parameters on the device at once; "
    "torch.backends.mha.set_fastpath_enabled(False) makes it several, whose last digits may be others"
)

_SHOWN = "_hetero_shown"  # in a module's ``__dict__``: ends the look at what stands for its parameters


def takes_fast_path(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """By what torch demands beside plain parameters: evaluation, and no gradient to be computed. With the rest of its
    conditions unmet it computes as ever, of copies."""
    if module.training or not torch.backends.mha.get_fastpath_enabled():
        return False
    if not torch.is_grad_enabled():
        return True
    given = tensors_in((*args, *kwargs.values()))
    return not any(tensor.requires_grad for tensor in (*module.parameters(), *given))


def showing_first_layer(
    encoder: nn.TransformerEncoder, inner: Callable[..., Any], *, is_paused: Callable[[], bool]
) -> Callable[..., Any]:
    """``inner``, the call of ``encoder``, which sees plain parameters in its first layer until it calls that."""

    @functools.wraps(inner)
    def call(*args: Any, **kwargs: Any) -> Any:
        if is_paused() or not (has_mask(*args, **kwargs) and len(encoder.layers)):
            return inner(*args, **kwargs)
        first = encoder.layers[0]
        if not (isinstance(first, nn.TransformerEncoderLayer) and takes_fast_path(first, args, kwargs)):
            return inner(*args, **kwargs)
        with _shown(first):
            return inner(*args, **kwargs)

    def has_mask(src: Any = None, mask: Any = None, src_key_padding_mask: Any = None, **_: Any) -> bool:
        return src_key_padding_mask is not None

    return call


def give_back_shown(module: nn.Module) -> None:
    """``module`` is called: its own parameters are wanted, if others are shown in their places."""
    if (end := module.__dict__.get(_SHOWN)) is not None:
        end()


@contextlib.contextmanager
def _shown(layer: nn.Module) -> Iterator[None]:
    """In the places of its managed parameters are empty ones, until `give_back_shown` or the end."""
    places = managed_places(layer)
    if not places or _SHOWN in layer.__dict__:
        yield
        return

    def end() -> None:
        if layer.__dict__.pop(_SHOWN, None) is not None:
            for module, key, parameter in places:
                module._parameters[key] = parameter

    layer.__dict__[_SHOWN] = end
    try:
        for module, key, parameter in places:
            empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
            module._parameters[key] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
        yield
    finally:
        end()
