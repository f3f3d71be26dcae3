"""What one ``optimizer.step()`` leaves to be done later, and what it does itself.

Owns the choice, parameter by parameter, and ``param_groups`` while the step runs: they hold only what is stepped at
once, with the kernels that `hetero.stm.updates.kernels` chooses. Invariant: after the step, however it ended, the
groups are the user's; each parameter has been captured or has been left in them, never both.

[Note: a step that fails]
Torch's own step their groups one after the other, and refuse one (a sparse gradient, say) before they step any of it:
what was captured of the groups before is done, and of that one and those after it is not.

[Note: what is queued]
A parameter that has been stepped before (so that its state exists), whose optimizer treats each by itself, and whose
memory, gradient and state nobody else holds (`hetero.stm.tensors.exposure`).
"""

import operator
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Any

import torch

from hetero.stm.homeaccess import Arrivals
from hetero.stm.interception.parameter import is_managed, managed_in, managed_of
from hetero.stm.manager import StatefulTensorMgr
from hetero.stm.step.devicesteps import DeviceUpdate
from hetero.stm.step.groups import GroupsOfStep
from hetero.stm.step.jobs import Captured
from hetero.stm.step.watched import WatchedState
from hetero.stm.tensors.exposure import gradient_is_plain, gradient_is_private, state_is_private
from hetero.stm.tensors.fetch import plain
from hetero.stm.tensors.managed import ManagedTensor
from hetero.stm.updates.captured import ParameterUpdate, device_update, home_update, settings_of
from hetero.stm.updates.counts import StepCounts
from hetero.stm.updates.kernels import split
from hetero.stm.updates.optimizers import Group, SettingsAtHome, at_home, is_known, make_shell

__all__ = ["Capture"]


class Capture:
    """Of one optimizer's steps. ``stepped``: parameters whose state exists, by index; ``kept_ids`` as in `HostStep`."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        manager: StatefulTensorMgr,
        *,
        stepped: AbstractSet[int],
        kept_ids: Callable[[], frozenset[int]],
    ) -> None:
        self._optimizer = optimizer
        self._stm = manager
        self._stepped = stepped
        self._kept_ids = kept_ids
        self._groups: list[Group] | None = None  # the user's, while others stand in their place
        self._sent_home: list[SettingsAtHome] = []
        self._written_unseen: list[torch.Tensor] = []
        # Updates that may make the first entry of a parameter of whose optimizer nothing was kept so far.
        self._without_entry: list[tuple[Any, ParameterUpdate]] = []
        # Of the step that runs: for the queue's thread, and on the device.
        self.queued: list[Captured] = []
        self.here: list[DeviceUpdate] = []

    @property
    def is_under_way(self) -> bool:
        """The groups are not the user's now."""
        return self._groups is not None

    def managed(self) -> list[ManagedTensor]:
        """Of the optimizer's parameters, those that are ours."""
        return [tensor for tensor in managed_in(self._optimizer) if tensor.owner is self._stm]

    def is_ours(self, parameter: torch.Tensor) -> bool:
        """One of them, and its home is on the host."""
        return (
            parameter.device.type == "cpu"
            and is_managed(parameter)
            and managed_of(parameter).owner is self._stm
        )

    def choose(self) -> tuple[dict[int, ManagedTensor], dict[int, ManagedTensor]]:
        """[Note: what is queued], as far as it is a matter of one parameter; and those for which that is so but that
        somebody holds the copy on the device (a graph that is alive), which is what is stepped if they come to live
        there. By index."""
        kept, stepped = self._kept_ids(), self._stepped
        chosen, held = dict[int, ManagedTensor](), dict[int, ManagedTensor]()
        with plain():
            for tensor in self.managed():
                if tensor.pending is not None:  # being tried, and right so far
                    chosen[tensor.index] = tensor
                    continue
                if tensor.index in stepped and gradient_is_plain(tensor.parameter.grad):
                    entry = dict.get(self._optimizer.state, tensor.parameter)
                    if (
                        gradient_is_private(tensor.parameter)
                        and tensor.home_is_private()
                        and (entry is None or state_is_private(entry, kept))
                    ):
                        (chosen if tensor.is_private() else held)[tensor.index] = tensor
                    del entry  # or the next one of it would be counted twice
        return chosen, held

    def take(self, later: dict[int, ManagedTensor], here: dict[int, ManagedTensor]) -> None:
        """Take ``later`` out of the groups; of these, ``here`` are stepped on the device."""
        optimizer = self._optimizer
        arrivals = self._stm.home_access.begin_writes_later(
            [t for index, t in later.items() if index not in here]
        )
        # Each is used by one thread at a time: the queue's, and this one.
        shell, shell_here = make_shell(optimizer), make_shell(optimizer)
        counts = StepCounts()
        rest = []
        with plain():
            for group in optimizer.param_groups:
                settings = settings_of(optimizer, group)
                kept = []
                for parameter in group["params"]:
                    tensor = later.get(managed_of(parameter).index) if is_managed(parameter) else None
                    if tensor is None or tensor.parameter is not parameter:
                        kept.append(parameter)
                    elif tensor.index in here:
                        entry = dict.get(optimizer.state, parameter)
                        make = partial(device_update, shell_here, parameter, settings, entry, counts)
                        self.here.append(DeviceUpdate(tensor, make))
                    else:
                        self._queue(tensor, arrivals[tensor.index], shell, settings)
                # Torch's own do without groups; a user's may look into its first.
                if kept or not is_known(optimizer):
                    rest.append({**group, "params": kept})
        given = optimizer.param_groups
        groups = GroupsOfStep([*rest, *_one_not_capturable(rest, given)], users=given)
        self._groups, optimizer.param_groups = given, groups

    def use_kernels(self) -> None:
        """What the step is left to do, it does with the kernels that `hetero.stm.updates.kernels` chooses."""
        optimizer = self._optimizer
        given = optimizer.param_groups
        placed = [self._place_settings(group) for group in given]
        groups, self._written_unseen = split(optimizer, placed, self.is_ours)
        if self._written_unseen or any(map(operator.is_not, placed, given)):
            if self._groups is None:
                self._groups = given
            optimizer.param_groups = GroupsOfStep(groups, users=self._groups)

    def _place_settings(self, group: Group) -> Group:
        """Where its parameters are."""
        if not all(map(self.is_ours, group["params"])):
            return group
        if not is_known(self._optimizer):  # it may write to its group
            self._sent_home.append(SettingsAtHome(group))
            return group
        return at_home(group)

    def end_groups(self) -> None:
        """They are the user's again."""
        while self._sent_home:
            self._sent_home.pop().end()
        if self._groups is not None:
            self._optimizer.param_groups, self._groups = self._groups, None

    def move_versions(self) -> None:
        """As a for-loop would have."""
        written, self._written_unseen = self._written_unseen, []
        with plain():
            torch.autograd.graph.increment_version(written)

    def end(self) -> tuple[list[Captured], list[DeviceUpdate]]:
        """What was captured is the caller's now: for the queue, and for the device."""
        queued, here = self.queued, self.here
        self.queued, self.here = [], []
        return queued, here

    def end_failed(self) -> tuple[list[Captured], list[DeviceUpdate], list[Captured]]:
        """As `end`, if the step has raised: what is to be done all the same ([Note: a step that fails]), and what is
        not. The groups are not the user's yet."""
        queued, here = self.end()
        done = self._done_before_failure() if queued or here else set()
        return (
            [item for item in queued if id(item.tensor.parameter) in done],
            [item for item in here if id(item.tensor.parameter) in done],
            [item for item in queued if id(item.tensor.parameter) not in done],
        )

    def _done_before_failure(self) -> set[int]:
        """Ids of the parameters in groups before the one that was stepped when it raised; none, if that had none."""
        groups = self._optimizer.param_groups
        failed = groups.present if isinstance(groups, GroupsOfStep) else {}
        first = next(iter(failed.get("params", ())), None)
        done = set[int]()
        for group in self._groups or ():
            ids = {id(parameter) for parameter in group["params"]}
            if id(first) in ids:
                return done
            done |= ids
        return set()

    def commit(self) -> None:
        """States that updates have made are the optimizer's. Nothing may be queued."""
        made, self._without_entry = self._without_entry, []
        if made and not isinstance(self._optimizer.state, WatchedState):
            return  # somebody has put another dict in its place since
        for parameter, update in made:
            self.enter_state(parameter, update)

    def enter_state(self, parameter: torch.Tensor, update: ParameterUpdate) -> bool:
        """``update`` is done: what it has made where nothing was kept so far is the optimizer's; whether there is."""
        if update.new_entry is None:
            return False
        with plain():
            dict.__setitem__(self._optimizer.state, parameter, update.new_entry)
        return True

    def forget_states(self) -> None:
        """The optimizer has others now."""
        self._without_entry.clear()

    def _queue(
        self,
        tensor: ManagedTensor,
        arrivals: Arrivals,
        shell: torch.optim.Optimizer,
        settings: tuple[Group, Group | None],
    ) -> None:
        parameter = tensor.parameter
        gradient = parameter.grad
        assert gradient is not None
        entry = dict.get(self._optimizer.state, parameter)
        update = home_update(shell, parameter, settings, entry, tensor.home, gradient)
        if entry is None:
            self._without_entry.append((parameter, update))
        self.queued.append(Captured(tensor=tensor, update=update, arrivals=arrivals, gradient=gradient))


def _one_not_capturable(rest: list[Group], given: list[Group]) -> list[Group]:
    """Where it takes one: torch warns once of an optimizer all of whose groups are capturable, and all of none are."""
    if any(not group.get("capturable", True) for group in rest):
        return []
    return [{**group, "params": []} for group in given if not group.get("capturable", True)][:1]
