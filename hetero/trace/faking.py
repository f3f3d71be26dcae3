"""Standing in fake tensors for a step's own, so that it runs without memory or device.

Owns the replacement of parameters, buffers, gradients and optimizer states inside the user's own modules and
optimizers while the context lasts. Invariant: on exit, also after an error, every module and optimizer holds
exactly the objects it held before, and none of their bytes was read or written. Tensors that share a storage share
one when fake.
"""

import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import CellType
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils import _pytree as pytree
from torch.utils._foreach_utils import _get_foreach_kernels_supported_devices
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hetero.errors import ConfigError, PlanError
from hetero.trace.fakemode import give_way, grouped_mm, most_known

__all__ = ["FakeDevice", "Faker", "reachable"]

_aten = torch.ops.aten
_ROWS = {_aten.linspace.default, _aten.arange.default, _aten.arange.start, _aten.arange.start_step}


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeDevice:
    """Where fake tensors are (None: where each real one is), and what the trace calls that place.

    They differ when a device is asked for that this torch does not have: autograd cannot run backward on its
    fake tensors. They are then on the CPU, optimizers choose as they would on an accelerator, and ``called``
    is its name.
    """

    tensors: torch.device | None
    called: torch.device | None

    @staticmethod
    def of(device: torch.device | str | None) -> "FakeDevice":
        """The place for a ``device`` keyword; raises `ConfigError` for ``meta``, which holds no bytes."""
        if device is None:
            return FakeDevice(tensors=None, called=None)
        wanted = torch.device(device)
        if wanted.type == "meta":
            raise ConfigError(
                "device='meta' holds no bytes: name the device to be predicted, 'cuda' or 'cpu'"
            )
        here = torch.accelerator.current_accelerator()
        if wanted.type == "cpu" or (here is not None and wanted.type == here.type):
            return FakeDevice(tensors=wanted, called=None)
        return FakeDevice(tensors=torch.device("cpu"), called=torch.device(wanted.type, wanted.index or 0))


def reachable(step: Callable[..., object]) -> list[object]:
    """What ``step`` reaches without being passed it: closure, globals it names, attributes of its object."""
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
        named = function.__code__.co_names
        found += [function.__globals__[name] for name in named if name in function.__globals__]
        found += [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
    elif owner is None and hasattr(step, "__dict__"):
        found += vars(step).values()
    return found


def _is_filled(cell: CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:  # a name that is not bound yet
        return False
    return True


class Faker:
    """Makes fake counterparts on a device; meta tensors become CPU ones if none is named."""

    def __init__(self, mode: FakeTensorMode, device: FakeDevice) -> None:
        self._mode = mode
        self._device = device.tensors
        self._called = device.called
        self._bases: dict[int, torch.Tensor] = {}
        self._fakes: dict[int, torch.Tensor] = {}
        self._originals: list[torch.Tensor] = []  # held, so that no id or address above is reused
        # Gradients and states die in the step when their owner drops them: nothing of theirs is kept here.
        self._passing: dict[int, torch.Tensor] = {}
        self._chosen: list[dict[str, Any]] = []
        self._overflow_flags: list[weakref.ref[torch.Tensor]] = []

    @contextmanager
    def standing_in(self, objects: list[object], args: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        """Replace what modules and optimizers among ``objects`` hold (containers included); fake ``args``."""
        leaves = pytree.tree_leaves(objects)
        undo: list[Callable[[], None]] = [
            register_optimizer_step_pre_hook(self._choose_foreach).remove,
            register_optimizer_step_post_hook(self._unchoose_foreach).remove,
        ]
        try:
            for module in _unique(leaf for leaf in leaves if isinstance(leaf, torch.nn.Module)):
                for child in module.modules():
                    self._enter_module(child, undo)
            for optimizer in _unique(leaf for leaf in leaves if isinstance(leaf, torch.optim.Optimizer)):
                self._enter_optimizer(optimizer, undo)
            for scaler in _unique(leaf for leaf in leaves if isinstance(leaf, torch.amp.GradScaler)):
                self._enter_scaler(scaler, undo)
            fake_args = pytree.tree_map_only(torch.Tensor, self.fake, args)
            self._passing.clear()
            with give_way(self._mode):
                yield fake_args
        finally:
            for restore in reversed(undo):
                restore()

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

    def call(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator. A gradient scaler that asks whether gradients overflowed hears that they did not; rows of
        numbers that are as short as `most_known` have values."""
        if func is _aten._amp_foreach_non_finite_check_and_unscale_.default:
            self._overflow_flags.append(weakref.ref(args[1]))
        if func is _aten._local_scalar_dense.default and any(
            args[0] is flag() for flag in self._overflow_flags
        ):
            return 0.0
        if func is _aten._grouped_mm.default:
            return grouped_mm(*args, **kwargs)
        if func is _aten.lift_fresh.default and not isinstance(args[0], FakeTensor):
            return self._lift(args[0])
        out = func(*args, **kwargs)
        if func in _ROWS and out.numel() <= most_known() and not any(map(_is_symbol, args)):
            return self._with_values(partial(func, *args, **kwargs))
        return out

    def _lift(self, tensor: torch.Tensor) -> torch.Tensor:
        """The fake counterpart of what ``torch.tensor(...)`` has made, which nobody else holds."""
        if tensor.numel() <= most_known() and self._device in (None, tensor.device):
            return self._with_values(tensor.clone)
        with torch.no_grad(), self._mode:
            return self._view_of_base(tensor, {})

    def _with_values(self, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The fake counterpart of what ``make`` makes, with its values."""
        with unset_fake_temporarily():
            real = make()
        return self._mode.fake_tensor_converter.from_real_tensor(self._mode, real, make_constant=True)

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
            fake = self._view_of_base(tensor, self._bases)
            if isinstance(tensor, torch.nn.Parameter):
                fake = torch.nn.Parameter(fake, requires_grad=tensor.requires_grad)
                vars(fake).update(vars(tensor))
            elif tensor.requires_grad:
                fake = fake.detach().requires_grad_()
        self._fakes[id(tensor)] = fake
        self._originals.append(tensor)
        if tensor.is_leaf and tensor.grad is not None:
            fake.grad = self._fake_passing(tensor.grad)
        return fake

    def _fake_passing(self, tensor: torch.Tensor) -> torch.Tensor:
        with torch.no_grad(), self._mode:
            return self._view_of_base(tensor, self._passing)

    def _view_of_base(self, tensor: torch.Tensor, bases: dict[int, torch.Tensor]) -> torch.Tensor:
        device = self._device or (torch.device("cpu") if tensor.is_meta else tensor.device)
        if tensor.dim() == 0 and tensor.device.type == "cpu" and not isinstance(tensor, torch.nn.Parameter):
            # Optimizers count steps in such scalars and read them: keep the value, as a constant. They also
            # stay on the CPU whatever the device, as they would.
            return torch.tensor(self._value(tensor), dtype=tensor.dtype, device="cpu")
        storage = tensor.untyped_storage()
        base = bases.get(storage._cdata)
        if base is None:
            base = torch.empty(storage.nbytes() // tensor.itemsize, dtype=tensor.dtype, device=device)
            bases[storage._cdata] = base
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
            for key, value in list(group.items()):
                if isinstance(value, torch.Tensor):
                    group[key] = self.fake(value)
        fakes = {
            self.fake(key): pytree.tree_map_only(torch.Tensor, self._fake_passing, dict(value))
            for key, value in state.items()
        }
        optimizer.state = type(state)(state.default_factory, fakes)

    def _enter_scaler(self, scaler: torch.amp.GradScaler, undo: list[Callable[[], None]]) -> None:
        slots = vars(scaler)
        undo.append(partial(_put_back, slots, dict(slots)))
        slots["_per_optimizer_states"] = scaler._per_optimizer_states.copy()
        for key, value in list(slots.items()):
            if isinstance(value, torch.Tensor):
                slots[key] = self.fake(value)

    def _choose_foreach(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        self._chosen = [group for group in optimizer.param_groups if self._would_choose_foreach(group)]
        for group in self._chosen:
            group["foreach"] = True

    def _unchoose_foreach(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        for group in self._chosen:
            group["foreach"] = None
        self._chosen = []

    def _would_choose_foreach(self, group: dict[str, Any]) -> bool:
        """Whether torch would loop over lists of this group's tensors, had they been real ones.

        It looks at their type and device, and both lie. It matters: temporaries as big as the parameters.
        """
        undecided = group.get("foreach", False) is None and not group.get("fused")
        if not undecided or group.get("differentiable") or isinstance(group.get("lr"), torch.Tensor):
            return False
        kinds = {(self._called or parameter.device).type for parameter in group["params"]}
        return kinds <= set(_get_foreach_kernels_supported_devices())


def _is_symbol(value: object) -> bool:
    return isinstance(value, torch.SymInt | torch.SymFloat)


def _has_no_storage(tensor: torch.Tensor) -> bool:
    wraps_others: bool = is_traceable_wrapper_subclass(tensor)
    return wraps_others or tensor.layout != torch.strided


def _put_back(slots: dict[str, Any], before: dict[str, Any]) -> None:
    slots.clear()
    slots.update(before)


def _unique(items: Iterator[Any]) -> list[Any]:
    return list({id(item): item for item in items}.values())
