"""Forward formulas that ATen chooses by whether a dispatch mode is on, as a guard is, computed as without one.

Owns which functions these are and their replacements: the guard steps aside for the call (`hetero.stm.running.guard`:
[Note: formulas]).
They were found by running PyTorch's operator database with a mode and without, with gradients and without. Cross
entropy with label smoothing is divided by the sum of the weights of what is not ignored. Where nothing is recorded,
singular values and eigenvalues are computed without their vectors, which is another algorithm in LAPACK: a mode might
want them.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from hetero.stm.interception.parameter import is_managed
from hetero.stm.running.guard import unguarded

__all__ = ["INSTEAD", "REPLACEMENTS"]

# Bytes for each that they are given: what is made of it besides, and casts.
_FOR_EACH_GIVEN = 16

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


def _spectrum(original: Callable[..., Any], asks: Callable[..., bool]) -> Callable[..., Any]:
    """``original``, a function of a matrix, which ``asks`` for its singular values or eigenvalues."""

    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(*args, **kwargs)
        matrix = next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)), None)
        # For a managed parameter this is called again, with its copy.
        if matrix is None or is_managed(matrix) or _is_recorded(matrix):
            return original(*args, **kwargs)
        # Its name is another for each of them.
        named = {key: value for key, value in kwargs.items() if value is not matrix}
        if not asks(matrix, *args[1:], **named):
            return original(*args, **kwargs)
        return _step_aside(original, args, kwargs, of=matrix)

    return run


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

INSTEAD: dict[Any, Callable[..., Any]] = {}
"""By the function that torch tells a managed parameter of, what computes it."""

REPLACEMENTS: list[tuple[Any, str, Any]] = [(torch._C._nn, "cross_entropy_loss", _cross_entropy_unguarded)]
"""Functions of torch, as (where, name, what is put there) (`hetero.stm.patches`)."""

for _place, _name, _operator, _asks in _SPECTRA:
    _original = getattr(_place, _name)
    _replacement = INSTEAD.setdefault(_original, _spectrum(_original, _asks))
    REPLACEMENTS.append((_place, _name, _replacement))
    # TorchScript knows torch's functions by their identity.
    torch.jit._builtins._register_builtin(_replacement, f"aten::{_operator}")
torch.jit._builtins._register_builtin(_cross_entropy_unguarded, "aten::cross_entropy_loss")
