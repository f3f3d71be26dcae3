"""The way into the settled state, and back.

Owns when, and in which order; kin together (`hetero.stm.settled.kin`). Invariant: whoever settles, or leaves, either
has done so or left everything as it was.
"""

import contextlib
import functools
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from hetero.autograd import in_backward
from hetero.devices import Accelerator
from hetero.errors import ManageError
from hetero.stm.interception.compiled import CompiledCalls
from hetero.stm.interception.scopes import in_scope
from hetero.stm.interception.transforms import is_transforming
from hetero.stm.living import Living
from hetero.stm.manager import StatefulTensorMgr
from hetero.stm.plans.fits import ForwardKind, Growth
from hetero.stm.settled.attempts import Attempts
from hetero.stm.settled.check import Check
from hetero.stm.settled.exchange import may_go_back
from hetero.stm.settled.fitting import Fitting
from hetero.stm.settled.kin import Shapes, kin_of, shapes_of
from hetero.stm.settled.parameters import OwnParameters
from hetero.stm.settled.who import settled_now
from hetero.stm.step.hoststep import HostStep
from hetero.stm.step.ownstep import OwnStep
from hetero.stm.tensors.fetch import plain
from hetero.stm.tensors.managed import ManagedTensor
from hetero.units import format_bytes

__all__ = ["Settled"]

_everyone: "Living[Settled]" = Living()
# Forwards, for kin that are not ready: a generator and its judge are always in the middle of an iteration.
_MOST_WAITS = 4


class Settled:
    """Of one manager. ``rest``, ``wake``: called where interception ends, and begins again.

    Attributes:
        is_on: it is settled.
        forwards: how many ran settled, each after one check.
        running: the threads of settled forwards that run now, once for each. Whoever has the manager's lock and finds
            none may settle or leave.
        device: of ours.
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
        self._stm = stm
        self._accelerator = accelerator
        self._budget = budget
        self._step = step
        # Nothing here may lead to the model: whoever drops it without closing is noticed by that.
        self._compiled = weakref.ref(compiled)
        self._rest = rest
        self._wake = wake
        self.optimizer = None if step is None else step.optimizer
        self._own_step = None if step is None else OwnStep(step.optimizer, step.step)
        if step is not None and self._own_step is not None:
            step.step_settled = self._own_step.step
        self._fitting = Fitting(stm, accelerator, budget, step)
        self.onlookers = self._fitting.onlookers
        us = weakref.ref(self)  # we have the onlookers
        self.onlookers.when_looked = lambda: None if (there := us()) is None else there._send_kin_home()
        self._thread = threading.get_ident()  # of the last forward
        self._waits = 0
        self._is_bound = False  # had settled while kin had not, and was sent home for it
        self._was_looked_at = False  # in the iteration before the last attempt of our own
        self._attempts = Attempts(allowed=allowed)
        self._check = Check(stm, accelerator, self.optimizer, self._attempts)
        self._parameters = OwnParameters(stm.tensors, stm.residency, stm.gradients.kept, accelerator)
        self.device = stm.device
        self.is_on = False
        self.forwards = 0
        self.running: list[int] = []
        self._has_warned = False  # since it settled
        self._without_state: set[int] = set()  # parameters that have been stepped, and need none
        stm.standing.settled = self
        fitting = weakref.ref(self._fitting)  # see `Standing.settled`
        stm.home_choice.everything_fits = lambda: (
            (there := fitting()) is not None and there.growth() is not None
        )
        _everyone.add(self)

    # -- the model's forward --------------------------------------------------------------------------

    def enter(self, trains: bool, signature: object) -> bool:
        """A forward of the model begins: whether as the user's own, by `run`. Settles, or leaves, before."""
        kind = (trains, signature)
        with self._stm.lock:  # other threads may settle or leave as well
            self._thread = threading.get_ident()
            if self.is_on:
                fits = self._check.admits(kind) or self._check.foresees(kind)
                if not fits and not self.leave():
                    fits = True
                    self._warn_of_alias()
            else:
                fits = self._try(kind)
            if fits:
                self.forwards += 1
                self.running.append(threading.get_ident())
            return fits

    def run(self, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The user's own forward, after `enter` has said so."""
        try:
            return inner(*args, **kwargs)
        except torch.OutOfMemoryError as error:
            self.forbid()
            if (refusal := self._stm.residency.room.for_gaps(error)) is None:
                raise
            raise refusal from error
        finally:
            self.running.remove(threading.get_ident())

    def _warn_of_alias(self) -> None:
        """Once, if the budget was passed: because of what somebody holds, nobody can see to it."""
        passed = self._check.peak - self._budget
        if passed <= 0 or self._has_warned or self._is_amid():
            return
        self._has_warned = True
        warnings.warn(
            f"the device_budget of {format_bytes(self._budget)} was passed by {format_bytes(passed)}, and cannot be "
            f"kept for now: all parameters are on {self._accelerator.device} and have to stay there, unmanaged, "
            "while something holds memory of theirs (model.state_dict(), p.data, a view, optimizer.state_dict(), a "
            "graph): let go of it, or copy it",
            RuntimeWarning,
            stacklevel=2,
        )

    # -- there ----------------------------------------------------------------------------------------

    def _try(self, kind: ForwardKind) -> bool:
        if self._stm.plans.last is None or not self._attempts.is_due() or not self._settle(kind):
            return False
        self._attempts.note_success()
        return True

    def _settle(self, kind: ForwardKind) -> bool:
        if in_scope() or in_backward():
            return False
        with self._stm.lock, torch.inference_mode(False), torch.no_grad(), plain():
            if not self._is_between():
                return False
            self._was_looked_at, self.onlookers.have_looked = self.onlookers.have_looked > 0, 0
            growth = None if self._was_looked_at else self._growth(kind)
            return growth is not None and self._enter_with_kin(kind, growth)

    def _enter_with_kin(self, kind: ForwardKind, growth: Growth) -> bool:
        """As `_enter`, and those that have to be where we are (`hetero.stm.settled.kin`); all of them or none."""
        kin = [one for one in kin_of(self, _everyone) if not one.is_on]
        ready = [one for one in kin if one._is_ready()]
        if len(ready) < len(kin):
            self._waits += 1
            # Who was given nothing of them has not combined them so far.
            may_be_combined = any(one.onlookers.have_values for one in (self, *kin))
            if self._is_bound or may_be_combined or self._waits <= _MOST_WAITS:
                return False
        together = [tensor for one in (self, *ready) for tensor in one._stm.tensors]
        if not all(one._is_private(together) for one in ready) or not self._enter(kind, growth, together):
            self._attempts.note_failure()
            return False
        self._waits = 0
        if not all(one._enter_beside(together) for one in ready):
            self.leave()
            self._attempts.note_failure()
            return False
        return True

    def _is_between(self) -> bool:
        """No iteration is under way."""
        stm = self._stm
        if self.running or stm.segments.is_running or stm.steps.running is not None:  # by another thread
            return False
        return stm.close_iteration()

    def _growth(self, kind: ForwardKind | None) -> Growth | None:
        """What iterations need beside model data, if nothing stands against it as far as that is easily told; for a
        forward of such a kind, if it is called for one."""
        growth = self._fitting.growth()
        is_known = growth is not None and (kind is None or kind in growth.by_kind)
        if growth is None or not is_known or not self._fitting.has_room(growth):
            return None
        if not self._fitting.is_ours_alone():
            self._attempts.forbid()
        return growth if self._attempts.are_allowed else None

    def _enter(self, kind: ForwardKind | None, growth: Growth, together: Sequence[ManagedTensor]) -> bool:
        """It is there; False, and as before, if somebody would be left behind, or there is no memory after all.
        ``together``: what settles now, with ours, or none of it."""
        stm = self._stm
        limit = self._budget - stm.plans.margin
        # By what was measured everything fitted before as well; and the counter would not tell of it again.
        passed = self._attempts.times_passed and self._accelerator.peak_bytes() > limit
        if passed or not self._fitting.is_private(together) or not self._begin_step():
            return False  # where it has passed: nothing but the user may ever reset it
        gradients: dict[int, torch.Tensor] = {}
        if not (self._take_gradients(gradients) and self._parameters.exchange_all()):
            self._end_step()
            for index, gradient in gradients.items():
                stm.gradients.kept.adopt(stm.tensors[index], gradient)
            return False
        for tensor in stm.tensors:
            tensor.parameter.grad = gradients.get(tensor.index)
        self._parameters.give_back_all()
        stm.gradients.norms.stop()
        stm.executor.between.release_cap()
        stm.host_slots.give_up_free()
        self._rest()  # its calls are around those of compiled modules
        if (compiled := self._compiled()) is not None:
            compiled.pause()
        self._check.begin(kind, growth, limit, trained=self._fitting.trained())
        self.is_on, self._has_warned = True, False
        settled_now.add(self)
        return True

    # -- with others (`hetero.stm.settled.kin`) --------------------------------------------------------

    @functools.cached_property
    def shapes(self) -> Shapes:
        """Of its parameters."""
        return shapes_of(self._stm.tensors)

    @property
    def takes_part(self) -> bool:
        """It may be anybody's kin."""
        standing = self._stm.standing
        if standing.is_closed or standing.is_in_child or self._thread != threading.get_ident():
            return False
        return self.is_on or self._stm.plans.last is not None or self.onlookers.have_been_there

    def _is_ready(self) -> bool:
        """Between two iterations, with nothing that stands against it."""
        with self._locked_now() as is_locked:
            if not is_locked or self._was_looked_at or self.onlookers.have_looked:
                return False
            return self._stm.segments.is_idle and self._is_between() and self._growth(None) is not None

    def _is_private(self, together: Sequence[ManagedTensor]) -> bool:
        with self._locked_now() as is_locked:
            return is_locked and self._fitting.is_private(together)

    def _enter_beside(self, together: Sequence[ManagedTensor]) -> bool:
        """Kin of ours has."""
        with self._locked_now() as is_locked:
            growth = self._growth(None) if is_locked and self._is_between() else None
            return growth is not None and self._enter(None, growth, together)

    def _take_kin_along(self, *, amid: bool = False) -> None:
        """They are to be where we are, now or else at their next forward."""
        for one in kin_of(self, _everyone):
            if one.is_on:
                with one._locked_now() as is_locked:
                    has_left = is_locked and not in_backward() and one._leave(force=False, amid=amid)
                if not has_left:
                    one._check.must_leave = True

    def _send_kin_home(self) -> None:
        """Somebody is given our parameters at home, perhaps only to copy them, over and over."""
        if not self.is_on:
            for one in kin_of(self, _everyone):
                one._is_bound = one._is_bound or one.is_on
            self._take_kin_along()

    @contextlib.contextmanager
    def _locked_now(self) -> Iterator[bool]:
        """Whether the lock could be had at once: kin may be at work on another thread, and wait for us."""
        is_locked = self._stm.lock.acquire(blocking=False)
        try:
            yield is_locked
        finally:
            if is_locked:
                self._stm.lock.release()

    def _take_gradients(self, taken: dict[int, torch.Tensor]) -> bool:
        """Into ``taken``, by index, on the device; False if there is no memory for all."""
        try:
            for tensor in self._stm.tensors:
                if tensor.parameter.grad is not None:
                    taken[tensor.index] = self._stm.gradients.give(tensor)
        except torch.OutOfMemoryError:
            self._accelerator.note_answered()
            return False
        return True

    def _begin_step(self) -> bool:
        if self._step is None or self._own_step is None:
            return True
        if not self._step.complete():
            return False
        self._without_state = self._step.device_homes.stepped - self._with_state(self._step.optimizer)
        self._step.detach()
        try:
            self._own_step.begin(self._stm.tensors, self._accelerator.device)
        except ManageError:  # somebody holds a state
            self._end_step()
            return False
        return True

    def _end_step(self) -> None:
        if self._step is not None and self._own_step is not None:
            self._own_step.end()
            self._step.resume(self._with_state(self._step.optimizer) | self._without_state)

    def _with_state(self, optimizer: torch.optim.Optimizer) -> set[int]:
        return {t.index for t in self._stm.tensors if dict.get(optimizer.state, t.parameter)}

    # -- and back -------------------------------------------------------------------------------------

    def make_way(self) -> bool:
        """Another manager of the device lacks room: never again. False if that cannot be now."""
        self.forbid()
        return self.leave(amid=True)

    def leave(self, *, force: bool = False, amid: bool = False) -> bool:
        """Intercept again; False if somebody's alias of a parameter, gradient or state would be left behind, or if one
        stands against a parameter's exchange. ``force``: then too. ``amid``: another model's forward may run,
        which has no parameter of ours."""
        was_on = self.is_on
        if not self._leave(force=force, amid=amid):
            return False
        if was_on:
            self._take_kin_along(amid=amid)
        return True

    def _leave(self, *, force: bool, amid: bool) -> bool:
        stm = self._stm
        with stm.lock, torch.inference_mode(False), torch.no_grad(), plain():
            if not self.is_on:
                return True
            if not force and not self._may_leave(amid=amid):
                return False
            if not self._parameters.exchange_back(force=force):
                return False
            if (compiled := self._compiled()) is not None:
                compiled.resume()
            self._wake()
            self._parameters.take_back_all(amid=amid)
            self._end_step()
            self._check.end()
            self.is_on = False
            settled_now.discard(self)
            stm.begin_anew()
        return True

    def leave_soon(self) -> bool:
        """As `leave`, and where that cannot be now, at the next forward at which it can."""
        has_left = self.leave()
        if not has_left:
            self._check.must_leave = True
        return has_left

    def _may_leave(self, *, amid: bool) -> bool:
        """Nothing runs that would be in the middle of it, and nobody has an alias of what would be left behind."""
        if self._is_amid(may_be_in_scope=amid):
            return False
        if self._own_step is not None and self._own_step.is_viewed(self._stm.tensors):
            return False
        return may_go_back(self._stm.tensors, self._accelerator.device)

    def _is_amid(self, *, may_be_in_scope: bool = False) -> bool:
        """Something runs."""
        return bool(self.running or is_transforming() or (in_scope() and not may_be_in_scope))

    # -- others ---------------------------------------------------------------------------------------

    def version(self, tensor: ManagedTensor) -> int:
        """`ManagedTensor.version`, as graphs from before know it."""
        return self._parameters.version(tensor)

    def trim(self) -> int:
        """Give back what the allocator caches; returns how many bytes."""
        before = self._accelerator.reserved_bytes()
        self._accelerator.release_cached()
        return max(0, before - self._accelerator.reserved_bytes())

    def note_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """``optimizer`` has parameters of ours. `hetero.stm.tensors.onlookers`"""
        if optimizer is not self.optimizer:
            self.forbid()
        elif self._step is not None:
            self._step.watch()

    def forbid(self) -> None:
        """Leave at the next forward, and never settle again."""
        self._check.must_leave = True
        self._attempts.forbid()

    def close(self) -> None:
        """Management ends."""
        _everyone.discard(self)
        self.leave(force=True)
        self._parameters.close()
        self.onlookers.close()

    def abandonment(self) -> Callable[[], None]:
        """What to do when the manager is gone with its model, and this with it. It has no optimizer, which may have the
        model; one that somebody else has has what is to be ended of a step."""
        parameters = self._parameters
        own_step = None if self._own_step is None else weakref.ref(self._own_step)

        def abandon() -> None:
            if own_step is not None and (there := own_step()) is not None:
                there.end()
            parameters.abandon()

        return abandon
