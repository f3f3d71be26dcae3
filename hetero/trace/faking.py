"""Standing in fake tensors for a step's own, so that it runs without memory or device.

Owns the replacement of parameters, buffers, gradients and optimizer states inside the user's own modules and
optimizers while the context lasts. Invariant: on exit, also after an error, every module and optimizer holds
exactly the objects it held before, and no real byte was read or written. Tensors that share a storage share
one when fake.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hetero.errors import ConfigError, PlanError

__all__ = ["Faker", "fake_device", "fake_mode", "reachable"]


def fake_mode() -> FakeTensorMode:
    """A mode in which ``loss.item()`` gives a symbol (loggable), and anything that depends on its value
    raises."""
    return FakeTensorMode(shape_env=ShapeEnv(allow_dynamic_output_shape_ops=False))


def fake_device(device: torch.device | str | None) -> torch.device | None:
    """The device fake tensors claim to be on. Raises `ConfigError` for one whose backward this torch cannot
    run."""
    if device is None:
        return None
    wanted = torch.device(device)
    here = torch.accelerator.current_accelerator()
    if wanted.type == "cpu" or (here is not None and wanted.type == here.type):
        return wanted
    raise ConfigError(
        f"device={str(wanted)!r}: this torch has no {wanted.type} device, and autograd cannot run backward "
        "on fake tensors of a device it does not have; trace with device='cpu', where the sizes are the same"
    )


def reachable(step: Callable[..., object]) -> list[object]:
    """What ``step`` reaches without being passed it: closure cells, globals it names, its object's
    attributes."""
    if isinstance(step, partial):
        return [*step.args, *step.keywords.values(), *reachable(step.func)]
    if isinstance(step, torch.nn.Module):
        return [step]
    owner = getattr(step, "__self__", None)
    if isinstance(owner, torch.nn.Module):
        return [owner]
    found: list[object] = list(vars(owner).values()) if hasattr(owner, "__dict__") else []
    function = inspect.unwrap(getattr(step, "__func__", step))
    if inspect.isfunction(function):
        variables = inspect.getclosurevars(function)
        found += [*variables.nonlocals.values(), *variables.globals.values()]
    elif owner is None and hasattr(step, "__dict__"):
        found += vars(step).values()
    return found


class Faker:
    """Makes fake counterparts on ``device`` (default: where each tensor is; meta tensors become CPU ones)."""

    def __init__(self, mode: FakeTensorMode, device: torch.device | None) -> None:
        self._mode = mode
        self._device = device
        self._bases: dict[int, torch.Tensor] = {}
        self._fakes: dict[int, torch.Tensor] = {}
        self._originals: list[torch.Tensor] = []  # held, so that no id or address above is reused

    @contextmanager
    def standing_in(self, objects: list[object]) -> Iterator[None]:
        """Replace what the modules and optimizers among ``objects`` (containers included) hold."""
        leaves = pytree.tree_leaves(objects)
        undo: list[Callable[[], None]] = []
        try:
            for module in _unique(leaf for leaf in leaves if isinstance(leaf, torch.nn.Module)):
                for child in module.modules():
                    self._enter_module(child, undo)
            for optimizer in _unique(leaf for leaf in leaves if isinstance(leaf, torch.optim.Optimizer)):
                self._enter_optimizer(optimizer, undo)
            yield
        finally:
            for restore in reversed(undo):
                restore()

    def fake_tree(self, value: Any) -> Any:
        """``value`` with every tensor in it fake; modules and optimizers stay the objects they are."""
        return pytree.tree_map_only(torch.Tensor, self.fake, value)

    def fake_foreign(self, tensor: torch.Tensor) -> torch.Tensor:
        """A fake for a real tensor that turns up in the step; raises `PlanError` if it is a parameter."""
        if isinstance(tensor, FakeTensor):
            return tensor
        if tensor.requires_grad and tensor.is_leaf:
            raise PlanError(
                f"the step uses a real parameter of shape {tuple(tensor.shape)} under fake tensors: pass its "
                "model (and the optimizer) to trace_step as arguments, or trace a real step with fake=False"
            )
        return self.fake(tensor)

    def fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """The fake counterpart of ``tensor``, always the same one; parameters stay parameters."""
        if isinstance(tensor, FakeTensor):
            return tensor
        known = self._fakes.get(id(tensor))
        if known is not None:
            return known
        if _has_no_storage(tensor):
            raise PlanError(
                f"a {type(tensor).__name__} with layout {tensor.layout} has no fake counterpart here: "
                "trace a real step with fake=False"
            )
        with torch.no_grad(), self._mode:
            fake = self._view_of_base(tensor)
            if isinstance(tensor, torch.nn.Parameter):
                fake = torch.nn.Parameter(fake, requires_grad=tensor.requires_grad)
                vars(fake).update(vars(tensor))
            elif tensor.requires_grad:
                fake = fake.detach().requires_grad_()
        self._fakes[id(tensor)] = fake
        self._originals.append(tensor)
        if tensor.is_leaf and tensor.grad is not None:
            fake.grad = self.fake(tensor.grad)
        return fake

    def _view_of_base(self, tensor: torch.Tensor) -> torch.Tensor:
        device = self._device or (torch.device("cpu") if tensor.is_meta else tensor.device)
        if tensor.dim() == 0 and tensor.device.type == "cpu" and not isinstance(tensor, torch.nn.Parameter):
            # Optimizers count steps in such scalars and read them: keep the value, as a constant. They also
            # stay on the CPU whatever the device, as they would.
            return torch.tensor(self._value(tensor), dtype=tensor.dtype)
        storage = tensor.untyped_storage()
        base = self._bases.get(storage._cdata)
        if base is None:
            base = torch.empty(storage.nbytes() // tensor.itemsize, dtype=tensor.dtype, device=device)
            self._bases[storage._cdata] = base
        if base.dtype != tensor.dtype:
            base = base.view(tensor.dtype)
        return base.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())

    @staticmethod
    def _value(scalar: torch.Tensor) -> Any:
        with unset_fake_temporarily():
            return scalar.detach().item()

    def _enter_module(self, module: torch.nn.Module, undo: list[Callable[[], None]]) -> None:
        slots_of_module: tuple[dict[str, Any], ...] = (module._parameters, module._buffers, vars(module))
        for slots in slots_of_module:
            before = dict(slots)
            undo.append(partial(_put_back, slots, before))
            for key, value in before.items():
                if torch.nn.parameter.is_lazy(value):
                    raise PlanError(
                        f"{type(module).__name__}.{key} is not initialised yet: run the model once"
                    )
                if isinstance(value, torch.Tensor):
                    slots[key] = self.fake(value)

    def _enter_optimizer(self, optimizer: torch.optim.Optimizer, undo: list[Callable[[], None]]) -> None:
        state, groups = optimizer.state, optimizer.param_groups
        undo.append(partial(setattr, optimizer, "state", state))
        undo.extend(partial(_put_back, group, dict(group)) for group in groups)
        for group in groups:
            group["params"] = [self.fake(parameter) for parameter in group["params"]]
            for key, value in group.items():
                if isinstance(value, torch.Tensor):
                    group[key] = self.fake(value)
        fakes = {self.fake(key): self.fake_tree(dict(value)) for key, value in state.items()}
        optimizer.state = type(state)(state.default_factory, fakes)


def _has_no_storage(tensor: torch.Tensor) -> bool:
    wraps_others: bool = is_traceable_wrapper_subclass(tensor)
    return wraps_others or tensor.layout != torch.strided


def _put_back(slots: dict[str, Any], before: dict[str, Any]) -> None:
    slots.clear()
    slots.update(before)


def _unique(items: Iterator[Any]) -> list[Any]:
    return list({id(item): item for item in items}.values())
