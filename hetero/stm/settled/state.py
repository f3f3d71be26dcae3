"""The settled state of one manager: when it begins and ends, and what others ask of it.

Owns the answer to each of the model's forwards, whether it runs as the user's own. The way there and back is
`hetero.stm.settled.transition`'s.
"""

import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch

from hetero.autograd import in_backward
from hetero.stm.interception.scopes import in_scope
from hetero.stm.plans.fits import ForwardKind
from hetero.stm.settled.kin import Kin
from hetero.stm.settled.transition import Transition
from hetero.stm.tensors.fetch import plain
from hetero.stm.tensors.managed import ManagedTensor
from hetero.units import format_bytes

__all__ = ["Settled"]


class Settled:
    """Of one manager, that goes there and back by ``transition``.

    Attributes:
        device: of ours.
        is_on: it is settled; `Transition` sets this.
        forwards: how many ran settled, each after one check.
        running: the threads of settled forwards that run now, once for each.
    """

    def __init__(self, transition: Transition) -> None:
        self._transition = transition
        self._stm = stm = transition.stm
        self._check, self._attempts = transition.check, transition.attempts
        self._kin = Kin(transition)
        self.optimizer, self.onlookers = transition.optimizer, transition.fitting.onlookers
        self.running = transition.running
        self.device = stm.device
        self.is_on = False
        self.forwards = 0
        stm.standing.settled = self
        # Weakly: see `Standing.settled`; and the onlookers are among what kin have.
        kin, fitting = weakref.ref(self._kin), weakref.ref(transition.fitting)
        self.onlookers.when_looked = lambda: None if (there := kin()) is None else there.send_home()
        stm.home_choice.everything_fits = lambda: (
            (there := fitting()) is not None and there.needs() is not None
        )

    # -- the model's forward --------------------------------------------------------------------------

    def enter(self, trains: bool, signature: object) -> bool:
        """A forward of the model begins: whether as the user's own, by `run`. Settles, or leaves, before."""
        kind = (trains, signature)
        with self._stm.lock:  # other threads may settle or leave as well
            self._stm.standing.thread = threading.get_ident()
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
        budget, device = self._transition.budget, self.device
        passed = self._check.peak - budget
        if passed <= 0 or self._check.has_warned or self._transition.is_amid():
            return
        self._check.has_warned = True
        warnings.warn(
            f"the device_budget of {format_bytes(budget)} was passed by {format_bytes(passed)}, and cannot be kept for "
            f"now: all parameters are on {device} and have to stay there, unmanaged, while something holds memory of "
            "theirs (model.state_dict(), p.data, a view, optimizer.state_dict(), a graph): let go of it, or copy it",
            RuntimeWarning,
            stacklevel=2,
        )

    # -- there ----------------------------------------------------------------------------------------

    def _try(self, kind: ForwardKind) -> bool:
        trains, _ = kind
        if self._stm.plans.last is None or (trains and self._stm.cycles.is_to_be_measured):
            return False
        if not self._attempts.is_due() or not self._settle(kind):
            return False
        self._attempts.note_success()
        return True

    def _settle(self, kind: ForwardKind) -> bool:
        if in_scope() or in_backward():
            return False
        with self._stm.lock, torch.inference_mode(False), torch.no_grad(), plain():
            return self._transition.is_between() and self._kin.settle(kind)

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
        if not self._transition.leave(force=force, amid=amid):
            return False
        if was_on:
            self._kin.take_along(amid=amid)
        return True

    def leave_soon(self) -> bool:
        """As `leave`, and where that cannot be now, at the next forward at which it can."""
        has_left = self.leave()
        if not has_left:
            self._check.must_leave = True
        return has_left

    # -- others ---------------------------------------------------------------------------------------

    def version(self, tensor: ManagedTensor) -> int:
        """`ManagedTensor.version`, as graphs from before know it."""
        return self._transition.parameters.version(tensor)

    def trim(self) -> int:
        """Give back what the allocator caches; returns how many bytes."""
        return self._transition.accelerator.release_cached()

    def has_room_for(self, nbytes: int) -> bool:
        """The iteration that is under way fits with so many bytes of another manager's, which is to settle too."""
        return self._check.has_room_for(nbytes)

    def under_way(self) -> tuple[int, int] | None:
        """`Check.under_way`, of this thread's: no backward goes through what another's forwards have made."""
        return self._check.under_way() if self._stm.standing.thread == threading.get_ident() else None

    def is_amid_unseen(self) -> bool:
        """`Check.is_amid_unseen`."""
        return self._check.is_amid_unseen()

    def note_others(self, *, are_settled: bool) -> None:
        """Other managers of the device are settled, or none is."""
        self._check.note_others(are_settled=are_settled)

    def note_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """``optimizer`` has parameters of ours. `hetero.stm.tensors.onlookers`"""
        if optimizer is not self.optimizer:
            self.forbid()
        elif self._transition.step is not None:
            self._transition.step.watch()

    def forbid(self) -> None:
        """Leave at the next forward, and never settle again."""
        self._check.must_leave = True
        self._attempts.forbid()

    def close(self) -> None:
        """Management ends."""
        self._kin.close()
        self.leave(force=True)
        self._transition.parameters.close()
        self.onlookers.close()

    def abandonment(self) -> Callable[[], None]:
        """What to do when the manager is gone with its model, and this with it. It has no optimizer, which may have the
        model; one that somebody else has has what is to be ended of a step."""
        parameters = self._transition.parameters
        own_step = None if self._transition.own_step is None else weakref.ref(self._transition.own_step)

        def abandon() -> None:
            if own_step is not None and (there := own_step()) is not None:
                there.end()
            parameters.abandon()

        return abandon
