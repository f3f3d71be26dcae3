"""Stepping one parameter of an optimizer without the others.

Owns two answers: whether an optimizer treats each parameter by itself, and what else of it and of now its step needs
when it is made later (`hetero.stm.updates.captured`).

[Note: one by one]
Kernels of torch's own optimizers (for-loop, foreach and fused alike) read and write a parameter, its gradient and
its state, and nothing of other parameters; LBFGS is the exception. Of any other class nothing is known, and no number
of trials would prove it, so it is stepped whole, unless the class itself (not a base of it) says
``steps_parameters_independently = True``: its step uses nothing but one parameter, its gradient, state and group at a
time.
"""

import contextlib
import functools
import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

__all__ = [
    "DECLARATION",
    "ELEMENTWISE",
    "Entry",
    "Group",
    "SettingsAtHome",
    "at_home",
    "calls_closure_first",
    "give_step_back",
    "hyper_parameters",
    "in_place_of",
    "innermost",
    "is_known",
    "is_undeclared",
    "lacks_states",
    "make_shell",
    "may_be_tried",
    "may_write_to_gradients",
    "raw_step",
    "steps_alone",
    "without_momentum",
]

Group = dict[str, Any]
"""One of ``optimizer.param_groups``: its settings, and its parameters under ``"params"``."""

Entry = dict[str, Any]
"""What ``optimizer.state`` keeps of one parameter, by name."""

ELEMENTWISE = frozenset(
    {
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.ASGD,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
    }
)
"""Those of torch that treat each number by itself."""

_KNOWN = ELEMENTWISE | {torch.optim.Adafactor, torch.optim.Muon, torch.optim.SparseAdam}


def raw_step(kind: type[torch.optim.Optimizer]) -> Callable[..., Any] | None:
    """``kind.step`` without torch's wrapper that calls the hooks; None if it has another wrapper."""
    step: Any = kind.step
    return step.__wrapped__ if getattr(step, "hooked", False) and hasattr(step, "__wrapped__") else None


def calls_closure_first(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``optimizer.step(closure)`` calls it once, before anything that anybody could see: then it may be called
    before the step, and its forward and backward are like any other's."""
    # Hooks are given the arguments. One of each for all optimizers is ours (`hetero.stm.optimizercalls`).
    is_hooked = (
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or len(_global_optimizer_pre_hooks) > 1
        or len(_global_optimizer_post_hooks) > 1
    )
    return is_known(optimizer) and not is_hooked


@contextlib.contextmanager
def innermost(
    optimizer: torch.optim.Optimizer, before: Callable[..., None], after: Callable[..., None]
) -> Iterator[None]:
    """Within it, ``before`` is the last of the pre-hooks of ``optimizer``'s steps and ``after`` the first of their
    post-hooks."""
    last = optimizer.register_step_pre_hook(before)
    first = optimizer.register_step_post_hook(after)
    hooks: Any = optimizer._optimizer_step_post_hooks
    hooks.move_to_end(first.id, last=False)
    try:
        yield
    finally:
        last.remove()
        first.remove()


def in_place_of(inner: Callable[..., Any]) -> Callable[[Any], Any]:
    """For a function that is to be a method, in the place of ``inner``, which is one: it looks as that does to whoever
    asks for its arguments, as `GradScaler` does, however often it has been replaced."""

    def decorate(function: Any) -> Any:
        replaced: Any = functools.wraps(inner)(function)
        with contextlib.suppress(ValueError, TypeError):  # of what is made in C, nobody knows
            given = inspect.signature(inner)
            itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
            replaced.__signature__ = given.replace(parameters=[itself, *given.parameters.values()])
        return replaced

    return decorate


def give_step_back(optimizer: torch.optim.Optimizer, ours: object, own: Any) -> None:
    """``optimizer.step`` is ``own`` again (None: its class's) if it is still ``ours``: a scheduler made since then has
    wrapped that, and stays."""
    if ours is not None and optimizer.__dict__.get("step") is ours:
        if own is None:
            del optimizer.__dict__["step"]
        else:
            optimizer.__dict__["step"] = own


DECLARATION = "steps_parameters_independently"


def steps_alone(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``optimizer``, as things are, may be stepped parameter by parameter, later ([Note: one by one]):
    differentiable steps, and hyper-parameters that live on a device, may not."""
    groups = optimizer.param_groups
    if raw_step(type(optimizer)) is None or any(group.get("differentiable") for group in groups):
        return False
    if not all(_is_on_host(value) for group in groups for key, value in group.items() if key != "params"):
        return False
    return is_known(optimizer) or bool(vars(type(optimizer)).get(DECLARATION))


def may_be_tried(optimizer: torch.optim.Optimizer) -> bool:
    """Of a class that says so itself: its updates are undone where one fails (`hetero.stm.updates.captured`)."""
    return steps_alone(optimizer) and not is_known(optimizer)


def is_undeclared(optimizer: torch.optim.Optimizer) -> bool:
    """Of a class that is not torch's, and says neither that it does nor that it does not."""
    kind = type(optimizer)
    return kind.__module__.partition(".")[0] != "torch" and DECLARATION not in vars(kind)


def is_known(optimizer: torch.optim.Optimizer) -> bool:
    """One of torch's own, which checks what it is given before it writes."""
    return type(optimizer) in _KNOWN


def lacks_states(optimizer: torch.optim.Optimizer, group: Group, entry: Entry | None) -> bool:
    """Whether the next step of a parameter makes states; for one of torch's own. ``entry``: what is kept of it."""
    if type(optimizer) is torch.optim.SGD:
        return bool(group.get("momentum")) and (entry or {}).get("momentum_buffer") is None
    return not entry


def may_write_to_gradients(optimizer: torch.optim.Optimizer, group: Group) -> bool:
    """Whether a step may change ``p.grad``. Of torch's kernels two do: foreach, with Nesterov's momentum, and fused,
    where a `GradScaler` leaves it to them to unscale."""
    if not is_known(optimizer) or getattr(optimizer, "grad_scale", None) is not None:
        return True
    is_nesterov = type(optimizer) is torch.optim.SGD and bool(group.get("nesterov"))
    return is_nesterov and bool(group.get("foreach"))


def without_momentum(optimizer: torch.optim.Optimizer) -> list[Group]:
    """Groups whose parameters need no states until somebody turns on ``momentum``."""
    if type(optimizer) is not torch.optim.SGD:  # others count on what they made at the first step
        return []
    return [group for group in optimizer.param_groups if not group["momentum"]]


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


def at_home(group: Group) -> Group:
    """``group`` for a step on the host: settings that lie on a device are there for it. torch would fetch them without
    waiting, or refuse them."""
    moved = {
        key: snapshot(value) for key, value in group.items() if key != "params" and not _is_on_host(value)
    }
    return {**group, **moved} if moved else group


class SettingsAtHome:
    """As `at_home`, but in the group itself, until `end`. What the step writes to them, it writes to the user's."""

    def __init__(self, group: Group) -> None:
        self._group = group
        placed = at_home(group)
        self._values = {key: (group[key], value) for key, value in placed.items() if group[key] is not value}
        group.update({key: here for key, (_, here) in self._values.items()})

    def end(self) -> None:
        """The user's settings are back in the group."""
        for key, (there, here) in self._values.items():
            if self._group.get(key) is here:  # else the step has put another in its place
                _write_back(there, here)
                self._group[key] = there


def _write_back(there: Any, here: Any) -> None:
    if isinstance(there, torch.Tensor):
        if here._version:
            with torch.no_grad():
                there.copy_(here)
    elif isinstance(there, list | tuple):
        for one, other in zip(there, here, strict=True):
            _write_back(one, other)


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
