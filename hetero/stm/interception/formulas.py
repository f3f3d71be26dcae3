"""Forward formulas that ATen chooses by whether a dispatch mode is on, as a guard is, computed as without one.

Owns which functions these are and their replacements. For most the guard steps aside (`hetero.stm.running.guard`:
[Note: formulas]). They were found by running PyTorch's operator database with a mode and without, with gradients and
without, and comparing both the results and which operators had been called.

* Cross entropy with label smoothing is divided by the sum of the weights of what is not ignored.
* Where nothing is recorded, singular values and eigenvalues are computed without their vectors, which is another
  algorithm in LAPACK: a mode might want them.
* One matrix times each of several, [1, n, m] by [b, m, p] or the other way round, is one product of larger matrices if
  the one is to have a gradient, or a mode is on, and b of them otherwise.
"""

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch

from hetero.stm.interception.parameter import is_managed
from hetero.stm.interception.transforms import is_transforming
from hetero.stm.running import modes
from hetero.stm.running.guard import unguarded
from hetero.stm.running.retry import Retry
from hetero.stm.tensors.fetch import plain

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


def _spectrum(original: Callable[..., Any], *, asks: Callable[..., bool]) -> Callable[..., Any]:
    """``original``, a function of a matrix, which ``asks`` for its singular values or eigenvalues."""

    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        if _leaves_as_it_is(args, kwargs):
            return original(*args, **kwargs)
        matrix = next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)), None)
        if matrix is None:
            return original(*args, **kwargs)
        # Its name is another for each of them.
        named = {key: value for key, value in kwargs.items() if value is not matrix}
        with plain():
            differs = not _is_recorded(matrix) and asks(matrix, *args[1:], **named)
        return _step_aside(original, args, kwargs, of=matrix) if differs else original(*args, **kwargs)

    return run


def _leaves_as_it_is(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """No mode is on, or is to see it otherwise. Every product of matrices comes here."""
    if torch.compiler.is_compiling() or not torch._C._len_torch_dispatch_stack():
        return True
    # For a managed parameter it is called again, with its copy.
    return any(map(is_managed, (*args, *kwargs.values())))


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
        if _leaves_as_it_is(args, kwargs):
            return original(*args, **kwargs)
        with plain():
            factors = _of_one(args, kwargs)
        if factors is None:
            return original(*args, **kwargs)
        first, second, many = factors
        out = {key: value for key, value in kwargs.items() if key == "out"}
        return torch.bmm(first.expand(many, -1, -1), second.expand(many, -1, -1), **out)

    return run


def _of_one(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, int] | None:
    """The factors, and of how many the product is, if our mode would make another of it."""
    if not _is_of_one(*args, **kwargs):
        return None
    first, second = _factors(args, kwargs)
    one, many = (first, len(second)) if len(first) == 1 else (second, len(first))
    return None if one.requires_grad or not _would_see_no_mode(first, second) else (first, second, many)


def _is_of_one(*args: Any, **kwargs: Any) -> bool:
    """Of one matrix with each of several."""
    given = _factors(args, kwargs)
    if len(given) != 2 or not all(isinstance(value, torch.Tensor) and value.dim() == 3 for value in given):
        return False
    (first, _, inner), (second, other, _) = given[0].shape, given[1].shape
    return first != second and 1 in (first, second) and inner == other


def _factors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    return (*args, *(value for key, value in kwargs.items() if key != "out")) if kwargs else args


def _would_see_no_mode(*tensors: torch.Tensor) -> bool:
    """Without our guard, which is there, ATen would not be in a mode, or transform, nor in a tensor's own."""
    if not modes.active(Retry) or modes.has_others(Retry) or is_transforming():
        return False
    return not any(torch._C._dispatch_keys(tensor).has(torch._C.DispatchKey.Python) for tensor in tensors)


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

# Where it is, and its name there. `torch.Tensor.__rmatmul__` calls the first.
_PRODUCTS: list[tuple[Any, str]] = [
    (torch, "matmul"),
    (torch.Tensor, "matmul"),
    (torch.Tensor, "__matmul__"),
]

INSTEAD: dict[Any, tuple[Callable[..., Any], Callable[..., bool]]] = {}
"""By function, as torch tells managed parameters of it: what computes it, if it says yes to the operands."""

REPLACEMENTS: list[tuple[Any, str, Any]] = [(torch._C._nn, "cross_entropy_loss", _cross_entropy_unguarded)]
"""Functions of torch, as (where, name, what is put there) (`hetero.stm.patches`)."""


class _Method:
    """In the place of a tensor's method: ``run`` to whoever calls it of a tensor; ``original`` to whoever asks the
    class, as torch does for what it tells ``__torch_function__``, and tables of functions do."""

    def __init__(self, original: Callable[..., Any], run: Callable[..., Any]) -> None:
        self._original, self._run = original, run

    def __get__(self, tensor: torch.Tensor | None, owner: Any) -> Callable[..., Any]:
        return self._original if tensor is None else MethodType(self._run, tensor)


def _replace(place: Any, name: str, operator: str, make: Callable[..., Any], applies: Any) -> None:
    original = getattr(place, name)
    replacement, _ = INSTEAD.setdefault(original, (make(original), applies))
    if place is torch.Tensor:
        REPLACEMENTS.append((place, name, _Method(original, replacement)))
    else:
        REPLACEMENTS.append((place, name, replacement))
        # TorchScript knows torch's functions by their identity.
        torch.jit._builtins._register_builtin(replacement, f"aten::{operator}")


for _place, _name, _operator, _asks in _SPECTRA:
    _replace(_place, _name, _operator, functools.partial(_spectrum, asks=_asks), _always)
for _place, _name in _PRODUCTS:
    _replace(_place, _name, "matmul", _product, _is_of_one)
torch.jit._builtins._register_builtin(_cross_entropy_unguarded, "aten::cross_entropy_loss")
