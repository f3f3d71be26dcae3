"""One manager's way into the settled state, and back.

Owns the order in which that is done. Invariant: whoever settles, or leaves, either has done so or left everything as it
was. When, is `hetero.stm.settled.state`'s; with whom, `hetero.stm.settled.kin`'s.
"""

import weakref
from collections.abc import Callable, Sequence

import torch

from hetero.devices import Accelerator
from hetero.errors import ManageError
from hetero.stm.interception.compiled import CompiledCalls
from hetero.stm.interception.scopes import in_scope
from hetero.stm.interception.transforms import is_transforming
from hetero.stm.manager import StatefulTensorMgr
from hetero.stm.plans.fits import ForwardKind, Needs
from hetero.stm.settled.attempts import Attempts
from hetero.stm.settled.check import Check
from hetero.stm.settled.exchange import may_go_back
from hetero.stm.settled.fitting import Fitting
from hetero.stm.settled.parameters import OwnParameters
from hetero.stm.settled.who import settled_now, settled_on
from hetero.stm.step.hoststep import HostStep
from hetero.stm.step.ownstep import OwnStep
from hetero.stm.tensors.fetch import plain
from hetero.stm.tensors.managed import ManagedTensor
from hetero.stm.tensors.owner import SettledState

__all__ = ["Transition"]


class Transition:
    """Of one manager. ``allowed``: by the user; ``rest``, ``wake``: called where interception ends, and begins again.

    Attributes:
        running: the threads of settled forwards that run now, once for each. Whoever has the manager's lock and finds
            none may settle or leave.
        fitting, check, attempts, parameters, own_step: what it asks and does, each a part of its own.
    """

    def __init__(
        self,
        stm: StatefulTensorMgr,
        accelerator: Accelerator,
        budget: int,
        *,
        step: HostStep | None,
        compiled: CompiledCalls,
        allowed: bool,
        rest: Callable[[], None],
        wake: Callable[[], None],
    ) -> None:
        self.stm = stm
        self.accelerator = accelerator
        self.budget = budget
        self.step = step
        # Nothing here may lead to the model: whoever drops it without closing is noticed by that.
        self._compiled = weakref.ref(compiled)
        self._rest = rest
        self._wake = wake
        self.optimizer = None if step is None else step.optimizer
        self.own_step = None if step is None else OwnStep(step.optimizer, step.step)
        if step is not None and self.own_step is not None:
            step.step_settled = self.own_step.step
        self.fitting = Fitting(stm, accelerator, budget, step)
        self.attempts = Attempts(allowed=allowed)
        self.check = Check(stm, accelerator, self.optimizer, self.attempts)
        self.parameters = OwnParameters(stm.tensors, stm.residency, stm.gradients.kept, accelerator)
        self.running: list[int] = []
        self._without_state: set[int] = set()  # parameters that have been stepped, and need none

    @property
    def is_on(self) -> bool:
        """It is settled."""
        return self.stm.standing.is_settled

    # -- there ----------------------------------------------------------------------------------------

    def is_between(self) -> bool:
        """No iteration is under way."""
        stm = self.stm
        if self.running or stm.segments.is_running or stm.steps.running is not None:  # by another thread
            return False
        return stm.close_iteration()

    def needs(self, kind: ForwardKind | None, *, with_kin: bool = False) -> Needs | None:
        """What iterations need beside model data, if nothing stands against it as far as that is easily told; for a
        forward of such a kind, if it is called for one. ``with_kin``: others are to settle with this one."""
        needs = self.fitting.needs()
        if needs is None or (kind is not None and kind not in needs.by_kind):
            return None
        if not self.fitting.has_room(needs, beside=with_kin or bool(settled_on(self.stm.device))):
            return None
        if not self.fitting.is_ours_alone():
            self.attempts.forbid()
        return needs if self.attempts.are_allowed else None

    def enter(self, kind: ForwardKind | None, needs: Needs, together: Sequence[ManagedTensor]) -> bool:
        """It is there; False, and as before, if somebody would be left behind, or there is no memory after all.
        ``together``: what settles now, with ours, or none of it."""
        stm = self.stm
        limit = self.budget - stm.plans.margin
        # By what was measured everything fitted before as well, and the counter keeps an old peak: until the user
        # resets it, having passed once forbids settling.
        passed = self.attempts.times_passed and self.accelerator.peak_bytes() > limit
        if passed or not self.fitting.is_private(together) or not self._begin_step():
            return False
        gradients: dict[int, torch.Tensor] = {}
        if not (self._take_gradients(gradients) and self.parameters.exchange_all()):
            self._end_step()
            for index, gradient in gradients.items():
                stm.gradients.kept.adopt(stm.tensors[index], gradient)
            return False
        for tensor in stm.tensors:
            tensor.parameter.grad = gradients.get(tensor.index)
        self.parameters.give_back_all()
        stm.gradients.norms.stop()
        stm.executor.between.release_cap()
        stm.host_slots.give_up_free()
        self._rest()  # its calls are around those of compiled modules
        if (compiled := self._compiled()) is not None:
            compiled.pause()
        self.check.begin(kind, needs, limit, trained=self.fitting.trained())
        self._settled.is_on = True
        settled_now.add(self._settled)
        self._tell_others()
        return True

    def _take_gradients(self, taken: dict[int, torch.Tensor]) -> bool:
        """Into ``taken``, by index, on the device; False if there is no memory for all."""
        try:
            for tensor in self.stm.tensors:
                if tensor.parameter.grad is not None:
                    taken[tensor.index] = self.stm.gradients.give(tensor)
        except torch.OutOfMemoryError:
            self.accelerator.note_answered()
            return False
        return True

    def _begin_step(self) -> bool:
        if self.step is None or self.own_step is None:
            return True
        if not self.step.complete():
            return False
        self._without_state = self.step.device_homes.stepped - self._with_state(self.step.optimizer)
        self.step.detach()
        try:
            self.own_step.begin(self.stm.tensors, self.accelerator.device)
        except ManageError:  # somebody holds a state
            self._end_step()
            return False
        return True

    def _end_step(self) -> None:
        if self.step is not None and self.own_step is not None:
            self.own_step.end()
            self.step.resume(self._with_state(self.step.optimizer) | self._without_state)

    def _with_state(self, optimizer: torch.optim.Optimizer) -> set[int]:
        return {t.index for t in self.stm.tensors if dict.get(optimizer.state, t.parameter)}

    # -- and back -------------------------------------------------------------------------------------

    def leave(self, *, force: bool = False, amid: bool = False) -> bool:
        """As `hetero.stm.settled.state.Settled.leave`, alone."""
        stm = self.stm
        with stm.lock, torch.inference_mode(False), torch.no_grad(), plain():
            if not self.is_on:
                return True
            if not force and not self._may_leave(amid=amid):
                return False
            is_under_way = self.check.is_under_way()
            if not self.parameters.exchange_back(force=force):
                return False
            if (compiled := self._compiled()) is not None:
                compiled.resume()
            self._wake()
            self.parameters.take_back_all(amid=amid)
            self._end_step()
            self.check.end(left_amid=is_under_way)
            self._settled.is_on = False
            settled_now.discard(self._settled)
            self._tell_others()
            stm.begin_anew()
        return True

    def _may_leave(self, *, amid: bool) -> bool:
        """Nothing runs that would be in the middle of it, and nobody has an alias of what would be left behind."""
        if self.is_amid(may_be_in_scope=amid):
            return False
        if self.own_step is not None and self.own_step.is_viewed(self.stm.tensors):
            return False
        return may_go_back(self.stm.tensors, self.accelerator.device)

    def is_amid(self, *, may_be_in_scope: bool = False) -> bool:
        """Something runs."""
        return bool(self.running or is_transforming() or (in_scope() and not may_be_in_scope))

    def _tell_others(self) -> None:
        """Whether they are alone on the device, or this one is."""
        settled = settled_on(self.stm.device)
        for one in settled:
            one.note_others(are_settled=len(settled) > 1)

    @property
    def _settled(self) -> SettledState:
        settled = self.stm.standing.settled
        assert settled is not None  # it has us
        return settled
