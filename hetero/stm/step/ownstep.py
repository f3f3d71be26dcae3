"""The user's own ``optimizer.step`` on parameters that live on the device, by themselves (`hetero.stm.settled`).

Owns what of us may still be around it. Usually nothing. Where the choice of kernels was left to us, it is what it was
at home (`hetero.stm.updates.kernels`), so that the numbers are those of one run with ``fused=True`` and no others; the
count of steps then lies beside the parameter, where these kernels want it.
"""

import types
from collections.abc import Callable, Container, Iterable
from typing import Any

import torch

from hetero.stm.step.groups import GroupsOfStep
from hetero.stm.tensors.exposure import memory_is_private
from hetero.stm.tensors.fetch import plain
from hetero.stm.tensors.homes import set_memory
from hetero.stm.tensors.managed import ManagedTensor
from hetero.stm.updates.kernels import has_momentum, is_open, split, takes_fused
from hetero.stm.updates.optimizers import (
    Entry,
    Group,
    calls_closure_first,
    give_step_back,
    in_place_of,
    innermost,
)
from hetero.stm.updates.temporaries import temporaries

__all__ = ["OwnStep", "step_bytes"]


def step_bytes(
    optimizer: torch.optim.Optimizer, sizes: dict[int, int], *, fused: Container[int] = frozenset()
) -> int:
    """What one call of the user's own step allocates for a while, at most. ``sizes``: of each parameter, by id;
    ``fused``: of those whose groups leave the choice to us, and that take a fused kernel, which needs nothing."""
    most = 0
    for group in optimizer.param_groups:
        nbytes = [0 if id(p) in fused else sizes.get(id(p), 0) for p in group["params"]]
        each = [temporaries(optimizer, group, p, n) for p, n in zip(group["params"], nbytes, strict=True)]
        if _is_for_loop(optimizer, group):
            at_once = max(each, default=0)
            # A loop's variables hold a copy of one parameter until the next one's takes its place.
            at_once += min(at_once, sum(sorted(nbytes)[-2:-1]))
        else:
            at_once = sum(each)
        most = max(most, at_once)
    return most


def _is_for_loop(optimizer: torch.optim.Optimizer, group: Group) -> bool:
    if type(optimizer) in (torch.optim.Adafactor, torch.optim.Muon):  # unless ``foreach`` is asked for
        return not group.get("foreach")
    # Where the choice is ours, a gradient of another layout than its parameter's is stepped by a for-loop.
    return is_open(optimizer, group) or group.get("foreach") is False


class OwnStep:
    """Of one optimizer, while its parameters live on the device. `begin` once, `end` once. ``step_after``: makes
    the step, as `step` does, where all this has ended: within a closure, or since a method was kept."""

    def __init__(self, optimizer: torch.optim.Optimizer, step_after: Callable[..., Any]) -> None:
        self._optimizer = optimizer
        self._step_after = step_after
        self._is_inside = False  # whoever is called to make the step
        self._moved: list[ManagedTensor] = []  # whose count of steps has gone to the device
        self._method: Any = None
        self._before: Any = None
        self._groups: list[Group] | None = None
        self._written: list[torch.Tensor] = []
        # By the number of the group: its parameters with the strides that their gradients have to have; None: to be
        # looked at anew in each step.
        self._open: dict[int, list[tuple[torch.Tensor, tuple[int, ...]]] | None] = {}
        # Ids of its parameters. What else the optimizer holds is stepped as it is without us, or is another manager's,
        # which may not have settled: it takes what moves their versions here for writes to homes.
        self._ours: frozenset[int] = frozenset()

    def begin(self, tensors: Iterable[ManagedTensor], device: torch.device) -> None:
        """``tensors`` are about to become parameters on ``device``; their states are there."""
        optimizer = self._optimizer
        by_id = {id(tensor.parameter): tensor for tensor in tensors}
        self._ours = frozenset(by_id)
        for number, group in enumerate(optimizer.param_groups):
            if not is_open(optimizer, group):
                continue
            known: list[tuple[torch.Tensor, tuple[int, ...]]] | None = []
            for parameter in group["params"]:
                tensor = by_id.get(id(parameter))
                entry = dict.get(optimizer.state, parameter)
                fits = tensor is not None and self._takes_fused(tensor, entry, device)
                if known is None or not fits:
                    known = None
                else:
                    known.append((parameter, tuple(parameter.stride())))
            self._open[number] = known
        if self._open:
            self._attach()

    def step(self, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """In the place of ``inner``, after a closure within which all this has begun, or as
        `hetero.stm.step.hoststep.HostStep.step`."""
        if self._method is None or self._is_inside:
            return inner(*args, **kwargs)
        return self._step(inner, args, kwargs)

    def end(self) -> None:
        """They go back to us."""
        optimizer = self._optimizer
        give_step_back(optimizer, self._method, self._before)
        self._method = None
        self._open.clear()
        for tensor in self._moved:
            step = (dict.get(optimizer.state, tensor.parameter) or {}).get("step")
            if isinstance(step, torch.Tensor):
                set_memory(step, step.detach().cpu(), f"{tensor.name}.step")
        self._moved.clear()

    def is_viewed(self, tensors: Iterable[ManagedTensor]) -> bool:
        """Somebody has an alias of a state's memory, which would be left behind when states go home. Whoever holds
        the state itself, or the entry that it is in, goes with it."""
        for tensor in tensors:
            for value in (dict.get(self._optimizer.state, tensor.parameter) or {}).values():
                if isinstance(value, torch.Tensor) and not memory_is_private(value, 0):
                    return True
        return False

    # -- helpers --------------------------------------------------------------------------------------

    def _takes_fused(self, tensor: ManagedTensor, entry: Entry | None, device: torch.device) -> bool:
        step = (entry or {}).get("step")
        if isinstance(step, torch.Tensor) and step.device != device:
            set_memory(step, step.detach().to(device), f"{tensor.name}.step")
            self._moved.append(tensor)
        assert tensor.data is not None
        return takes_fused(self._optimizer, tensor.data, None, entry)

    def _attach(self) -> None:
        optimizer = self._optimizer
        self._before = optimizer.__dict__.get("step")
        inner, own = optimizer.step, self

        @in_place_of(inner)
        def step(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            if own._method is not method:
                return own._step_after(inner, args, kwargs)
            return own._step(inner, args, kwargs)

        # Schedulers wrap ``step.__func__``: only a bound method has one.
        self._method = method = optimizer.__dict__["step"] = types.MethodType(step, optimizer)

    def _step(self, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        optimizer = self._optimizer
        closure = args[0] if args else kwargs.get("closure")
        if closure is not None:
            if not calls_closure_first(optimizer):
                return inner(*args, **kwargs)  # whose gradients are not there before it is called
            with torch.enable_grad():
                loss = closure()
            if self._method is None:
                self._step_after(inner, (), {})
            else:
                self._step(inner, (), {})
            return loss
        # What surrounds a step is to see the groups as they are: we come last, and go first.
        self._is_inside = True
        try:
            with innermost(optimizer, self._choose, self._restore):
                return inner()
        finally:
            self._is_inside = False
            self._restore()

    def _choose(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._groups is not None:  # a step that calls another class's, hooks and all
            return
        given: list[Group] = []
        for number, group in enumerate(optimizer.param_groups):
            known = self._open.get(number)
            if known is None or not _is_as_known(optimizer, group, known):
                with plain():
                    parts, chosen = split(optimizer, [group], lambda parameter: id(parameter) in self._ours)
                given += parts
                self._written += chosen
            else:
                given.append({**group, "fused": True})
                self._written += [p for p in group["params"] if p.grad is not None]
        self._groups = optimizer.param_groups
        optimizer.param_groups = GroupsOfStep(given, users=self._groups)

    def _restore(self, *_: Any) -> None:
        if self._groups is not None:
            self._optimizer.param_groups, self._groups = self._groups, None
            # As a for-loop would have; fused kernels do not.
            torch.autograd.graph.increment_version(self._written)
            self._written = []


def _is_as_known(
    optimizer: torch.optim.Optimizer, group: Group, known: list[tuple[torch.Tensor, tuple[int, ...]]]
) -> bool:
    """Autograd lays gradients out as their parameters; the user may not, and may drop states that fused kernels want
    for all parameters of a call or for none."""
    if not is_open(optimizer, group) or len(known) != len(group["params"]):
        return False
    if any(p is not parameter for p, (parameter, _) in zip(group["params"], known, strict=True)):
        return False  # another manager of this optimizer has split its groups
    needs_momentum = bool(group.get("momentum"))  # it may have been turned on since
    for parameter, strides in known:
        gradient = parameter.grad
        if gradient is None:
            continue
        if gradient.layout is not torch.strided or gradient.stride() != strides:
            return False
        if needs_momentum and not has_momentum(dict.get(optimizer.state, parameter)):
            return False
    return True
