"""Running an operator from within a dispatch mode, as it runs without one.

Owns which dispatch keys count for what an operator calls within itself. Torch leaves out all above the mode's own, as
if they had been dealt with; but an operator that is made of others comes to a mode whole: each one in inference mode,
a few of torch's and those of others at any time.

[Note: keys]
* Conjugate, Negative: a complex tensor's conjugate is a view with a mark, which is looked at under this key. Without it
  what is computed with such a view is computed with the numbers before they were conjugated: ``pinv`` of a complex
  matrix is no inverse.
* Autocast: what is within ``einsum``, or a convolution with padding "same", would not be cast in inference mode, nor
  what is within ``pinv`` or an operator of the user's in any. One whose own operands autocast casts has had its turn.
* ADInplaceOrView tells autograd of views. Without it the transposed weight of a layer without a bias wants no gradient
  in inference mode, as that of a parameter does otherwise, and by that ATen chooses between one product and many, which
  round otherwise.

Found by running PyTorch's operator database with a mode and without, in three types, with autocast and without, with
gradients, without and in inference mode.
"""

import functools
from typing import Any

import torch
from torch._ops import HigherOrderOperator

from hetero.devices.operators import NO_KERNEL

__all__ = ["call"]

_Key = torch._C.DispatchKey
_MARKS = torch._C.DispatchKeySet(_Key.Conjugate) | torch._C.DispatchKeySet(_Key.Negative)
_TRACKS_VIEWS = torch._C.DispatchKeySet(_Key.ADInplaceOrView)
_CASTS = [_Key.__members__[f"Autocast{device}"] for device in ("CPU", "CUDA", "PrivateUse1")]
_OFF = (False,) * len(_CASTS)
# Of torch's own, those that come whole in any mode, because autograd has a formula for them, and show it.
_WHOLE = torch.ops.aten.linalg_pinv.atol_rtol_tensor, torch.ops.aten.linalg_lstsq.default
_entered: Any = vars(torch._C)["_RestorePythonTLSSnapshot"]
"""Within it, keys count as for the caller of the outermost operator (`torch.overrides.enable_reentrant_dispatch`)."""
# By identity, which is as good as an operator's hash, computed in Python: each with what `_comes_whole` tells.
_known: dict[int, tuple[Any, bool, bool]] = {}


def call(func: Any, args: Any, kwargs: Any) -> Any:
    """``func(*args, **kwargs)``, for a mode's ``__torch_dispatch__``."""
    known = _known.get(id(func))
    if known is None:
        known = _known[id(func)] = func, *_comes_whole(func)
    is_inference = torch.is_inference_mode_enabled()
    if not known[1 if is_inference else 2]:
        return func(*args, **kwargs)
    missing = _missing(func, is_inference, _autocasts() if _uncast(func) else _OFF)
    included = torch._C._dispatch_tls_local_include_set()
    excluded = torch._C._dispatch_tls_local_exclude_set()
    with torch._C._ForceDispatchKeyGuard(included, excluded - missing):
        return func(*args, **kwargs)


def _comes_whole(func: Any) -> tuple[bool, bool]:
    """Whether it may, in inference mode and in any."""
    # The dispatcher does not know higher-order operators, which leave keys as they are, nor all of these namespaces'.
    if isinstance(func, HigherOrderOperator) or func.namespace in NO_KERNEL:
        return False, False
    # Nothing is known of operators that are not torch's.
    in_any = func in _WHOLE or func.namespace != "aten"
    return in_any or func._can_decompose(), in_any


def _autocasts() -> tuple[bool, ...]:
    """For each of `_CASTS`, whether autocast was on for whoever called the outermost operator: here it never is."""
    with _entered():
        return tuple([not torch._C._dispatch_tls_is_dispatch_key_excluded(key) for key in _CASTS])


@functools.cache
def _uncast(func: Any) -> list[Any]:
    """Those of `_CASTS` that do nothing with ``func`` itself."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return [key for key in _CASTS if not has(func.name(), key.name)]


@functools.cache
def _missing(func: Any, is_inference: bool, autocasts: tuple[bool, ...]) -> Any:
    """The keys, as a set, that count for what ``func`` calls and torch has left out."""
    keys = _MARKS
    for key, is_on in zip(_CASTS, autocasts, strict=True):
        if is_on and key in _uncast(func):
            keys |= torch._C.DispatchKeySet(key)
    # What returns a view of an operand has its view told to autograd by the dispatcher already.
    returns_views = any(value.alias_info is not None for value in func._schema.returns)
    if is_inference and func._can_decompose() and not returns_views:
        keys |= _TRACKS_VIEWS
    return keys
