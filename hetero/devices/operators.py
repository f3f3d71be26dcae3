"""What is to be known of any of torch's operators by whoever runs them one by one, as a dispatch mode does.

Owns the names. Runs nothing.
"""

from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["ALLOCATE_ONLY", "NO_KERNEL", "tensors_of"]

NO_KERNEL = frozenset({"prim", "profiler", "inductor"})
"""Namespaces of operators that touch no memory."""
ALLOCATE_ONLY = ("empty", "new_empty")
"""How the names of operators begin that write nothing into what they make."""


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in an argument or a result: itself, or in lists and tuples of any depth, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_of(item)
