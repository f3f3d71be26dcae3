"""Constructors of sparse tensors, which torch tells no parameter of that they are given.

Owns their replacements: values that are a managed parameter are an operand, as any other operator's.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._device import _device_constructors

from hetero.stm.interception.operators import run_operator
from hetero.stm.interception.parameter import is_managed
from hetero.stm.interception.standins import stand_in
from hetero.stm.tensors.fetch import plain

__all__ = ["REPLACEMENTS"]

_device_constructors()  # torch remembers which these are at the first call: its own


def _told(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        if any(map(is_managed, args)) or any(map(is_managed, kwargs.values())):
            with plain():
                return run_operator(original, args, kwargs)
        return original(*args, **kwargs)

    return run


REPLACEMENTS: list[tuple[Any, str, Any]] = [
    (torch, name, stand_in(_told(getattr(torch, name)), torch, name, name))
    for name in (
        "sparse_coo_tensor",
        "sparse_compressed_tensor",
        "sparse_csr_tensor",
        "sparse_csc_tensor",
        "sparse_bsr_tensor",
        "sparse_bsc_tensor",
    )
]
"""As `hetero.stm.patches` wants them."""
