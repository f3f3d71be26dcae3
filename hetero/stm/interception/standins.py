"""Functions that stand in for torch's own.

Owns how they are found by those who do not call them.
"""

from typing import Any

import torch

__all__ = ["stand_in"]


def stand_in(replacement: Any, place: Any, name: str, operator: str) -> Any:
    """``replacement``, which is to be put at ``place.name``: found there by pickle, and as ``aten::operator`` by
    TorchScript, which knows torch's functions by their identity."""
    replacement.__module__, replacement.__name__, replacement.__qualname__ = place.__name__, name, name
    torch.jit._builtins._register_builtin(replacement, f"aten::{operator}")
    return replacement
