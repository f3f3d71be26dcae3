"""In-place operators on lists of tensors, whose writes nothing may have counted.

Owns their version counters: what shows that a parameter's copy, or home, was written is its version. Fused kernels of
optimizers never move it (torch 2.13), and ``torch._foreach_*_`` moves it on a CPU only where no dispatch mode is
active, be it a guard of ours or a user's `FlopCounterMode`. So whoever runs such an operator counts for it.
"""

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["count_writes", "versions_of_list"]


def versions_of_list(args: Sequence[Any]) -> list[tuple[torch.Tensor, int]]:
    """Of the first of ``args``, which an operator writes to, if that is a list of tensors: each with its version."""
    if not args or type(args[0]) not in (list, tuple):
        return []
    tensors = [value for value in args[0] if isinstance(value, torch.Tensor) and not value.is_inference()]
    return [(tensor, tensor._version) for tensor in tensors]


def count_writes(before: Sequence[tuple[torch.Tensor, int]]) -> None:
    """The operator has run; ``before``: of `versions_of_list`."""
    uncounted = [tensor for tensor, version in before if tensor._version == version]
    if uncounted:
        torch.autograd.graph.increment_version(uncounted)
