"""Which functions of torch write to what they are given, by their names.

Owns the rule: a name that ends with an underscore, and Python's operators that assign.
"""

from collections.abc import Callable
from typing import Any

__all__ = ["writes_in_place"]

_IN_PLACE = frozenset(
    f"__{name}__"
    for name in [
        "iadd",
        "isub",
        "imul",
        "idiv",
        "itruediv",
        "ifloordiv",
        "imod",
        "ipow",
        "iand",
        "ior",
        "ixor",
        "ilshift",
        "irshift",
        "setitem",
        "set",
    ]
)


def writes_in_place(func: Callable[..., Any]) -> bool:
    """``func`` writes to its first argument, be that a tensor or a list of them."""
    name = getattr(func, "__name__", "")
    return (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE
