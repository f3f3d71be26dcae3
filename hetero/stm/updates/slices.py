"""Parameters cut into slices for torch's for-loops.

Owns which parameters may be cut, and how. Invariant: every number of parameter and state is what it would have been
uncut.

[Note: slices]
torch's for-loops go through a parameter once for each of their ten or so operations, with temporaries as big as it,
which the C library fetches from the system each time if they are large. Handed the parameter in slices that fit the
cache, the same loops are faster, the more the larger the parameter is. For optimizers that treat
each *number* by itself that is the same arithmetic, provided that operators give a number the same bits in the
middle of a vector and at the end of one. For float32 and float64 they do, at least on x86; this is tried on the
machine at hand, with the optimizer and settings at hand, before it is relied on. For float16 and bfloat16 they do not.
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from hetero.stm.updates.kernels import same_layout
from hetero.stm.updates.optimizers import ELEMENTWISE, Entry, Group, make_shell, raw_step

__all__ = ["leaf", "may_slice", "slices", "take_numbers"]

# Elements of one slice for each thread; with gradient, states and temporaries, about what its cache holds.
_ELEMENTS = 1 << 17
_SLICED = ELEMENTWISE - {torch.optim.SGD}  # whose passes are too few to be worth it
_MOST_THREADS = 32  # temporaries of more are memory that the C library fetches from the system each time


def may_slice(
    shell: torch.optim.Optimizer, group: Group, home: torch.Tensor, gradient: torch.Tensor, entry: Entry
) -> bool:
    """Whether slices are faster and give the same bits ([Note: slices]). ``entry``: states that exist."""
    return (
        home.device.type == "cpu"
        and home.numel() >= 2 * _slice_elements()
        and type(shell) in _SLICED
        and home.dtype in (torch.float32, torch.float64)
        and not (group.get("fused") or group.get("foreach") or group.get("capturable"))
        and bool(entry)
        and same_layout(gradient, home)
        and all(_is_number(value) or same_layout(value, home) for value in entry.values())
        and _agree(shell, group, entry, home.dtype)
    )


def slices(
    home: torch.Tensor,
    gradient: torch.Tensor,
    entry: Entry,
    state: dict[torch.Tensor, Entry],
    *,
    length: int | None = None,
) -> Iterator[nn.Parameter]:
    """Leaves that together are ``home``, each with its part of ``gradient``, and of ``entry`` in ``state``."""
    length = length or _slice_elements()
    flat, gradients = _flat(home), _flat(gradient)
    states = {key: value if _is_number(value) else _flat(value) for key, value in entry.items()}
    for begin in range(0, home.numel(), length):
        part = slice(begin, begin + length)
        twin = leaf(flat[part], gradients[part])
        state[twin] = {key: _part_of(value, part) for key, value in states.items()}
        yield twin


def take_numbers(entry: Entry, last: Entry) -> None:
    """What is not a state of each element, such as the number of steps, is afterwards what any slice has made of it."""
    for key, value in last.items():
        if not _is_number(value):
            continue
        before = entry.get(key)
        if isinstance(before, torch.Tensor) and isinstance(value, torch.Tensor):
            before.copy_(value)
        else:
            entry[key] = value


def leaf(data: torch.Tensor, gradient: torch.Tensor) -> Any:
    """A parameter of ``data``'s memory and version counter with that gradient."""
    twin: Any = torch.Tensor._make_subclass(nn.Parameter, data, True)
    twin.grad = gradient
    return twin


def _slice_elements() -> int:
    return _ELEMENTS * min(torch.get_num_threads(), _MOST_THREADS)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_strided((tensor.numel(),), (1,))


def _part_of(value: Any, part: slice) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.clone() if _is_number(value) else value[part]


def _is_number(value: Any) -> bool:
    return not isinstance(value, torch.Tensor) or value.dim() == 0


# -- the trial -----------------------------------------------------------------------------------------------

_SAMPLE = 257  # neither it nor its slices are multiples of a vector
_SAMPLE_SLICE = 7
_trials: dict[object, bool] = {}


def _agree(shell: torch.optim.Optimizer, group: Group, entry: Entry, dtype: torch.dtype) -> bool:
    """Whether slices have the whole's bits here; tried once for each kind of settings."""
    flags = frozenset(
        (key, bool(value)) for key, value in group.items() if not isinstance(value, tuple | list)
    )
    key = type(shell), dtype, flags, frozenset(entry), torch.get_num_threads()
    if key not in _trials:
        whole, cut = (_try(shell, group, dtype, length) for length in (_SAMPLE, _SAMPLE_SLICE))
        _trials[key] = whole.keys() == cut.keys() and all(
            torch.equal(value, cut[name]) if isinstance(value, torch.Tensor) else value == cut[name]
            for name, value in whole.items()
        )
    return _trials[key]


def _from_the_start(shell: torch.optim.Optimizer, group: Group, home: torch.Tensor) -> Entry:
    """What an optimizer has before its first step, if it has anything: until torch 2.12 Adagrad does."""
    if not isinstance(shell, torch.optim.Adagrad):
        return {}
    value = group["initial_accumulator_value"]
    fresh = torch.optim.Adagrad([torch.nn.Parameter(home.detach())], initial_accumulator_value=value)
    return next(iter(fresh.state.values()), {})


def _try(shell: torch.optim.Optimizer, group: Group, dtype: torch.dtype, length: int) -> Entry:
    """A parameter and its state after some steps in slices of ``length``."""
    shell = make_shell(shell)
    step = raw_step(type(shell))
    assert step is not None
    generator = torch.Generator("cpu").manual_seed(0)
    home = torch.randn(_SAMPLE, generator=generator, device="cpu", dtype=dtype)
    group = {**group, "lr": group["lr"] * 0 + 0.1}
    entry = _from_the_start(shell, group, home)
    for _ in range(4):
        gradient = torch.randn(_SAMPLE, generator=generator, device="cpu", dtype=dtype)
        shell.state = defaultdict(dict)
        twins = (
            list(slices(home, gradient, entry, shell.state, length=length))
            if entry
            else [leaf(home, gradient)]
        )
        shell.param_groups = [{**group, "params": twins}]
        step(shell)
        if entry:
            take_numbers(entry, shell.state[twins[-1]])
        else:
            entry = shell.state[twins[0]]
    return {"": home, **entry}
