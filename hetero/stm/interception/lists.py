"""``torch._foreach_*_`` on lists of plain tensors, within a managed forward.

Owns their replacements. Such a tensor may be an alias of a parameter's copy (``p.data``), whose version shows that it
was written, and on CUDA nobody moves it (`hetero.stm.tensors.listwrites`).
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from hetero.stm.interception.scopes import in_scope
from hetero.stm.tensors.listwrites import count_writes, versions_of_list

__all__ = ["REPLACEMENTS"]


def _counted(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not in_scope() or not _are_plain(args):
            return original(*args, **kwargs)
        before = versions_of_list(args)
        result = original(*args, **kwargs)
        count_writes(before)
        return result

    return run


def _are_plain(args: tuple[Any, ...]) -> bool:
    """Managed parameters in the list are seen to where operators on them are."""
    is_list = bool(args) and type(args[0]) in (list, tuple)
    return is_list and all(type(value) is torch.Tensor for value in args[0])


REPLACEMENTS: list[tuple[Any, str, Any]] = [
    (torch, name, _counted(function))
    for name, function in list(vars(torch).items())
    if name.startswith("_foreach_") and name.endswith("_")
]
