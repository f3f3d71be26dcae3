"""The class that a managed parameter has, and whom torch asks about it.

Owns the class and the empty table of functions that are no operators (`hetero.stm.interception.functions` fills it).
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn

from hetero.errors import ManageError
from hetero.stm.interception.scopes import computes
from hetero.stm.tensors.fetch import plain
from hetero.stm.tensors.inference import ordinary_alias
from hetero.stm.tensors.managed import ManagedTensor

__all__ = ["HANDLERS", "ManagedParameter", "is_managed", "managed_in", "managed_of", "managed_places"]


Handler = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]

HANDLERS: dict[Any, Handler] = {}
"""Functions that are not operators, and what is done instead (`hetero.stm.interception.functions` fills it)."""


class ManagedParameter(nn.Parameter):
    """What ``p.__class__`` is while `p` is managed. It remains a `nn.Parameter` whose data live at home."""

    _hetero: ManagedTensor
    # Given by `hetero.stm.interception.operators`, which is made of this class.
    _run_operator: ClassVar[Callable[..., Any]]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with plain():
            handler = HANDLERS.get(func)
            if handler is not None:
                return handler(func, args, kwargs or {})
            # Each class is among them once. Inputs of a class of the user's own are handed on to that.
            return cls._run_operator(func, args, kwargs or {}, hands_on=len(types) > 1)

    def set_(self, *args: Any, **kwargs: Any) -> "ManagedParameter":
        """``p.set_(other)``, of which torch tells nobody, as ``p.data = other``: for a parameter that is the same, but
        that an inference tensor makes it none."""
        if kwargs or len(args) != 1 or not isinstance(args[0], torch.Tensor):
            raise ManageError(
                f"{managed_of(self).name}.set_ to a part of a storage, while managed: use p.copy_(), or call "
                "manager.close() first"
            )
        self.data = ordinary_alias(args[0]) if args[0].is_inference() else args[0]
        return self

    def as_subclass(self, cls: Any) -> Any:
        """``p.as_subclass(cls)``, of which torch tells nobody."""
        with plain():
            return self._run_operator(torch.Tensor.as_subclass, (self, cls), {})

    # A copy is an ordinary parameter: nobody manages it.
    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if not computes():
            self._hetero.owner.home_access.wait(self._hetero)
            if self._hetero.owner.settled is not None:
                self._hetero.owner.settled.onlookers.note_look()
        copy = nn.Parameter(self._memory().clone(memory_format=torch.preserve_format), self.requires_grad)
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._hetero.owner.home_access.wait(self._hetero)
        memory = self._memory()
        with plain():
            twin = nn.Parameter(memory, self.requires_grad)
            twin.__dict__.update({k: v for k, v in self.__dict__.items() if k != "_hetero"})
            return twin.__reduce_ex__(protocol)

    def _memory(self) -> torch.Tensor:
        """Home's, or the device copy's for whoever computes with it now."""
        with plain():
            if not computes():
                return self.detach()
            copy: torch.Tensor = self._run_operator(torch.Tensor.detach, (self,), {})
            return copy


def is_managed(value: object) -> bool:
    """``value`` is a parameter under management."""
    return type(value) is ManagedParameter


def managed_of(parameter: Any) -> ManagedTensor:
    """The record behind a managed parameter."""
    tensor: ManagedTensor = parameter._hetero
    return tensor


def managed_in(optimizer: torch.optim.Optimizer) -> list[ManagedTensor]:
    """The records of its managed parameters, whoever's."""
    return [
        managed_of(parameter)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if is_managed(parameter)
    ]


def managed_places(module: nn.Module) -> list[tuple[nn.Module, str, nn.Parameter]]:
    """Where its managed parameters are: in ``_parameters`` of which of its modules, under which name."""
    return [
        (submodule, key, parameter)
        for submodule in module.modules()
        for key, parameter in submodule._parameters.items()
        if parameter is not None and is_managed(parameter)
    ]
