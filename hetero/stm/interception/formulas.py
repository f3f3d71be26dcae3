"""Forward formulas that ATen chooses by whether a dispatch mode is on, as a guard is, computed as without one.

Owns which functions these are and their replacements. For most the guard steps aside (`hetero.stm.running.guard`:
[Note: formulas]). They were found by running PyTorch's operator database with a mode and without, with gradients and
without, and comparing both the results and which operators had been called.

* Cross entropy with label smoothing is divided by the sum of the weights of what is not ignored.
* Where nothing is recorded, singular values and eigenvalues are computed without their vectors, which is another
  algorithm in LAPACK: a mode might want them.
* The lengths that CTC's loss is given as tensors are taken for numbers, wherever they are, unless a mode is on or cuDNN
  computes it.
* One matrix times each of several, [1, n, m] by [b, m, p] or the other way round, is one product of larger matrices if
  the one is to have a gradient, or a mode is on, and b of them otherwise.
"""

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from hetero.stm.interception.parameter import is_managed
from hetero.stm.interception.standins import stand_in
from hetero.stm.interception.transforms import is_transforming
from hetero.stm.running import modes
from hetero.stm.running.guard import unguarded
from hetero.stm.running.retry import Retry

__all__ = ["INSTEAD", "REPLACEMENTS"]

# Bytes that they take for each that they are given: up to 4.3 were measured (svd's, of a tall matrix), on a device
# whose kernels have no workspaces of their own.
_FOR_EACH_GIVEN = 16

# What is asked of tensors within it no class or mode is told of.
_unseen = torch._C.DisableTorchFunction

_cross_entropy: Any = torch._C._nn.cross_entropy_loss
_MEAN = 1  # as ATen counts reductions


def _step_aside(
    original: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    of: torch.Tensor,
    by_values: bool = False,
) -> Any:
    """``original(*args, **kwargs)`` with no guard's mode on, after making room for many times what it is given ``of``.

    What that is too little for is explained. ``by_values``: its memory depends on values."""
    with unguarded() as retries:
        for retry in retries:
            retry.make_room(_FOR_EACH_GIVEN * of.nbytes)
            if by_values:
                retry.note_values()
        try:
            return original(*args, **kwargs)
        except torch.OutOfMemoryError as error:
            if not retries:
                raise
            raise retries[0].explain(original.__name__, error) from error


@functools.wraps(_cross_entropy)
def _cross_entropy_unguarded(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: int = _MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Any:
    given = (input, target, weight, reduction, ignore_index, label_smoothing)
    if weight is None or reduction != _MEAN or label_smoothing <= 0:
        return _cross_entropy(*given)
    return _step_aside(_cross_entropy, given, {}, of=input, by_values=True)


_ctc_loss: Any = torch.ctc_loss


@functools.wraps(_ctc_loss)
def _ctc_loss_by_numbers(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: int = _MEAN,
    zero_infinity: bool = False,
) -> Any:
    lengths = input_lengths, target_lengths
    given = log_probs, targets, *lengths
    if not _is_unaffected(given, {}) and all(map(_is_ordinary, given)) and not _is_watched():
        with _unseen():
            if not (log_probs.is_cuda and torch._use_cudnn_ctc_loss(*given, blank)):
                # Of one sequence alone they may have no dimension.
                lengths = input_lengths.reshape(-1).tolist(), target_lengths.reshape(-1).tolist()
    return _ctc_loss(log_probs, targets, *lengths, blank, reduction, zero_infinity)


def _spectrum(original: Callable[..., Any], *, asks: Callable[..., bool]) -> Callable[..., Any]:
    """``original``, a function of a matrix, which ``asks`` for its singular values or eigenvalues."""

    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        if _is_unaffected(args, kwargs):
            return original(*args, **kwargs)
        given = (*args, *(value for key, value in kwargs.items() if key != "out"))
        matrix = next((value for value in given if isinstance(value, torch.Tensor)), None)
        if matrix is None:
            return original(*args, **kwargs)
        # Its name is another for each of them.
        named = {key: value for key, value in kwargs.items() if value is not matrix}
        with _unseen():
            differs = not _is_recorded(matrix) and asks(matrix, *args[1:], **named)
        return _step_aside(original, args, kwargs, of=matrix) if differs else original(*args, **kwargs)

    return run


def _is_unaffected(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """The common case: no mode is on, or a compiler's tracing is."""
    if torch.compiler.is_compiling() or not torch._C._len_torch_dispatch_stack():
        return True
    # For a managed parameter it is called again, with its copy.
    return any(map(is_managed, (*args, *kwargs.values())))


def _is_ordinary(value: Any) -> bool:
    return type(value) in (torch.Tensor, nn.Parameter)


def _is_recorded(matrix: torch.Tensor) -> bool:
    """The vectors are computed in any case."""
    return matrix.requires_grad and torch.is_grad_enabled()


def _always(*args: Any, **kwargs: Any) -> bool:
    return True


def _norm_asks(matrix: torch.Tensor, ord: Any = None, dim: Any = None, *args: Any, **kwargs: Any) -> bool:
    return ord in (2, -2, "nuc") and (matrix.dim() == 2 if dim is None else not isinstance(dim, int))


def _matrix_norm_asks(matrix: torch.Tensor, ord: Any = "fro", *args: Any, **kwargs: Any) -> bool:
    return ord in (2, -2, "nuc")


def _svd_asks(matrix: torch.Tensor, some: bool = True, compute_uv: bool = True, **kwargs: Any) -> bool:
    return not compute_uv


def _product(original: Callable[..., Any]) -> Callable[..., Any]:
    """``original``, a product of matrices."""

    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        if _is_unaffected(args, kwargs):
            return original(*args, **kwargs)
        first, second = _factors(args, kwargs)
        with _unseen():
            one = _one_for_several(first, second)
        if one is None:
            return original(*args, **kwargs)
        # The others are given as they are: autocast keeps casts of leaves.
        if one is first:
            return torch.bmm(first.expand(len(second), -1, -1), second)
        return torch.bmm(first, second.expand(len(first), -1, -1))

    return run


def _factors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    if len(args) == 2 and not kwargs:
        return args
    named = dict(zip(("input", "other"), args, strict=False)) | kwargs
    return (named["input"], named["other"]) if named.keys() == {"input", "other"} else (None, None)


def _one_for_several(first: Any, second: Any) -> torch.Tensor | None:
    """The one matrix that is multiplied with each of several, if only our mode would make one product of that."""
    for value in (first, second):
        # Of others' classes and on the meta device, and of other layouts, it is one product in any case, or none.
        if not _is_ordinary(value) or value.is_meta or value.is_nested:
            return None
        if value.layout is not torch.strided or value.dim() != 3:
            return None
    if len(first) == len(second) or 1 not in (len(first), len(second)) or first.shape[2] != second.shape[1]:
        return None
    one: torch.Tensor = first if len(first) == 1 else second
    return None if one.requires_grad or _is_watched() else one


def _is_watched() -> bool:
    """Somebody besides our guard, which is on, would see other operators; or ATen is in another mode, or a transform,
    anyway."""
    if not modes.active(Retry) or modes.has_others(Retry) or is_transforming():
        return True
    # This one only says where to make new tensors.
    return not all(isinstance(mode, DeviceContext) for mode in _get_current_function_mode_stack())


# Where it is, its name there and as an operator, and when it asks for them.
_SPECTRA: list[tuple[Any, str, str, Callable[..., bool]]] = [
    *(
        (torch.linalg, name, f"linalg_{name}", _always)
        for name in ("svdvals", "eigvalsh", "eigvals", "cond", "matrix_rank")
    ),
    (torch.linalg, "norm", "linalg_norm", _norm_asks),
    (torch.linalg, "matrix_norm", "linalg_matrix_norm", _matrix_norm_asks),
    (torch, "nuclear_norm", "nuclear_norm", _always),
    (torch._VF, "nuclear_norm", "nuclear_norm", _always),  # where ``torch.norm`` calls it
    (torch, "svd", "svd", _svd_asks),
    (torch.Tensor, "svd", "svd", _svd_asks),
]

# Likewise. `torch.Tensor.__rmatmul__` calls the first.
_PRODUCTS: list[tuple[Any, str, str]] = [
    (torch, "matmul", "matmul"),
    (torch.linalg, "matmul", "linalg_matmul"),
    (torch.Tensor, "matmul", "matmul"),
    (torch.Tensor, "__matmul__", "matmul"),
]

INSTEAD: dict[Any, Callable[..., Any]] = {}
"""By function, as torch tells managed parameters of it: what computes it with their copies."""

REPLACEMENTS: list[tuple[Any, str, Any]] = [
    (
        torch._C._nn,
        "cross_entropy_loss",
        stand_in(_cross_entropy_unguarded, torch._C._nn, "cross_entropy_loss", "cross_entropy_loss"),
    ),
    (torch, "ctc_loss", stand_in(_ctc_loss_by_numbers, torch, "ctc_loss", "ctc_loss")),
]
"""Functions of torch, as (where, name, what is put there) (`hetero.stm.patches`)."""


class _Method:
    """In the place of a tensor's method: what computes it instead to whoever calls it of a tensor; ``original`` to
    whoever asks the class, as torch does for what it tells ``__torch_function__``, and tables of functions do."""

    def __init__(self, original: Callable[..., Any]) -> None:
        self._original = original

    def __get__(self, tensor: torch.Tensor | None, owner: Any) -> Callable[..., Any]:
        return self._original if tensor is None else MethodType(INSTEAD[self._original], tensor)


def _replace(place: Any, name: str, operator: str, make: Callable[..., Any]) -> None:
    original = getattr(place, name)
    is_method = place is torch.Tensor
    if original not in INSTEAD:
        replacement = make(original)
        INSTEAD[original] = replacement if is_method else stand_in(replacement, place, name, operator)
    REPLACEMENTS.append((place, name, _Method(original) if is_method else INSTEAD[original]))


for _place, _name, _operator, _asks in _SPECTRA:
    _replace(_place, _name, _operator, functools.partial(_spectrum, asks=_asks))
for _place, _name, _operator in _PRODUCTS:
    _replace(_place, _name, _operator, _product)
