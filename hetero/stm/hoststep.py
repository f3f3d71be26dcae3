"""The optimizer's step on homes: now, or queued for the time until each parameter's next use.

Owns what ``optimizer.step()`` becomes while managed. Invariant: nobody can tell a queued update from one that was
done at once, except by the clock. Which parameters are queued is decided anew at every step; the others are
stepped within it.

[Note: within torch's own step]
What surrounds a step (schedulers' wrappers, hooks of the user's and of the process, the profiler) is left in place:
we are the last of its pre-hooks and the first of its post-hooks. In between, ``param_groups`` holds only what is
stepped at once. There, and only there, interception is off.

[Note: what is queued]
A parameter that has been stepped before (so that its state exists), whose optimizer treats each by itself, and whose
memory, gradient and state nobody else holds (`hetero.stm.exposure`). No step is queued under modes that a
thread does not inherit, inside a forward or a backward.
"""

import sys
import types
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch.utils._device import DeviceContext

from hetero.devices import CopyEngine
from hetero.stm.deferred import Update
from hetero.stm.exposure import gradient_is_private, state_is_private
from hetero.stm.fetch import plain
from hetero.stm.intercept import in_scope, is_managed, managed_of
from hetero.stm.manager import Arrivals, StatefulTensorMgr
from hetero.stm.optimizers import ParameterUpdate, hyper_parameters, is_known, make_shell, steps_alone
from hetero.stm.tensors import ManagedTensor
from hetero.stm.watched import WatchedState

__all__ = ["HostStep"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Captured:
    tensor: ManagedTensor
    update: ParameterUpdate
    arrivals: Arrivals
    gradient: torch.Tensor


class HostStep:
    """The steps of one optimizer.

    ``note_states``: called after the optimizer's states may have become others. ``kept_ids``: ids of the tensors in
    them that somebody of ours holds as well.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        manager: StatefulTensorMgr,
        *,
        note_states: Callable[[], None],
        kept_ids: Callable[[], frozenset[int]],
    ) -> None:
        self._optimizer = optimizer
        self._stm = manager
        self._note_states = note_states
        self._kept_ids = kept_ids
        self._own_step: Any = None
        self._step_method: Any = None
        self._attached = False
        # Parameters whose state exists, by index.
        self._stepped: set[int] = set()
        self._stepped_now: set[int] = set()
        self._without_entry: list[tuple[Any, ParameterUpdate]] = []
        self._captured: list[_Captured] = []
        self._groups: list[dict[str, Any]] | None = None
        self._plain: Any = None
        self._depth = 0
        # For benchmarks and tests: False steps everything at once.
        self.defers = True
        # How many updates were queued so far, and how many done at once.
        self.queued = 0
        self.at_once = 0

    # -- attaching ------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Take the place of ``optimizer.step``."""
        optimizer = self._optimizer
        self._own_step = optimizer.__dict__.get("step")
        inner = optimizer.step
        host_step = self

        @wraps(inner)
        def step(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            if not host_step._attached:
                return inner(*args, **kwargs)
            return host_step._step(inner, args, kwargs)

        # Schedulers wrap ``step.__func__``: only a bound method has one.
        self._step_method = optimizer.__dict__["step"] = types.MethodType(step, optimizer)
        self._attached = True

    def detach(self) -> None:
        """Give it back. Nothing may be queued."""
        optimizer = self._optimizer
        if self._attached:
            self._commit()
        self._attached = False
        # A scheduler made since then has wrapped our step: then it stays, and hands on.
        if optimizer.__dict__.get("step") is self._step_method is not None:
            if self._own_step is None:
                del optimizer.__dict__["step"]
            else:
                optimizer.__dict__["step"] = self._own_step
        state = optimizer.state
        if isinstance(state, WatchedState) and sys.getrefcount(state) == _STATE_REFERENCES:
            optimizer.state = state.plain()

    # -- one step -------------------------------------------------------------------------------------

    def _step(self, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        closure = args[0] if args else kwargs.get("closure")
        if closure is not None:
            # It runs the model: interception has to stay on. Steps of this kind are rare (LBFGS).
            self._stm.settle_homes()
            self._commit()
            result = inner(*args, **kwargs)
            self._note_states()
            return result
        self._stm.segments.begin_step()
        self._commit()
        optimizer = self._optimizer
        before = optimizer.register_step_pre_hook(self._before)
        after = optimizer.register_step_post_hook(self._after)
        hooks: Any = optimizer._optimizer_step_post_hooks
        hooks.move_to_end(after.id, last=False)
        complete = False
        self._stepped_now = set()
        try:
            result = inner(*args, **kwargs)
            complete = True
        finally:
            before.remove()
            after.remove()
            self._leave()
            self._abandon()
            self._stm.segments.end_step(complete=complete)
            if self._stepped_now or not complete:
                self._note_states()
            if complete:
                self._stepped |= self._stepped_now
        return result

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """The last pre-hook: capture what is queued, wait for what is not."""
        self._depth += 1
        if self._depth > 1:  # a step that calls another class's, hooks and all
            return
        self._stm.settle_homes()
        self._commit()
        later: dict[int, ManagedTensor] = {}
        if self._may_defer(optimizer, args, kwargs):
            later = self._choose(optimizer)
        ours = {t.index: t for t in self._managed(optimizer) if t.index not in later}
        if later:
            self._capture(optimizer, later)
        self._stm.before_home_writes(list(ours.values()))
        with plain():
            self._stepped_now |= {i for i, t in ours.items() if t.parameter.grad is not None}
        self.queued += len(later)
        self.at_once += len(self._stepped_now)
        self._plain = plain()
        self._plain.__enter__()

    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """The first post-hook: queue."""
        self._depth -= 1
        if self._depth > 0:
            return
        self._leave()
        captured, self._captured = self._captured, []
        ranks = self._stm.by_first_use()
        captured.sort(key=lambda item: (ranks.get(item.tensor.index, len(ranks)), item.tensor.index))
        surroundings = _Surroundings.of_this_thread()
        self._stm.await_updates(
            [(item.tensor, Update(_job(self._stm.engine, item, surroundings))) for item in captured]
        )

    def _leave(self) -> None:
        self._depth = 0
        if self._plain is not None:
            self._plain.__exit__(None, None, None)
            self._plain = None
        if self._groups is not None:
            self._optimizer.param_groups, self._groups = self._groups, None

    def _abandon(self) -> None:
        """The step was left by an exception: what was captured is not done, as it would not have been."""
        captured, self._captured = self._captured, []
        for item in captured:
            _wait(self._stm.engine, item)
            for factor in item.arrivals.factors:
                factor.apply(self._stm.engine, item.gradient)

    # -- what is queued -------------------------------------------------------------------------------

    def _may_defer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> bool:
        """[Note: what is queued], as far as it is a matter of the step as a whole."""
        return (
            self.defers
            and all(value is None for value in (*args[1:], *kwargs.values()))
            and not in_scope()
            and torch._C._current_graph_task_id() == -1
            and not torch.is_inference_mode_enabled()
            and not torch.is_autocast_enabled("cpu")
            and torch._C._len_torch_dispatch_stack() == 0
            and all(
                isinstance(mode, DeviceContext) for mode in torch.overrides._get_current_function_mode_stack()
            )
            and self._watch(optimizer)
            and steps_alone(optimizer)
        )

    def _watch(self, optimizer: torch.optim.Optimizer) -> bool:
        """See to it that we learn of whoever looks at ``optimizer.state``; False if we cannot."""
        state = optimizer.state
        if sys.getrefcount(state) != _STATE_REFERENCES:
            return False
        if isinstance(state, WatchedState):
            watcher = state.watcher
            if watcher is self:
                return True
            if isinstance(watcher, HostStep) and watcher._attached:
                return False  # another manager's, which has parameters of this optimizer as well
            state = state.plain()  # left from a manager that is closed
        if type(state) is not defaultdict:
            return False
        optimizer.state = WatchedState(state, self._before_state_access)
        self._stepped.clear()
        return True

    def _before_state_access(self, writes: bool) -> None:
        if self._groups is not None or self._plain is not None or not self._attached:
            return  # the step itself
        self._stm.settle_homes()
        self._commit()
        if writes:
            self._stepped.clear()

    def _managed(self, optimizer: torch.optim.Optimizer) -> list[ManagedTensor]:
        return [
            managed_of(parameter)
            for group in optimizer.param_groups
            for parameter in group["params"]
            if is_managed(parameter) and managed_of(parameter).owner is self._stm
        ]

    def _choose(self, optimizer: torch.optim.Optimizer) -> dict[int, ManagedTensor]:
        """[Note: what is queued], as far as it is a matter of one parameter. By index."""
        kept = self._kept_ids()
        chosen = {}
        with plain():
            for tensor in self._managed(optimizer):
                if tensor.index in self._stepped and _is_plain(tensor.parameter.grad):
                    entry = dict.get(optimizer.state, tensor.parameter)
                    if (
                        gradient_is_private(tensor.parameter)
                        and tensor.is_private()
                        and (entry is None or state_is_private(entry, kept))
                    ):
                        chosen[tensor.index] = tensor
                    del entry  # or the next one of it would be counted twice
        return chosen

    def _capture(self, optimizer: torch.optim.Optimizer, later: dict[int, ManagedTensor]) -> None:
        arrivals = self._stm.begin_writes_later(list(later.values()))
        shell = make_shell(optimizer)
        guarded = not is_known(optimizer)
        rest = []
        with plain():
            for group in optimizer.param_groups:
                settings = hyper_parameters(group)
                kept = []
                for parameter in group["params"]:
                    tensor = later.get(managed_of(parameter).index) if is_managed(parameter) else None
                    if tensor is None or tensor.parameter is not parameter:
                        kept.append(parameter)
                        continue
                    gradient = parameter.grad
                    assert gradient is not None
                    entry = dict.get(optimizer.state, parameter)
                    update = ParameterUpdate(
                        shell, parameter, tensor.home, gradient, settings, entry, guarded=guarded
                    )
                    if entry is None:
                        self._without_entry.append((parameter, update))
                    self._captured.append(
                        _Captured(
                            tensor=tensor, update=update, arrivals=arrivals[tensor.index], gradient=gradient
                        )
                    )
                if kept:
                    rest.append({**group, "params": kept})
        self._groups, optimizer.param_groups = optimizer.param_groups, rest

    def _commit(self) -> None:
        """States that updates have made are the optimizer's. Nothing may be queued."""
        made, self._without_entry = self._without_entry, []
        for parameter, update in made:
            if update.new_entry is not None:
                with plain():
                    dict.__setitem__(self._optimizer.state, parameter, update.new_entry)


def _is_plain(gradient: torch.Tensor | None) -> bool:
    return (
        gradient is not None
        and gradient.layout is torch.strided
        and gradient.device.type == "cpu"
        and not gradient.requires_grad
    )


# The attribute, the local name, and the argument of getrefcount.
_STATE_REFERENCES = 3


# -- the job -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Surroundings:
    """What host kernels depend on besides their operands, and threads do not share: how a reduction is divided, and
    whether denormal numbers are."""

    threads: int
    flushes: bool

    @staticmethod
    def of_this_thread() -> "_Surroundings":
        return _Surroundings(torch.get_num_threads(), _DENORMAL * 0.5 == 0.0)

    def take_over(self) -> None:
        mine = _Surroundings.of_this_thread()
        if mine.threads != self.threads:
            torch.set_num_threads(self.threads)
        if mine.flushes != self.flushes:
            torch.set_flush_denormal(self.flushes)


_DENORMAL = 1e-310


def _job(engine: CopyEngine, item: _Captured, surroundings: _Surroundings) -> Callable[[], None]:
    def run() -> None:
        surroundings.take_over()
        _wait(engine, item)
        for factor in item.arrivals.factors:
            factor.apply(engine, item.gradient)
        engine.before_host_write(item.tensor.home)
        item.update.run()
        item.tensor.refresh_low()

    return run


def _wait(engine: CopyEngine, item: _Captured) -> None:
    if item.arrivals.gradient is not None:
        engine.host_after_download(item.arrivals.gradient, item.gradient)
    for event in item.arrivals.uploads:
        engine.host_after_upload(event, item.tensor.home)
