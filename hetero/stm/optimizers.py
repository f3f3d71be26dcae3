"""Stepping one parameter of an optimizer without the others.

Owns two answers: whether an optimizer treats each parameter by itself, and how to update a single one, later, with
the gradient, the hyper-parameters and the state of now. Invariant: what `ParameterUpdate` writes is what
``optimizer.step()`` would have written to that parameter and its state at the moment of the capture; or, if it
raises, nothing.

[Note: one by one]
Kernels of torch's own optimizers (for-loop, foreach and fused alike) read and write a parameter, its gradient and
its state, and nothing of other parameters; LBFGS is the exception. Of any other class nothing is known, and no number
of trials would prove it, so it is stepped whole, unless the class itself (not a base of it) says
``steps_parameters_independently = True``: its step uses nothing but one parameter, its gradient, state and group at a
time.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hetero.stm.fetch import plain

__all__ = ["ParameterUpdate", "hyper_parameters", "is_known", "make_shell", "steps_alone"]

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


_DECLARATION = "steps_parameters_independently"


def steps_alone(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``optimizer``, as things are, may be stepped parameter by parameter, later ([Note: one by one]):
    differentiable steps, and hyper-parameters that live on a device, may not."""
    groups = optimizer.param_groups
    if raw_step(type(optimizer)) is None or any(group.get("differentiable") for group in groups):
        return False
    if not all(_is_on_host(value) for group in groups for key, value in group.items() if key != "params"):
        return False
    return is_known(optimizer) or bool(vars(type(optimizer)).get(_DECLARATION))


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
