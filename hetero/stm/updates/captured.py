"""The update of single parameters, later, with everything that decides it captured now.

Owns how captured updates become calls of torch's own step. Invariant: what an update writes is what
``optimizer.step()`` would have written to that parameter and its state at the moment of the capture; or, if it
raises, nothing.
"""

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import nn

from hetero.stm.tensors.fetch import plain
from hetero.stm.updates.counts import StepCounts
from hetero.stm.updates.kernels import is_count, is_open, takes_fused
from hetero.stm.updates.optimizers import Entry, Group, hyper_parameters, is_known, raw_step
from hetero.stm.updates.slices import leaf, may_slice, slices, take_numbers

__all__ = ["ParameterUpdate", "device_update", "home_update", "run_together", "settings_of"]


class ParameterUpdate:
    """What ``optimizer.step()`` does to one parameter, with everything but values and states captured.

    ``home``: a plain alias of the parameter, which shares its version counter. ``group``: its group's snapshot, by
    `hyper_parameters`. ``entry``: the optimizer's own dict for it, None if it has none. ``moves_version``: the
    kernel does not move home's version counter, and it has to be.
    """

    __slots__ = (
        "_entry",
        "_gradient",
        "_group",
        "_guarded",
        "_home",
        "_moves_version",
        "_shell",
        "_sliced",
        "_twin_attributes",
        "_twins",
        "new_entry",
    )

    def __init__(
        self,
        shell: torch.optim.Optimizer,
        parameter: nn.Parameter,
        home: torch.Tensor,
        gradient: torch.Tensor,
        group: Group,
        entry: Entry | None,
        *,
        moves_version: bool = False,
    ) -> None:
        self._shell = shell
        self._home = home
        self._gradient: torch.Tensor | None = gradient
        self._group = group
        self._entry = entry
        self._guarded = not is_known(shell)
        self._moves_version = moves_version
        self._twin_attributes = {k: v for k, v in parameter.__dict__.items() if k != "_hetero"}
        self._twins: list[nn.Parameter] = []
        self._sliced = False
        self.new_entry: Entry | None = None

    @property
    def batch_key(self) -> object:
        """Updates with equal ones, not None, give the same numbers in one call of step."""
        # torch's foreach loops over lists otherwise; nothing is known of optimizers that are not torch's.
        if self._guarded or self._group.get("foreach"):
            return None
        return id(self._shell), id(self._group), self._home.dtype, frozenset(self._entry or ())

    @property
    def nbytes(self) -> int:
        """Of the parameter."""
        return self._home.nbytes

    def run(self) -> None:
        """Once. Uses the shell: one at a time."""
        run_together([self])

    def take_over(self, other: "ParameterUpdate") -> None:
        """``other`` has run in its place."""
        self._gradient = None
        self.new_entry = other.new_entry

    # -- within a call of step ------------------------------------------------------------------------

    def begin(self, state: dict[torch.Tensor, Entry]) -> list[nn.Parameter]:
        """Leaves of home's memory and version counter, with gradients that are ours alone, and their states."""
        # Forgotten here: its memory is wanted for the next one, and we may be kept for `new_entry`.
        gradient, self._gradient = self._gradient, None
        assert gradient is not None
        entry = self._entry
        if entry is not None and may_slice(self._shell, self._group, self._home, gradient, entry):
            self._sliced = True
            self._twins = list(slices(self._home, gradient, entry, state))
            return self._twins
        twin = leaf(self._home, gradient)
        twin.__dict__.update(self._twin_attributes)
        if entry is not None:
            state[twin] = entry
        self._twins = [twin]
        return self._twins

    def complete(self, state: dict[torch.Tensor, Entry]) -> None:
        """The call of step has returned."""
        if self._sliced:
            assert self._entry is not None
            take_numbers(self._entry, state[self._twins[-1]])
        if self._moves_version:
            torch.autograd.graph.increment_version(self._home)

    def end(self, state: dict[torch.Tensor, Entry]) -> None:
        """The same, or it has raised."""
        if self._entry is None:
            self.new_entry = state.get(self._twins[0])
        self._twins = []

    def undo(self) -> "_Undo | None":
        """What puts everything back; None for torch's own."""
        return _Undo(self._home, self._entry) if self._guarded else None


def run_together(updates: Sequence[ParameterUpdate]) -> None:
    """Run updates with one `batch_key`, or a single one, in one call of step. If it raises, those behind the one that
    failed have not been run."""
    shell, group = updates[0]._shell, updates[0]._group
    step = raw_step(type(shell))
    assert step is not None
    with plain():
        shell.state = defaultdict(dict)
        undo = updates[0].undo()
        try:
            twins = [twin for update in updates for twin in update.begin(shell.state)]
            shell.param_groups = [{**group, "params": twins}]
            step(shell)
            for update in updates:
                update.complete(shell.state)
        except BaseException:
            if undo is not None:
                undo()
            raise
        finally:
            for update in updates:
                update.end(shell.state)
            shell.param_groups, shell.state = [], defaultdict(dict)


def settings_of(optimizer: torch.optim.Optimizer, group: Group) -> tuple[Group, Group | None]:
    """The group's snapshot, and the same for fused kernels where the choice is ours."""
    settings = hyper_parameters(group)
    return settings, {**settings, "fused": True} if is_open(optimizer, group) else None


def home_update(
    shell: torch.optim.Optimizer,
    parameter: nn.Parameter,
    settings: tuple[Group, Group | None],
    entry: Entry | None,
    home: torch.Tensor,
    gradient: torch.Tensor,
) -> ParameterUpdate:
    """Of a parameter that lives at home. ``settings``: by `settings_of`."""
    group, fused = settings
    if fused is not None and takes_fused(shell, home, gradient, entry):
        return ParameterUpdate(shell, parameter, home, gradient, fused, entry, moves_version=True)
    return ParameterUpdate(shell, parameter, home, gradient, group, entry)


def device_update(
    shell: torch.optim.Optimizer,
    parameter: nn.Parameter,
    settings: tuple[Group, Group | None],
    entry: Entry | None,
    counts: StepCounts,
    value: torch.Tensor,
    gradient: torch.Tensor,
) -> ParameterUpdate:
    """Of a parameter that lives where ``value`` does, to be run at once. Kernels that we choose are those that a step
    at home uses, and so are the numbers."""
    group, fused = settings
    if fused is not None:
        there = dict(entry or {})
        step = there.get("step")
        if isinstance(step, torch.Tensor) and step.device != value.device:
            # The number of steps lives at home, but these kernels want theirs beside the parameter.
            del there["step"]
            if is_count(step) and takes_fused(shell, value, gradient, there):
                there["step"] = counts.copy(step, value.device)
                step += 1
                return ParameterUpdate(shell, parameter, value, gradient, fused, there, moves_version=True)
        elif takes_fused(shell, value, gradient, entry):
            return ParameterUpdate(shell, parameter, value, gradient, fused, entry, moves_version=True)
    moves = bool(group.get("fused"))
    return ParameterUpdate(shell, parameter, value, gradient, group, entry, moves_version=moves)


class _Undo:
    """Puts back a parameter and its state. Not for torch's own optimizers: they raise before they write, unless host
    memory runs out in the middle."""

    def __init__(self, home: torch.Tensor, entry: Entry | None) -> None:
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
