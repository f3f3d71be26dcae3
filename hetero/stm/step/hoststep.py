"""The optimizer's step on homes: now, or queued for the time until each parameter's next use.

Owns what ``optimizer.step()`` becomes while managed. Invariant: nobody can tell a queued update from one that was
done at once, except by the clock. Which parameters are queued is decided anew at every step; the others are
stepped within it.

[Note: within torch's own step]
What surrounds a step (schedulers' wrappers, hooks of the user's and of the process, the profiler) is left in place:
we are the last of its pre-hooks and the first of its post-hooks. In between, ``param_groups`` holds only what is
stepped at once. There, and only there, interception is off.

[Note: when a step is queued]
Where its optimizer treats each parameter by itself; not under modes that a thread does not inherit, nor inside a
forward or a backward. Which of its parameters: [Note: what is queued] in `hetero.stm.step.capture`.

[Note: other threads]
May look at parameters, gradients and states meanwhile, to log or to save them. What is ours of a step, at its begin and
at its end, it does with the lock: an update that is announced and not queued would be waited for, with the lock, for
ever; a copy that is being written on the device would come home in pieces and pass for up to date.
"""

import contextlib
import time
import types
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch.utils._device import DeviceContext
from torch.utils.hooks import RemovableHandle

from hetero.autograd import in_backward
from hetero.devices import Accelerator
from hetero.stm.interception.compiled import check_stepped_eagerly, run_eagerly
from hetero.stm.interception.parameter import is_managed, managed_of
from hetero.stm.interception.scaling import bring_home
from hetero.stm.interception.scopes import in_scope
from hetero.stm.manager import StatefulTensorMgr
from hetero.stm.running.unseen import is_seen
from hetero.stm.step.capture import Capture
from hetero.stm.step.devicehomes import DeviceHomes
from hetero.stm.step.devicesteps import DeviceSteps, DeviceUpdate
from hetero.stm.step.hostrate import HostRate
from hetero.stm.step.jobs import Captured, Surroundings, change, wait
from hetero.stm.step.speculation import Speculation
from hetero.stm.step.statewatch import StateWatch
from hetero.stm.tensors.fetch import plain
from hetero.stm.tensors.managed import ManagedTensor
from hetero.stm.updates.captured import ParameterUpdate
from hetero.stm.updates.kernels import GroupKernels, count_kernels, is_open
from hetero.stm.updates.optimizers import (
    calls_closure_first,
    give_step_back,
    in_place_of,
    innermost,
    steps_alone,
)
from hetero.stm.updates.temporaries import is_measured

__all__ = ["HostStep"]

# Of the host's memory that nobody else needs, for what speculation copies, unless the user asks for more.
_SHARE_OF_HOST = 0.5


class _AtOnce(NamedTuple):
    """Of parameters at home that a step updates itself: their bytes, and when that began."""

    nbytes: int
    began: float


class HostStep:
    """The steps of one optimizer.

    ``note_states``: called after the optimizer's states may have become others. ``kept_ids``: ids of the tensors in
    them that somebody of ours holds as well. ``speculates``: None where host memory is plentiful.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        manager: StatefulTensorMgr,
        accelerator: Accelerator,
        *,
        note_states: Callable[[], None],
        kept_ids: Callable[[], frozenset[int]],
        uses_device: bool,
        speculates: bool | None,
    ) -> None:
        self.optimizer = optimizer
        self._stm = manager
        self._device = accelerator.device
        self._kept_ids = kept_ids
        self._own_step: Any = None
        self._step_method: Any = None
        self._load_hook: RemovableHandle | None = None
        self._attached = False
        # Parameters whose state exists, by index: the same set for all of the step's parts.
        self._stepped: set[int] = set()
        self._stepped_now: set[int] = set()
        self.capture = Capture(optimizer, manager, stepped=self._stepped, kept_ids=kept_ids)
        self._host = HostRate(manager.plans.timings)
        self.device_homes = DeviceHomes(
            optimizer,
            manager,
            accelerator,
            self._host,
            allowed=uses_device,
            stepped=self._stepped,
            note_states=note_states,
        )
        self._states = StateWatch(
            optimizer,
            manager,
            self.capture,
            self.device_homes,
            stepped=self._stepped,
            is_on=lambda: self._attached,
            is_within=lambda: self._around is not None,
        )
        self._device_steps = DeviceSteps(optimizer, manager, accelerator, self.device_homes)
        self.speculation = Speculation(
            optimizer,
            manager,
            self._host,
            allowed=speculates is not False,
            host_share=1.0 if speculates else _SHARE_OF_HOST,
            stepped=self._stepped,
            kept_ids=kept_ids,
            watches=lambda: self.defers and self._attached and self._states.watch(),
        )
        # What is around torch's updates: no dispatch to us, and where they need it, a guard.
        self._around: Any = None
        self._depth = 0
        self._at_once: _AtOnce | None = None
        # Makes the step where everything has come to live on the device: within a closure, or since a method was kept.
        self.step_settled: Callable[..., Any] = lambda inner, args, kwargs: inner(*args, **kwargs)
        self._is_inside = False  # whoever is called to make the step
        # For benchmarks and tests: False steps everything at once.
        self.defers = True
        # How many updates were taken out of torch's own steps so far: queued, or made on the device.
        self.queued = 0

    @property
    def on_device(self) -> frozenset[str]:
        """Names of the parameters that live on the device."""
        return self.device_homes.names

    # -- attaching ------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Take the place of ``optimizer.step``."""
        optimizer = self.optimizer
        self._own_step = optimizer.__dict__.get("step")
        inner = optimizer.step
        host_step = self

        @run_eagerly
        @in_place_of(inner)
        def step(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            check_stepped_eagerly(host_step._is_managed)
            if not host_step._attached or host_step._step_method is not method:
                return host_step.step(inner, args, kwargs)
            return host_step._step(inner, args, kwargs)

        # Schedulers wrap ``step.__func__``: only a bound method has one.
        self._step_method = method = optimizer.__dict__["step"] = types.MethodType(step, optimizer)
        self._load_hook = optimizer.register_load_state_dict_post_hook(self._after_load)
        self._attached = True
        self.watch()

    def _is_managed(self) -> bool:
        """By us, or settled; not when management has ended, and somebody has kept our method."""
        settled = self._stm.settled
        return self._attached or (settled is not None and settled.is_on)

    def watch(self) -> None:
        """Learn of whoever looks at ``optimizer.state`` from now on, if that can be. Its loading has put another one in
        its place."""
        if self._attached:
            self._states.watch()

    def detach(self) -> None:
        """Give it back. Nothing may be queued."""
        optimizer = self.optimizer
        if self._attached:
            self.capture.commit()
        self._attached = False
        self.speculation.close()
        if self._load_hook is not None:
            self._load_hook.remove()
        give_step_back(optimizer, self._step_method, self._own_step)  # else ours stays, and hands on
        self._states.give_back()

    def can_pause(self) -> bool:
        """Nothing is left for it to do but what the optimizer does by itself: `hetero.stm.settled`."""
        return self._attached and self._states.can_give_back()

    def complete(self) -> bool:
        """`DeviceHomes.complete`."""
        return self.device_homes.complete(self._kept_ids())

    def resume(self, stepped: Iterable[int]) -> None:
        """After `detach`: parameters are ours again and live where they are. ``stepped``: those with a state."""
        self.attach()
        self._stepped.clear()
        self._stepped.update(stepped)
        self.device_homes.adopt(self._stepped)
        self.device_homes.bring_states_home(self._kept_ids())
        self.device_homes.note_moves(always=True)

    def _after_load(self, optimizer: torch.optim.Optimizer) -> None:
        """``load_state_dict`` has put other states in the place of those that were known."""
        self.capture.forget_states()
        self._stepped.clear()
        with plain():
            self.device_homes.take({})
        self._stm.home_choice.choose_again()  # until they have been stepped, nobody can say what they would take there
        self.device_homes.note_moves(always=True)

    @property
    def kernels(self) -> list[GroupKernels]:
        """What steps each of the optimizer's groups now, as far as its parameters are ours and live at home."""
        groups = self.optimizer.param_groups
        with plain():
            return [count_kernels(self.optimizer, group, self._is_at_home) for group in groups]

    def _is_at_home(self, parameter: torch.Tensor) -> bool:
        return self.capture.is_ours(parameter) and not managed_of(parameter).stays

    # -- one step -------------------------------------------------------------------------------------

    def step(self, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """In the place of ``inner``, through a method of ours that is not the optimizer's any more: somebody has kept
        it, or a scheduler has wrapped it, and then the one that is in its place may have been called already."""
        if self._attached and not self._is_inside:
            return self._step(inner, args, kwargs)
        return self.step_settled(inner, args, kwargs)

    def _step(self, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._stm.check_process()
        closure = args[0] if args else kwargs.get("closure")
        if closure is not None:
            if not calls_closure_first(self.optimizer):
                # It runs the model: interception has to stay on. Steps of this kind are rare (LBFGS).
                return self._step_with_closure(inner, closure, args, kwargs)
            with torch.enable_grad():
                loss = closure()
            if self._attached:
                self._step(inner, (), {})
            else:
                self.step_settled(inner, (), {})
            return loss
        self._stm.segments.begin_step()
        self._stm.steps.running = self.optimizer
        self.capture.commit()
        complete = False
        self._stepped_now = set()
        self._is_inside = True
        try:
            with innermost(self.optimizer, self._before, self._after):
                result = inner(*args, **kwargs)
            complete = True
        finally:
            self._is_inside = False
            self._stm.steps.running = None
            self._end_unfinished()
            if not complete:
                self._note_writes(self._stm.tensors[index] for index in self._stepped_now)
            self._stm.segments.end_step(complete=complete)
            self.device_homes.note_moves(always=bool(self._stepped_now) or not complete)
            if complete and not self._stepped_now <= self._stepped:
                self._stepped |= self._stepped_now
                self._stm.home_choice.note_more_states()
        return result

    def _step_with_closure(
        self,
        inner: Callable[..., Any],
        closure: Callable[[], Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        optimizer = self.optimizer

        def evaluate() -> Any:
            loss = closure()
            self._stm.cycles.note_evaluated()
            # Optimizers with a choice call it once, before they look at their groups.
            if any(is_open(optimizer, group) for group in optimizer.param_groups):
                self._stm.home_access.wait_all()
                self._stm.home_access.before_writes(self.capture.managed())
                self._around = plain()
                self._around.__enter__()
                self.capture.use_kernels()
            return loss

        self._stm.home_access.wait_all()
        self.capture.commit()
        self._states.keep_home()
        self.device_homes.take({})
        self._is_inside = True
        try:
            result = inner(evaluate, *args[1:], **{k: v for k, v in kwargs.items() if k != "closure"})
        except BaseException:
            self._note_writes(self.capture.managed())
            raise
        finally:
            self._is_inside = False
            self._leave()
            self._stm.gradients.norms.forget_all()  # it may have written to gradients
        self.capture.move_versions()
        self.device_homes.note_moves(always=True)
        return result

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """The last pre-hook: capture what is queued, wait for what is not."""
        self._depth += 1
        if self._depth > 1:  # a step that calls another class's, hooks and all
            return
        with self._stm.lock:  # [Note: other threads]
            self._stm.home_access.finish_updates()
            self.capture.commit()
            bring_home(optimizer)
            self._states.keep_home()
            defers = self._may_defer(optimizer, args, kwargs)
            self.speculation.begin_step(optimizer, defers=defers)
            later, held = self.capture.choose() if defers else ({}, {})
            with plain():
                here = self.device_homes.take(later | held)
            later |= {index: tensor for index, tensor in held.items() if index in here}
            ours = {t.index: t for t in self.capture.managed() if t.index not in later}
            if later:
                self.capture.take(later, here)
            self._stm.home_access.before_writes(list(ours.values()))
            with plain():
                self._stepped_now |= {i for i, t in ours.items() if t.parameter.grad is not None}
                self.capture.use_kernels()
            self.queued += len(later)
            self._around = contextlib.ExitStack()
            self._around.enter_context(plain())
            if self._stm.executor.is_guarded and self._steps_others_there():
                self._around.enter_context(self._stm.executor.guarded_within())
            self._at_once = self._begin_at_once(ours) if held.keys() & ours.keys() else None

    def _begin_at_once(self, stepped: dict[int, ManagedTensor]) -> _AtOnce | None:
        """Where the queue never gets any, because graphs that are alive hold their copies, nobody else tells how long
        the host takes: which is known once all of them have been timed, other than in their first step."""
        tensors = [t for index, t in stepped.items() if index in self._stepped_now]
        nbytes = sum(tensor.home.nbytes for tensor in tensors)
        if self._host.has_timed(nbytes) or not all(t.index in self._stepped for t in tensors):
            return None
        return _AtOnce(nbytes, time.perf_counter())

    def _steps_others_there(self) -> bool:
        """Parameters on the device that are nobody's, of layers that were added, whose step allocates by itself. Ours
        makes its room before."""
        return any(
            parameter.device == self._device and not is_managed(parameter)
            for group in self.optimizer.param_groups
            for parameter in group["params"]
        )

    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """The first post-hook: queue."""
        self._depth -= 1
        if self._depth > 0:
            return
        with self._stm.lock:
            if self._at_once is not None:
                self._host.note(self._at_once.nbytes, time.perf_counter() - self._at_once.began)
            self._leave()
            self.capture.move_versions()
            self._carry_out(*self.capture.end())

    def _carry_out(self, captured: list[Captured], here: list[DeviceUpdate]) -> None:
        """``captured`` is queued, ``here`` is done."""
        ranks = self._stm.by_first_use()
        captured.sort(key=lambda item: (ranks.get(item.tensor.index, len(ranks)), item.tensor.index))
        self.speculation.end_step(captured, Surroundings.of_this_thread())
        if here:
            with plain(), self._stm.collector.homes_changing():
                self._device_steps.run(here, self._note_update)

    def _note_update(self, tensor: ManagedTensor, update: ParameterUpdate) -> None:
        """One on the device is done. It may have made states: where nothing was kept so far, or of a class of the
        user's."""
        if self.capture.enter_state(tensor.parameter, update) or not is_measured(self.optimizer):
            self.device_homes.have_moved = True

    def _leave(self) -> None:
        self._depth = 0
        if self._around is not None:
            self._around.__exit__(None, None, None)
            self._around = None
        self.capture.end_groups()

    def _end_unfinished(self) -> None:
        """Where the step has raised, what was captured is done as far as it would have been."""
        captured, here, others = self.capture.end_failed()
        self._leave()
        with self._stm.lock:
            if captured or here:
                self._carry_out(captured, here)
            self._stm.home_access.roll_back()
            for item in others:
                wait(self._stm.engine, item)
                change(self._stm.engine, item)

    @staticmethod
    def _note_writes(tensors: Iterable[ManagedTensor]) -> None:
        """A step has failed, and may have stepped these before. Kernels that move no versions cannot be asked."""
        for tensor in tensors:
            tensor.clock.note_write()
            tensor.owner.home_access.after_write(tensor)

    # -- what is queued -------------------------------------------------------------------------------

    def _may_defer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> bool:
        """[Note: when a step is queued]."""
        return (
            self.defers
            and all(value is None for value in (*args[1:], *kwargs.values()))
            and not in_scope()
            and not in_backward()
            and not torch.is_inference_mode_enabled()
            and not torch.is_autocast_enabled("cpu")
            and not is_seen()
            and all(
                isinstance(mode, DeviceContext) for mode in torch.overrides._get_current_function_mode_stack()
            )
            and self._states.watch()
            and steps_alone(optimizer)
        )
