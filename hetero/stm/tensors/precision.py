"""Low-precision device copies of parameters whose homes keep their own type.

Owns what lies between the two types: the twin at home from which copies are made, what a copy is made from where its
parameter lives on the device, the up-cast of gradients that came down, and the cast of a forward's inputs. Invariant: a
copy holds ``home.to(precision)``, a gradient at home ``gradient.to(home.dtype)``, whoever casts and whenever.

The numbers are those of FSDP2 (``fully_shard`` of the whole model with ``MixedPrecisionPolicy(param_dtype=precision,
reduce_dtype=torch.float32)``) on one device:

* every floating-point parameter that the optimizer sees in another type is computed with in ``precision``; integer and
  complex ones, and all buffers, keep their type;
* floating-point tensors among the arguments of the model's call are cast, within containers and differentiably; those
  of its submodules' calls, and what the model returns, are not;
* contributions to a parameter's gradient within one backward are added in ``precision`` on the device; the sum is cast
  up at home, where micro-batches add up in the parameter's own type, and where clipping and the optimizer see it.
  Reentrant checkpoints are backwards of their own: a weight that several of them share adds up at home, where FSDP2
  adds in ``precision``.

[Note: expanding in place]
A gradient comes down in low precision into the end of the memory of the gradient that it becomes, so that it needs no
memory of its own. What lies before the first number that is still to be cast is free to be written: half of what is
left each time, and a little at the end through a buffer.
"""

import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from hetero.autograd import outside_inference
from hetero.devices import CopyEngine, has_no_gaps

__all__ = [
    "LowTwin",
    "Master",
    "Upcast",
    "cast_inputs",
    "computes_in",
    "expands",
    "landing_place",
]


def computes_in(dtype: torch.dtype, precision: torch.dtype | None) -> torch.dtype:
    """The type in which operators see a parameter of ``dtype``."""
    return precision if precision is not None and dtype.is_floating_point else dtype


class LowTwin:
    """A parameter's values at home in low precision, from which device copies are made: half the bytes go up.

    Attributes:
        tensor: on the host, page-locked where homes are. Its values are those of home at ``clock``.
    """

    __slots__ = ("_engine", "_layout", "clock", "tensor")

    def __init__(self, tensor: torch.Tensor, engine: CopyEngine) -> None:
        self._engine = engine
        self.tensor = tensor
        self._layout = tensor.stride()
        self.clock: int | None = None

    def refresh(self, home: torch.Tensor, clock: int) -> None:
        """Take over ``home``'s values of now. The caller has waited for the copies that read the old ones."""
        if self._layout != home.stride():  # ``p.data`` was set to another layout
            self._layout = home.stride()
            self.tensor = torch.empty_like(home, dtype=self.tensor.dtype)
        self._engine.before_host_write(self.tensor)
        with torch.no_grad():
            self.tensor.copy_(home)
        self.clock = clock


@dataclass(slots=True)
class Master:
    """The values of a parameter that lives on the device, there, in home's own type: what is stepped. The copy that
    operators see has them in low precision.

    ``version``: the copy's, when it was last made of these values. What has moved it since was not us.
    """

    values: torch.Tensor
    version: int

    def refresh(self, copy: torch.Tensor) -> None:
        """The values have been stepped: ``copy`` follows."""
        with outside_inference(), torch.no_grad():
            copy.copy_(self.values)
        self.version = copy._version


@dataclass(frozen=True, slots=True)
class Upcast:
    """A gradient on its way down in ``low``, to become one of ``high`` in the same ``memory``.

    Holds the memory and no tensor: whoever counts its holders must find autograd's alone.
    """

    arrival: torch.Event
    memory: torch.UntypedStorage
    low: torch.dtype
    high: torch.dtype
    count: int

    def apply(self, engine: CopyEngine, gradient: torch.Tensor | None = None) -> None:
        """Wait for it and cast it. Once."""
        with outside_inference(), torch.no_grad():  # ``high`` is not made within somebody's either
            low = _flat(self.memory, self.low, _landing_offset(self.count, self.low, self.high), self.count)
            high = _flat(self.memory, self.high, 0, self.count)
            engine.host_after_download(self.arrival, low)
            engine.before_host_write(high)
            _expand(low, high)


def expands(gradient: torch.Tensor, home: torch.dtype) -> bool:
    """`landing_place` has one for ``gradient``: memory without gaps, which ``home`` does not make smaller."""
    return gradient.element_size() <= home.itemsize and has_no_gaps(gradient)


def landing_place(gradient: torch.Tensor, low: torch.dtype) -> torch.Tensor:
    """Where a copy in ``low`` of what ``gradient`` is to hold comes down: the end of its memory.

    `expands` must be true of it ([Note: expanding in place]).
    """
    offset = _landing_offset(gradient.numel(), low, gradient.dtype)
    flat = torch.empty(0, dtype=low, device=gradient.device)
    return flat.set_(gradient.untyped_storage(), offset, gradient.size(), gradient.stride())


def _landing_offset(count: int, low: torch.dtype, high: torch.dtype) -> int:
    return count * (high.itemsize - low.itemsize) // low.itemsize


def _flat(memory: torch.UntypedStorage, dtype: torch.dtype, offset: int, count: int) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device=memory.device).set_(memory, offset, (count,), (1,))


_THROUGH_A_BUFFER = 1 << 18  # numbers: less is not worth another start of all threads


def _expand(low: torch.Tensor, high: torch.Tensor) -> None:
    """Copy ``low`` to ``high``, at whose end it lies ([Note: expanding in place])."""
    count, begin = low.numel(), 0
    free = high.element_size() * count - low.element_size() * count
    while begin < count:
        end = (free + begin * low.element_size()) // high.element_size()
        if end - begin < _THROUGH_A_BUFFER:
            high[begin:].copy_(low[begin:].clone())
            return
        high[begin:end].copy_(low[begin:end])
        begin = end


# -- inputs ------------------------------------------------------------------------------------------


def cast_inputs(
    precision: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A forward's arguments with every floating-point tensor in ``precision``; nothing else is another object."""

    def cast(value: torch.Tensor) -> torch.Tensor:
        if not torch.is_floating_point(value) or value.dtype == precision:
            return value
        return value.to(precision)

    return (
        tuple(_mapped(cast, value) for value in args),
        {key: _mapped(cast, value) for key, value in kwargs.items()},
    )


def _mapped(cast: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """``value`` with its tensors cast, in the containers that FSDP2 looks into; itself if none is."""
    if isinstance(value, torch.Tensor):
        return cast(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changes = {
            field.name: new
            for field in dataclasses.fields(value)
            if (new := _mapped(cast, old := getattr(value, field.name))) is not old
        }
        return dataclasses.replace(value, **changes) if changes else value
    if isinstance(value, dict):
        items = {key: _mapped(cast, item) for key, item in value.items()}
        if all(items[key] is item for key, item in value.items()):
            return value
        if not isinstance(value, OrderedDict):
            return items
        mapped = type(value)()
        mapped.update(items)
        return mapped
    # Not a packed sequence, which is a named tuple: FSDP2 leaves it as it is.
    if isinstance(value, list | tuple | set) and not isinstance(value, PackedSequence):
        before = list(value)
        after = [_mapped(cast, item) for item in before]
        if all(new is old for new, old in zip(after, before, strict=True)):
            return value
        return type(value)(*after) if hasattr(value, "_fields") else type(value)(after)
    return value
