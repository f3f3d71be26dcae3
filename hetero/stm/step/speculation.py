"""Updates begun in backward, as soon as a gradient has left, before anybody has called ``optimizer.step()``.

Owns which parameters' updates are tried, when a trial stands, and when it is taken back. Invariant: nobody sees one:
whoever looks at the parameter, its gradient or its state before the step finds them as they were before the trial,
and a step finds them as if it had done all by itself. Source: speculation then validation (SuperOffload, ASPLOS 2026),
which rolls back approximately; here every bit is kept.

[Note: what is expected]
That one backward is followed by a step with the settings of now, whose clipping changes nothing (its factor is exactly
1). Expected as long as iterations are like that; after one that is not, 1, 2, 4, 8 ... of them are only watched. And
only where it pays: where updates take longer than what the next forward can hide.

[Note: where a trial is met]
While it may be taken back, ``tensor.pending`` is its `Attempt`. Everybody who uses home, gradient or state waits for
that, and there finds `_roll_back`.
"""

import weakref
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, cast

import torch

from hetero.stm.deferred import Attempt, Update
from hetero.stm.gradients.changes import Wish
from hetero.stm.interception.parameter import is_managed, managed_of
from hetero.stm.manager import StatefulTensorMgr
from hetero.stm.step.expectation import Expectation
from hetero.stm.step.hostrate import HostRate
from hetero.stm.step.jobs import Captured, Surroundings, make_update
from hetero.stm.step.snapshots import Snapshots
from hetero.stm.step.trials import Snapshot, Trial, complete, same_value
from hetero.stm.tensors.exposure import gradient_has_one_name, state_is_private
from hetero.stm.tensors.fetch import plain
from hetero.stm.tensors.managed import ManagedTensor
from hetero.stm.updates.captured import home_update, settings_of
from hetero.stm.updates.optimizers import Entry, Group, hyper_parameters, make_shell, steps_alone

__all__ = ["Speculation"]

# Updates that take a smaller share of the forward are hidden by it well enough, and are not begun in backward.
_HIDDEN = 0.5
# Attributes of an optimizer that are compared by themselves, or say nothing of its updates.
_CONTENT = ("param_groups", "state", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


@dataclass(frozen=True, slots=True)
class _Setting:
    """A backward's: the settings of each parameter's group, by the parameter's id."""

    task: int
    shell: torch.optim.Optimizer
    groups: dict[int, tuple[Group, Group | None]]
    ranks: dict[int, int]


class Speculation:
    """That of one optimizer. ``stepped``: indices of parameters whose states exist; ``watches``: whether we learn of
    whoever looks at ``optimizer.state``; ``host_share``: of the host's memory that nobody else needs, to copy to what
    trials overwrite."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        stm: StatefulTensorMgr,
        host: HostRate,
        *,
        allowed: bool,
        host_share: float,
        stepped: AbstractSet[int],
        kept_ids: Callable[[], frozenset[int]],
        watches: Callable[[], bool],
    ) -> None:
        self._optimizer = optimizer
        self._stm = stm
        self._host = host
        self._stepped = stepped
        self._kept_ids = kept_ids
        self._watches = watches
        self._setting: _Setting | None = None
        self._task = -1
        self._surroundings: Surroundings | None = None
        self._wishes: list[Wish] = []  # what the last step was clipped with
        self.expectation = Expectation()
        self.snapshots = Snapshots(
            stm.ledger,
            stm.host_slots,
            stm.tensors,
            share=host_share,
            finish=stm.residency.orders.finish_update,
        )
        self._allowed = allowed
        if allowed:
            # Weakly, for the reason that `DeviceHomes` has; what is pending can be taken back without us.
            me, expectation = weakref.ref(self), self.expectation
            stm.uses.try_early = lambda tensor, gradient: (
                None if (here := me()) is None else here.try_early(tensor, gradient)
            )
            stm.residency.orders.roll_back = lambda tensor: _roll_back(stm, expectation, tensor)
            stm.plans.timings.copy_work = self.snapshots.work
            stm.home_choice.updates_early = lambda: False if (here := me()) is None else here.is_habit

    @property
    def is_habit(self) -> bool:
        """Plans should count on updates that begin in backward."""
        return self.expectation.is_habit and all(tensor.low is None for tensor in self._stm.tensors)

    # -- in backward ----------------------------------------------------------------------------------

    def try_early(self, tensor: ManagedTensor, gradient: torch.Tensor) -> None:
        """``gradient``, on its way down, is about to become ``p.grad``: perhaps begin the update. Keeps no reference
        to it, only to its memory."""
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task = task
            self.expectation.note_backward()
        if not (self._is_expected() and self._stm.gradients.kept.keeps):
            return
        arrival = self._stm.gradients.unread_arrival(tensor)
        if arrival is None or tensor.pending is not None or tensor.index not in self._stepped:
            return
        # What backward reads at home, and what runs right behind it, comes without asking us.
        if tensor.paths.lead_home or tensor.parameter._post_accumulate_grad_hooks or tensor.low is not None:
            return
        setting = self._settings(task)
        settings = setting.groups.get(id(tensor.parameter))
        # Nobody counts the writes to a gradient that is made in inference mode.
        if settings is None or not tensor.is_private() or gradient.is_inference():
            return
        entry = dict.get(self._optimizer.state, tensor.parameter)
        if entry is not None and not state_is_private(entry, self._kept_ids()):
            return
        buffers = self.snapshots.buffers(tensor, entry)
        self._stm.trials.snapshot_bytes = self.snapshots.nbytes
        if buffers is None or not self._drop_copy(tensor):
            return
        self._begin(tensor, gradient, arrival, setting, settings, entry, buffers)

    def _is_expected(self) -> bool:
        return self.expectation.is_open and self._stm.executor.follows_plan

    def _begin(
        self,
        tensor: ManagedTensor,
        gradient: torch.Tensor,
        arrival: torch.Event,
        setting: _Setting,
        settings: tuple[Group, Group | None],
        entry: Entry | None,
        buffers: list[torch.Tensor],
    ) -> None:
        stm, surroundings = self._stm, self._surroundings
        assert surroundings is not None
        alias = torch.empty(0, dtype=gradient.dtype, device="cpu").set_(
            gradient.untyped_storage(), gradient.storage_offset(), gradient.size(), gradient.stride()
        )
        update = home_update(setting.shell, tensor.parameter, settings, entry, tensor.home, alias)
        trial = Trial(
            engine=stm.engine,
            tensor=tensor,
            update=update,
            entry=entry,
            settings=settings[0],
            shell=setting.shell,
            gradient=alias,
            version=gradient._version,
            arrival=arrival,
            uploads=stm.residency.uploads.reading(tensor),
            snapshot=Snapshot(tensor.home, entry, buffers),
            surroundings=surroundings,
            note=self._host.note,
            note_copies=self.snapshots.note_copies,
        )
        stm.trials.tried += 1
        attempt = Attempt(trial, setting.ranks.get(tensor.index, len(setting.ranks)))
        tensor.pending = attempt
        stm.updates.try_early(attempt)
        stm.executor.renew(tensor)

    def _drop_copy(self, tensor: ManagedTensor) -> bool:
        return tensor.data is None or (not tensor.is_dirty and self._stm.residency.evict(tensor))

    def _settings(self, task: int) -> _Setting:
        """As they are in this backward."""
        if self._setting is None or self._setting.task != task:
            optimizer = self._optimizer
            groups: dict[int, tuple[Group, Group | None]] = {}
            if self._is_possible():
                for group in optimizer.param_groups:
                    settings = settings_of(optimizer, group)
                    groups.update((id(parameter), settings) for parameter in group["params"])
            self._setting = _Setting(task, make_shell(optimizer), groups, self._ranks())
        return self._setting

    def _ranks(self) -> dict[int, int]:
        """Those whose copies are renewed before the step come first: the link can carry them while backward runs."""
        ranks, plan = dict(self._stm.by_first_use()), self._stm.plans.last
        for index in () if plan is None else (*plan.places, *plan.renewable):
            ranks[index] -= len(ranks)
        return ranks

    def _is_possible(self) -> bool:
        optimizer, surroundings = self._optimizer, self._surroundings
        return (
            surroundings is not None
            and not surroundings.flushes  # then even a factor of 1 changes numbers
            and getattr(optimizer, "grad_scale", None) is None
            and steps_alone(optimizer)
            and self._watches()
            and not torch.compiler.is_compiling()
        )

    # -- at the step ----------------------------------------------------------------------------------

    def begin_step(self, optimizer: torch.optim.Optimizer, *, defers: bool) -> None:
        """What the last step left to be done is done. All gradients are there. ``defers``: this one may be done later,
        and trials stand that do what it would do."""
        wishes, self._wishes = self._wishes, []
        changes = any([not wish.changes_nothing(self._stm.engine) for wish in wishes])
        self.expectation.note_clipping(changes=changes)
        if not self.expectation.is_open and all(tensor.pending is None for tensor in self._stm.tensors):
            self.snapshots.release()
            self._stm.trials.snapshot_bytes = 0
        if defers:
            self._keep_right(optimizer)
        else:
            self._stm.home_access.roll_back()

    def _keep_right(self, optimizer: torch.optim.Optimizer) -> None:
        """Take back what the step would do otherwise."""
        stm, surroundings = self._stm, Surroundings.of_this_thread()
        with plain():
            shell: Any = None
            for group in optimizer.param_groups:
                settings: Group | None = None
                for parameter in group["params"]:
                    attempt = managed_of(parameter).pending if is_managed(parameter) else None
                    if not isinstance(attempt, Attempt) or not attempt.tentative:
                        continue
                    settings = hyper_parameters(group) if settings is None else settings
                    shell = make_shell(optimizer) if shell is None else shell
                    trial = _trial_of(attempt)
                    if (
                        surroundings == trial.surroundings
                        and _is_same_gradient(parameter, trial)
                        and dict.get(optimizer.state, parameter) is trial.entry
                        and same_value(settings, trial.settings)
                        and _is_same_shell(shell, trial.shell)
                    ):
                        attempt.is_claimed = True
            for tensor in stm.tensors:
                pending = tensor.pending
                if isinstance(pending, Attempt) and pending.tentative and not pending.is_claimed:
                    stm.residency.orders.roll_back(tensor)

    def _update(self, item: Captured, surroundings: Surroundings) -> Update:
        """What does ``item``, which the step has captured: completes its trial, if there was one."""
        attempt = item.tensor.pending
        if not isinstance(attempt, Attempt) or not attempt.tentative:
            return make_update(self._stm.engine, item, surroundings, self._host.note)
        trial = _trial_of(attempt)
        trial.changes = item.arrivals.changes
        attempt.confirm(
            complete(
                attempt,
                trial,
                item,
                queue=self._stm.updates,
                surroundings=surroundings,
                tell=self._tell,
            )
        )
        return attempt

    def end_step(self, captured: list[Captured], surroundings: Surroundings) -> None:
        """Queue ``captured``, and complete what was tried of it."""
        self._stm.home_access.await_updates(
            [(item.tensor, self._update(item, surroundings)) for item in captured]
        )
        if not self._allowed:
            return
        self._stm.home_access.roll_back()  # what the step did not know
        self._surroundings = surroundings
        self._setting, self._task = None, -1
        wishes = {id(w): w for item in captured for w in item.arrivals.changes if isinstance(w, Wish)}
        self._wishes = list(wishes.values())
        host = sum(item.tensor.home.nbytes for item in captured)
        self.expectation.note_step(deferred=bool(captured), pays=self._pays(host))

    def close(self) -> None:
        """No step follows: hold nothing of the last one's, which lies on the device."""
        self._wishes = []
        self._setting = None

    def _tell(self, right: bool) -> None:
        """On the queue's thread."""
        if not right:
            self._stm.trials.taken_back += 1
            self.expectation.note_taken_back()

    def _pays(self, nbytes: int) -> bool:
        """Updates of ``nbytes`` of parameters take longer than a good part of the forward that could hide them."""
        forward = self._stm.plans.forward_seconds()
        if forward is None or not self._host.has_timed(nbytes):
            return False
        return self._host.seconds_for(nbytes) > _HIDDEN * forward


def _trial_of(attempt: Attempt) -> Trial:
    """All attempts of this manager's queue are ours."""
    return cast(Trial, attempt.trial)


def _roll_back(stm: StatefulTensorMgr, expectation: Expectation, tensor: ManagedTensor) -> None:
    """As if its update had not been tried."""
    attempt, residency = tensor.pending, stm.residency
    assert isinstance(attempt, Attempt)
    with plain(), torch.inference_mode(False):
        stm.updates.retract(attempt)
        if tensor.is_resident:
            residency.drop(tensor)
        residency.uploads.wait(tensor, tensor.home)
        _trial_of(attempt).undo()
        attempt.forget()
        tensor.pending = None
    stm.trials.taken_back += 1
    expectation.note_taken_back()


def _is_same_gradient(parameter: torch.Tensor, trial: Trial) -> bool:
    gradient = parameter.grad
    if gradient is None or gradient.layout is not torch.strided or gradient.requires_grad:
        return False
    alias = trial.gradient
    same = (
        gradient.data_ptr() == alias.data_ptr()
        and gradient._version == trial.version
        and gradient.dtype == alias.dtype
        and (gradient.size(), gradient.stride()) == (alias.size(), alias.stride())
    )
    del gradient, alias
    return same and gradient_has_one_name(parameter)


def _is_same_shell(first: torch.optim.Optimizer, second: torch.optim.Optimizer) -> bool:
    """Attributes of the optimizer's own."""
    ours = {key: value for key, value in vars(first).items() if key not in _CONTENT}
    theirs = {key: value for key, value in vars(second).items() if key not in _CONTENT}
    return same_value(ours, theirs)
