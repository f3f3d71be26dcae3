"""The fast paths of torch's transformer: in evaluation, one kernel for a whole attention or layer.

Owns that managed modules take them where they would without us. `nn.MultiheadAttention`, `nn.TransformerEncoderLayer`,
and `nn.TransformerEncoder` for what it does with a padding mask, look whether a parameter has ``__torch_function__``,
which managed ones do, and are slower then, with other last digits, and without zeros in the padding. So while one of
them is called, the question is answered as if managed parameters had none; all else that torch asks, it asks of them
(is a gradient wanted, is there a hook). The kernel is then an operator like any other, and intercepted as such.

What compiles asks as well, and finds torch's own function (`asked_as_ever`): a compiler knows that one.
"""

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from hetero.errors import BudgetError
from hetero.stm.interception.parameter import is_managed

__all__ = ["HAVE_FAST_PATHS", "asked_as_ever", "taking_fast_paths"]

HAVE_FAST_PATHS = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)

_WHO_ASKS = {"torch.nn.modules.activation", "torch.nn.modules.transformer"}
_KERNELS = ("_native_multi_head_attention", "_transformer_encoder_layer_fwd")
_WHOLE_MODULE = (
    "hetero: in evaluation torch computes a whole attention or layer by this one operator; "
    "torch.backends.mha.set_fastpath_enabled(False) makes it several, whose last digits may be others"
)

_overrides: Any = torch.overrides
_has_torch_function: Callable[[Any], bool] = _overrides.has_torch_function


@functools.wraps(_has_torch_function)
def _has_other(relevant_args: Any) -> bool:
    if sys._getframe(1).f_globals.get("__name__") in _WHO_ASKS:
        relevant_args = tuple(value for value in relevant_args if not is_managed(value))
    return _has_torch_function(relevant_args)


class _Answers:
    """Which function answers, and how many calls, of any threads, want ours."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls = 0

    def want(self, change: int) -> None:
        with self._lock:
            self._calls += change
            _overrides.has_torch_function = _has_other if self._calls else _has_torch_function

    def give_back(self) -> None:
        with self._lock:
            _overrides.has_torch_function = _has_torch_function


_answers = _Answers()


@contextlib.contextmanager
def asked_as_ever() -> Iterator[None]:
    """Within it, torch's own function answers."""
    _answers.give_back()
    try:
        yield
    finally:
        _answers.want(0)


def taking_fast_paths(
    module: nn.Module, inner: Callable[..., Any], *, is_paused: Callable[[], bool]
) -> Callable[..., Any]:
    """``inner``, the call of ``module``, which is of `HAVE_FAST_PATHS`."""
    asks_itself = not isinstance(
        module, nn.TransformerEncoder
    )  # that asks its first layer whether it is in training

    @functools.wraps(inner)
    def call(*args: Any, **kwargs: Any) -> Any:
        if (asks_itself and module.training) or is_paused():
            return inner(*args, **kwargs)
        _answers.want(1)
        try:
            return inner(*args, **kwargs)
        except BudgetError as error:
            if any(kernel in str(error) for kernel in _KERNELS):
                error.add_note(_WHOLE_MODULE)
            raise
        finally:
            _answers.want(-1)

    return call
