"""Stepping one parameter of an optimizer without the others.

Owns two answers: whether an optimizer treats each parameter by itself, and how to update a single one, later, with
the gradient, the hyper-parameters and the state of now. Invariant: what `ParameterUpdate` writes is what
``optimizer.step()`` would have written to that parameter and its state at the moment of the capture; or, if it
raises, nothing.

[Note: one by one]
Kernels of torch's own optimizers (for-loop, foreach and fused alike) read and write a parameter, its gradient and
its state, and nothing of other parameters; LBFGS is the exception. Of any other class nothing is known, so it is
tried: small parameters are stepped together, and alone in the opposite order, several times, with gradients from
tiny to huge (a clip by the global norm acts on huge ones only). Every bit has to agree, and a step may leave nothing
behind but values and states: a counter in the group or on the optimizer, or a random number drawn, is shared by
all. Nor may it call hooks of the user's (``super().step()``), which belong to the step as a whole. What cannot be
tried is stepped whole. A trial is no proof: coupling that shows on none of these inputs is not found.
"""

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hetero.stm.fetch import plain

__all__ = ["Alone", "ParameterUpdate", "raw_step"]

Group = dict[str, Any]

_KNOWN = frozenset(
    {
        torch.optim.Adadelta,
        torch.optim.Adafactor,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.ASGD,
        torch.optim.Muon,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
        torch.optim.SparseAdam,
    }
)


def raw_step(kind: type[torch.optim.Optimizer]) -> Callable[..., Any] | None:
    """``kind.step`` without torch's wrapper that calls the hooks; None if it has another wrapper."""
    step: Any = kind.step
    return step.__wrapped__ if getattr(step, "hooked", False) and hasattr(step, "__wrapped__") else None


class Alone:
    """Whether one optimizer may be stepped parameter by parameter ([Note: one by one])."""

    def __init__(self) -> None:
        self._tried: dict[object, bool] = {}

    def allows(self, optimizer: torch.optim.Optimizer) -> bool:
        """As things are: differentiable steps, and hyper-parameters that live on a device, are not deferred."""
        groups = optimizer.param_groups
        if raw_step(type(optimizer)) is None or any(group.get("differentiable") for group in groups):
            return False
        if not all(_is_on_host(value) for group in groups for key, value in group.items() if key != "params"):
            return False
        if self.is_known(optimizer):
            return True
        kind = tuple(_kind(group) for group in groups)
        if kind not in self._tried:
            self._tried[kind] = _steps_one_by_one(optimizer)
        return self._tried[kind]

    @staticmethod
    def is_known(optimizer: torch.optim.Optimizer) -> bool:
        """One of torch's own, which checks what it is given before it writes."""
        return type(optimizer) in _KNOWN


class ParameterUpdate:
    """What ``optimizer.step()`` does to one parameter, with everything but values and states captured.

    ``home``: a plain alias of the parameter, which shares its version counter. ``group``: its group's snapshot, by
    `hyper_parameters`. ``entry``: the optimizer's own dict for it, None if it has none.
    """

    __slots__ = (
        "_entry",
        "_gradient",
        "_group",
        "_guarded",
        "_home",
        "_shell",
        "_twin_attributes",
        "new_entry",
    )

    def __init__(
        self,
        shell: torch.optim.Optimizer,
        parameter: nn.Parameter,
        home: torch.Tensor,
        gradient: torch.Tensor,
        group: Group,
        entry: dict[str, Any] | None,
        *,
        guarded: bool,
    ) -> None:
        self._shell = shell
        self._home = home
        self._gradient: torch.Tensor | None = gradient
        self._group = group
        self._entry = entry
        self._guarded = guarded
        self._twin_attributes = {k: v for k, v in parameter.__dict__.items() if k != "_hetero"}
        self.new_entry: dict[str, Any] | None = None

    def run(self) -> None:
        """Once. Uses the shell: one at a time."""
        step = raw_step(type(self._shell))
        assert step is not None
        with plain():
            # A leaf of the same memory and version counter, whose gradient is ours alone.
            twin: Any = torch.Tensor._make_subclass(nn.Parameter, self._home, True)
            twin.__dict__.update(self._twin_attributes)
            # Forgotten here: its memory is wanted for the next one, and we may be kept for `new_entry`.
            twin.grad, self._gradient = self._gradient, None
            shell = self._shell
            shell.param_groups = [{**self._group, "params": [twin]}]
            shell.state = defaultdict(dict)
            if self._entry is not None:
                shell.state[twin] = self._entry
            undo = _Undo(self._home, self._entry) if self._guarded else None
            try:
                step(shell)
            except BaseException:
                if undo is not None:
                    undo()
                raise
            finally:
                if self._entry is None:
                    self.new_entry = shell.state.get(twin)
                shell.param_groups, shell.state = [], defaultdict(dict)


class _Undo:
    """Puts back a parameter and its state. Not for torch's own optimizers: they raise before they write, unless host
    memory runs out in the middle."""

    def __init__(self, home: torch.Tensor, entry: dict[str, Any] | None) -> None:
        self._saved = [(home, home.clone())]
        self._entry = entry
        self._before = dict(entry or {})
        for value in self._before.values():
            if isinstance(value, torch.Tensor):
                self._saved.append((value, value.clone()))

    def __call__(self) -> None:
        with torch.no_grad():
            for tensor, value in self._saved:
                tensor.copy_(value)
        if self._entry is not None:
            self._entry.clear()
            self._entry.update(self._before)


def make_shell(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """An optimizer of the same kind and settings that holds nothing. Tensors set on it (by GradScaler) are copied."""
    shell = object.__new__(type(optimizer))
    shell.__dict__.update({k: snapshot(v) for k, v in optimizer.__dict__.items() if k not in _CONTENT})
    shell.param_groups, shell.state = [], defaultdict(dict)
    shell._optimizer_step_pre_hooks = OrderedDict()
    shell._optimizer_step_post_hooks = OrderedDict()
    return shell


_CONTENT = ("param_groups", "state", "step")


def hyper_parameters(group: Group) -> Group:
    """A group's settings as they are now, without its parameters."""
    return {key: snapshot(value) for key, value in group.items() if key not in ("params", "param_names")}


def snapshot(value: Any) -> Any:
    """A copy as far as in-place changes go; tensors on the host."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if type(value) in (list, tuple):
        return type(value)(snapshot(item) for item in value)
    if type(value) is dict:
        return {key: snapshot(item) for key, item in value.items()}
    return value


def _is_on_host(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.device.type == "cpu"
    return all(map(_is_on_host, value)) if isinstance(value, list | tuple) else True


# -- trying ------------------------------------------------------------------------------------------------------------


def _kind(group: Group) -> object:
    """What a group's kernels are chosen by, as far as it can be told: everything but numbers that schedulers move."""
    settings = tuple(
        (key, value)
        for key, value in group.items()
        if isinstance(value, bool | str | type(None)) or (isinstance(value, int) and key != "lr")
    )
    return settings, _forms(group)


def _forms(group: Group) -> tuple[tuple[int, torch.dtype], ...]:
    return tuple(sorted({(p.dim(), p.dtype) for p in group["params"]}, key=str))


_SCALES = (1e-3, 1.0, 1e4, 0.1)


def _steps_one_by_one(optimizer: torch.optim.Optimizer) -> bool:
    random_state = torch.random.get_rng_state()
    try:
        with plain(), torch.random.fork_rng(devices=[]):
            return _agrees(optimizer)
    except (
        Exception
    ):  # it wants what we cannot give it (a closure, other arguments): then it is stepped as it is
        return False
    finally:
        torch.random.set_rng_state(random_state)


def _agrees(optimizer: torch.optim.Optimizer) -> bool:
    if not all(
        _is_simple(v) for k, v in optimizer.__dict__.items() if k not in _CONTENT and not _is_torchs(k)
    ):
        return False
    step = raw_step(type(optimizer))
    assert step is not None
    step(make_shell(optimizer))  # as when all its parameters are deferred
    together, alone = _Trial(optimizer), _Trial(optimizer)
    for scale in _SCALES:
        for trial in (together, alone):
            trial.set_gradients(scale)
        if not together.step(step, together.parameters):
            return False
        if not all(alone.step(step, [parameter]) for parameter in reversed(alone.parameters)):
            return False
        if together.values() != alone.values():
            return False
    return True


def _is_simple(value: Any) -> bool:
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_simple, value))
    if isinstance(value, dict):
        return all(map(_is_simple, value.values()))
    return value is None or isinstance(value, int | float | str | complex | torch.dtype | torch.device | type)


def _is_torchs(name: str) -> bool:
    """Attributes of every optimizer."""
    return name == "defaults" or name.startswith(("_optimizer_", "_warned_", "_zero_grad_", "_opt_called"))


class _Trial:
    """Small parameters like those of ``optimizer``, and their states."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = make_shell(optimizer)
        # Called if the step is made of other steps (``super().step()``) that call hooks of their own.
        self.optimizer.register_step_pre_hook(self._note_hook)
        self.calls_hooks = False
        self.settings = copy.deepcopy({k: v for k, v in self.optimizer.__dict__.items() if not _is_torchs(k)})
        self.groups: list[Group] = []
        self.parameters: list[nn.Parameter] = []
        self.state: defaultdict[Any, dict[str, Any]] = defaultdict(dict)
        generator = torch.Generator().manual_seed(0)
        for group in optimizer.param_groups:
            members = []
            for place, (dim, dtype) in enumerate(_forms(group) * 2):
                shape = [(5, 3, 2, 2, 2, 2)[axis] + place for axis in range(dim)]
                members.append(nn.Parameter(torch.randn(shape, generator=generator).to(dtype)))
            self.groups.append({**hyper_parameters(group), "params": members})
            self.parameters += members

    def _note_hook(self, *_: object) -> None:
        self.calls_hooks = True

    def set_gradients(self, scale: float) -> None:
        generator = torch.Generator().manual_seed(1)
        for parameter in self.parameters:
            gradient = torch.randn(parameter.shape, generator=generator) * scale
            parameter.grad = gradient.to(parameter.dtype)

    def step(self, step: Callable[..., Any], chosen: Sequence[nn.Parameter]) -> bool:
        """Step these; False if that left anything behind but values and states."""
        ids = {id(parameter) for parameter in chosen}
        groups = []
        for group in self.groups:
            members = [p for p in group["params"] if id(p) in ids]
            if members:
                groups.append({**group, "params": members})
        before = [hyper_parameters(group) for group in groups]
        drawn = torch.random.get_rng_state()
        shell = self.optimizer
        shell.param_groups, shell.state = groups, self.state
        returned = step(shell)
        untouched = shell.state is self.state and all(isinstance(key, nn.Parameter) for key in self.state)
        shell.param_groups, shell.state = [], defaultdict(dict)
        settings = {k: v for k, v in shell.__dict__.items() if not _is_torchs(k)}
        return (
            returned is None
            and untouched
            and not self.calls_hooks
            and _as_bytes(settings) == _as_bytes({**self.settings, "param_groups": [], "state": {}})
            and [_as_bytes(hyper_parameters(group)) for group in groups] == [_as_bytes(b) for b in before]
            and torch.equal(drawn, torch.random.get_rng_state())
        )

    def values(self) -> object:
        """Bits of parameters, gradients and states."""
        return [
            (_as_bytes(p.detach()), _as_bytes(p.grad), _as_bytes(self.state.get(p))) for p in self.parameters
        ]


def _as_bytes(value: Any) -> object:
    if isinstance(value, torch.Tensor):
        flat = value.detach().contiguous().reshape(-1).view(torch.uint8) if value.numel() else value
        return str(value.dtype), tuple(value.shape), bytes(flat.tolist())
    if isinstance(value, Mapping):
        return {key: _as_bytes(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_as_bytes(item) for item in value]
    return repr(value)
