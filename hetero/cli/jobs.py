"""What a user's function returns to be trained: ``(model, optimizer, batches, loss_fn)``.

Owns the check of that tuple, how its loss is called, the step that is traced of it, and with which kernels it steps
unmanaged. Trains nothing.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hetero.errors import ConfigError
from hetero.stm.updates.kernels import split

__all__ = ["LossOf", "as_if_managed", "checked_loss", "no_batches", "read_job", "recipe_of"]

LossOf = Callable[[nn.Module, Any], Tensor]


def read_job(made: object, target: str) -> tuple[nn.Module, torch.optim.Optimizer, Iterable[Any], LossOf]:
    """``made`` by ``target``, checked. A loss of torch itself, which knows nothing of models, becomes one that
    gives it ``model(*inputs)`` and the last of each batch. Raises `ConfigError`."""
    if not isinstance(made, tuple) or len(made) != 4:
        got = f"{len(made)} values" if isinstance(made, tuple) else f"a {type(made).__name__}"
        raise ConfigError(
            f"{target} returned {got}: expected the 4 values (model, optimizer, batches, loss_fn)"
        )
    model, optimizer, batches, loss_fn = made
    for name, value, fits, wanted in (
        ("model", model, isinstance(model, nn.Module), "an nn.Module"),
        ("optimizer", optimizer, isinstance(optimizer, torch.optim.Optimizer), "a torch.optim.Optimizer"),
        ("batches", batches, isinstance(batches, Iterable), "an iterable"),
        ("loss_fn", loss_fn, callable(loss_fn), "a function"),
    ):
        if not fits:
            raise ConfigError(
                f"{target} returned a {type(value).__name__} as {name}: expected (model, optimizer, batches, "
                f"loss_fn), and {name} to be {wanted}"
            )
    required = [
        name
        for name, parameter in inspect.signature(optimizer.step).parameters.items()
        if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    if required:
        raise ConfigError(
            f"{target} returned a {type(optimizer).__name__}, whose step() needs {', '.join(required)}: a job has no "
            "place for that; give an optimizer that steps without, or call hetero.manage in a loop of your own"
        )
    return model, optimizer, batches, _criterion(loss_fn) if _is_of_torch(loss_fn) else loss_fn


def checked_loss(loss_fn: LossOf, model: nn.Module, batch: Any) -> Tensor:
    """``loss_fn(model, batch)``; raises `ConfigError` unless that can be differentiated."""
    loss = loss_fn(model, batch)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ConfigError(f"loss_fn(model, batch) gave {what}: expected a scalar tensor")
    if not loss.requires_grad:
        raise ConfigError(
            "loss_fn(model, batch) gave a tensor that no parameter's gradient can be computed of: all parameters are "
            "frozen, or the loss was detached or computed under no_grad"
        )
    return loss


@contextmanager
def as_if_managed(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Within it, an unmanaged step uses the kernels that are chosen for a managed one."""
    groups = optimizer.param_groups
    optimizer.param_groups, _ = split(optimizer, groups, lambda parameter: True)
    try:
        yield
    finally:
        optimizer.param_groups = groups


def recipe_of(function: Callable[[], Any], target: str) -> Callable[[], tuple[Any, ...]]:
    """For `hetero.trace.trace_recipe`: one step of what ``function`` returns, with the kernels of a managed step. What
    is no job is handed on as it is, for that to check."""

    def recipe() -> tuple[Any, ...]:
        made = function()
        if not (isinstance(made, tuple) and made and isinstance(made[0], nn.Module)):
            return made  # type: ignore[no-any-return]
        model, optimizer, batches, loss_fn = read_job(made, target)

        def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
            optimizer.zero_grad()
            torch.autograd.backward(checked_loss(loss_fn, model, batch))
            with as_if_managed(optimizer):
                optimizer.step()

        for batch in batches:
            return step, model, optimizer, batch
        raise no_batches(target)

    return recipe


def no_batches(target: str) -> ConfigError:
    """The error for a function that returned none."""
    return ConfigError(f"{target} returned no batches: at least 1 is needed")


def _is_of_torch(loss_fn: Any) -> bool:
    owner = type(loss_fn) if isinstance(loss_fn, nn.Module) else loss_fn
    return str(getattr(owner, "__module__", "")).split(".")[0] == "torch"


def _criterion(loss_fn: Callable[..., Any]) -> LossOf:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        if not isinstance(batch, tuple | list) or len(batch) < 2:
            raise ConfigError(
                f"{loss_fn} compares outputs with targets, and a batch is a {type(batch).__name__}: expected "
                "batches (*inputs, target), or a loss_fn(model, batch) of your own"
            )
        *inputs, wanted = batch
        result: Tensor = loss_fn(model(*inputs), wanted)
        return result

    return loss
