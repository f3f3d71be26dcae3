"""Homes: where parameters, buffers and optimizer states live while managed, and how they get back.

Owns the change of a tensor's memory under its identity. Invariant: the Python objects the user holds stay the
same objects before, during and after management; `give_back` leaves values, gradients and states as they
are then, on the devices where they were at the beginning, in ordinary memory.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hetero.devices import HostArena, bytes_of, storage_of
from hetero.errors import ManageError
from hetero.stm.tensors.inference import has_counter, make_inference

__all__ = ["HOST", "Homes", "set_memory", "states_beside"]

HOST = torch.device("cpu")


@dataclass(slots=True)
class _Moved:
    tensor: torch.Tensor
    device: torch.device
    name: str
    is_state: bool = False


def set_memory(tensor: torch.Tensor, data: torch.Tensor, name: str) -> None:
    """Make ``tensor`` hold ``data``'s memory (any device), keeping its identity. Moves no gradient."""
    # One made in inference mode has no version counter, which it would need as an ordinary tensor.
    if torch._has_compatible_shallow_copy_type(tensor, data) and has_counter(tensor):
        tensor.data = data
        return
    # CPU and some backends (PrivateUse1) cannot share a TensorImpl type: exchange the whole implementation.
    twin = nn.Parameter(data, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else data.detach()
    if not isinstance(tensor, nn.Parameter):
        twin.requires_grad_(tensor.requires_grad)
    twin.__class__ = tensor.__class__
    attributes = dict(tensor.__dict__)
    hooks = tensor._post_accumulate_grad_hooks, tensor._backward_hooks
    try:
        torch.utils.swap_tensors(tensor, twin)
    except RuntimeError as error:
        raise ManageError(
            f"{name} cannot change device now: {error} Drop graphs and losses that still refer to it, then try again"
        ) from error
    tensor.__dict__.update(attributes)
    tensor._post_accumulate_grad_hooks, tensor._backward_hooks = hooks


class Homes:
    """Moves model data home, and back."""

    def __init__(self, arena: HostArena) -> None:
        self._arena = arena
        self._moved: list[_Moved] = []
        self._kept_ids: frozenset[int] | None = None  # of these; None: they have changed since
        self._with_states: list[nn.Parameter] = []

    def take_parameters(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Homes in slab memory. Parameters that share memory go on sharing it."""
        groups = _by_storage((name, parameter, HOST) for name, parameter in parameters)
        self._arena.expect(
            sum(self._arena.slab_bytes(g[0].tensor.untyped_storage().nbytes()) for g in groups)
        )
        for group in groups:
            for moved, data in zip(group, _copies(group, self._arena.empty_strided), strict=True):
                self._move(moved.name, moved.tensor, data)

    def take_tensor(self, name: str, tensor: torch.Tensor, device: torch.device) -> None:
        """A buffer goes to ``device``."""
        if tensor.device != device:
            self._move(name, tensor, tensor.detach().to(device))

    def take_state(self, name: str, tensor: torch.Tensor, *, returns: bool) -> None:
        """An optimizer state goes home; ``returns``: until `give_back`, else for good."""
        if tensor.device == HOST:
            return
        data = tensor.detach().to(HOST)
        if returns:
            self._move(name, tensor, data)
            self._moved[-1].is_state = True
        else:  # where its parameter is then (`send_states`)
            _replace(name, tensor, data)

    def forget_states(self, present: Collection[int]) -> None:
        """Let go of the states whose ids are not ``present``: their optimizer has others now."""
        self._moved = [m for m in self._moved if not m.is_state or id(m.tensor) in present]
        self._kept_ids = None

    def kept_ids(self) -> frozenset[int]:
        """Ids of the tensors that are to go back to where they were; we hold each of them."""
        if self._kept_ids is None:  # each gradient's update may ask
            self._kept_ids = frozenset(id(moved.tensor) for moved in self._moved)
        return self._kept_ids

    def give_back(self) -> None:
        """Everything to where it was, in ordinary memory."""
        done: set[int] = set()
        try:
            # From the end: of what was moved more than once, the last time counts.
            for group in _by_storage((m.name, m.tensor, m.device) for m in reversed(self._moved)):
                left = [moved for moved in group if id(moved.tensor) not in done]
                if left:
                    for moved, data in zip(
                        left, _copies(left, _ordinary_memory(left[0].device)), strict=True
                    ):
                        is_inference = moved.tensor.is_inference()
                        _replace(moved.name, moved.tensor, data)
                        if is_inference:
                            make_inference(moved.tensor)
                    done.update(id(moved.tensor) for moved in left)
        finally:  # an error leaves the list true
            self._moved = [moved for moved in self._moved if id(moved.tensor) not in done]
            self._kept_ids = None

    def note_states(self, optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]) -> None:
        """Before anything moves: ``parameters`` on a device whose states, if there are any, lie there as well, have
        them there again after `give_back`, also those that come into being until then."""
        for parameter in parameters:
            states = _states(optimizer, parameter)
            if parameter.device != HOST and all(state.device == parameter.device for state in states):
                self._with_states.append(parameter)

    def send_states(self, optimizer: torch.optim.Optimizer) -> None:
        """After `give_back`: states that came into being at home follow their parameters."""
        for parameter in self._with_states:
            for state in _states(optimizer, parameter):
                if state.device != parameter.device:
                    set_memory(state, state.detach().to(parameter.device), "an optimizer's state")
        self._with_states.clear()

    def _move(self, name: str, tensor: torch.Tensor, data: torch.Tensor) -> None:
        device = tensor.device
        _replace(name, tensor, data)
        self._moved.append(_Moved(tensor, device, name))
        self._kept_ids = None


_Allocate = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor]


def _states(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> list[torch.Tensor]:
    group = next((g for g in optimizer.param_groups if any(p is parameter for p in g["params"])), {})
    return states_beside(optimizer, parameter, group)


def states_beside(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter, group: dict[str, Any]
) -> list[torch.Tensor]:
    """Those that lie where ``parameter``, of ``group``, does, by the rule of ``Optimizer.load_state_dict``."""
    entry = dict.get(optimizer.state, parameter)
    if not isinstance(entry, dict):
        return []
    steps_there = bool(group.get("capturable") or group.get("fused"))
    return [
        value
        for key, value in entry.items()
        if isinstance(value, torch.Tensor) and (key != "step" or steps_there)
    ]


def _by_storage(tensors: Iterable[tuple[str, torch.Tensor, torch.device]]) -> list[list[_Moved]]:
    groups: dict[tuple[int, torch.device], list[_Moved]] = defaultdict(list)
    for name, tensor, device in tensors:
        storage = storage_of(tensor)  # none: sparse
        key = id(tensor) if storage is None else storage._cdata
        groups[key, device].append(_Moved(tensor, device, name))
    return list(groups.values())


def _copies(group: Sequence[_Moved], allocate: _Allocate) -> Iterator[torch.Tensor]:
    """New memory for tensors of one storage, sharing it as they do now."""
    tensor = group[0].tensor.detach()
    if len(group) == 1:
        if tensor.layout is not torch.strided:
            yield tensor.to(group[0].device)
            return
        # Its strides where they are dense, else contiguous: the rule of torch.empty_like.
        like = torch.empty_like(tensor, device="meta")
        yield allocate(tuple(like.size()), tuple(like.stride()), like.dtype).copy_(tensor)
        return
    whole = bytes_of(tensor)
    copy = allocate((whole.numel(),), (1,), torch.uint8).copy_(whole).untyped_storage()
    for moved in group:
        old = moved.tensor.detach()
        new = torch.empty(0, dtype=old.dtype, device=copy.device)
        yield new.set_(copy, old.storage_offset(), old.size(), old.stride())


def _ordinary_memory(device: torch.device) -> _Allocate:
    def allocate(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device=device)

    return allocate


def _replace(name: str, tensor: torch.Tensor, data: torch.Tensor) -> None:
    grad = tensor.grad if tensor.is_leaf else None
    if grad is not None:
        tensor.grad = None
    try:
        set_memory(tensor, data, name)
    except ManageError:
        if grad is not None:
            tensor.grad = grad
        raise
    if grad is not None:
        tensor.grad = grad.to(data.device)
