"""``model.device``: what modules that have such a property answer while managed.

Owns the ``device`` properties of a managed model's classes. Hugging Face's models look where their first parameter is,
move inputs there before they call themselves (``generate``), and loops do the same (``batch.to(model.device)``).
Parameters are at home, but that is not where the model wants its inputs. Invariant: such a property answers what it
would within the model's forward. Other instances of the class have parameters that nobody intercepts: they answer as
ever.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hetero.stm.interception.scopes import scope

__all__ = ["DeviceProperties"]

# What stood in each class that is changed now, and for how many managers.
_changed: dict[type, tuple[property, int]] = {}


class DeviceProperties:
    """Those of the classes of ``model`` and its submodules. Keeps the classes, not the model."""

    def __init__(self, model: nn.Module) -> None:
        self._classes = {
            kind
            for found in {type(module) for module in model.modules()}
            for kind in found.__mro__
            if isinstance(vars(kind).get("device"), property)
        }
        self._attached = False

    def attach(self) -> None:
        """They answer where the model computes."""
        self._attached = True
        for kind in self._classes:
            own, users = _changed.get(kind, (vars(kind)["device"], 0))
            if not users and own.fget is not None:
                kind.device = property(_within(own.fget), own.fset, own.fdel, own.__doc__)  # type: ignore[attr-defined]
            _changed[kind] = own, users + 1

    def detach(self) -> None:
        """They are the classes' own again, when no other manager has such a model."""
        if not self._attached:
            return
        self._attached = False
        for kind in self._classes:
            own, users = _changed.pop(kind)
            if users > 1:
                _changed[kind] = own, users - 1
            else:
                kind.device = own  # type: ignore[attr-defined]


def _within(get: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(get)
    def device(self: nn.Module) -> Any:
        if torch.compiler.is_compiling():  # then it is the forward that asks, of device copies
            return get(self)
        with scope():
            return get(self)

    return device
