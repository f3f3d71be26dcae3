"""The settled state: everything fits, so parameters are ordinary ones on the device and nothing is intercepted.

Owns the way there and back. Invariant: while settled, model and optimizer are what ``model.to(device)`` would have
made of them, so every number is the unmanaged run's. What stays is one check at each forward of the model, `enter`: of
the inputs' signature, which must have been measured, of the flags of frozen parameters, and of three of the device's
counters. It ends the state where the iteration to come may need more than the budget has, or the one before did, and
for good where memory has run out since the check before: in backward, in the step, wherever nobody of ours is called.
"""

import operator
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from hetero.devices import Accelerator
from hetero.errors import ManageError
from hetero.msc import Phase
from hetero.stm.fitting import Fitting
from hetero.stm.interception.compiled import CompiledCalls
from hetero.stm.interception.exchange import exchange, is_like, let_go, may_go_back, redirect
from hetero.stm.interception.functions import give_back, take_over
from hetero.stm.interception.intercept import in_scope, is_managed, managed_of
from hetero.stm.living import Living
from hetero.stm.manager import StatefulTensorMgr
from hetero.stm.plans.fits import Growth, Kind, kind_of
from hetero.stm.step.hoststep import HostStep
from hetero.stm.step.ownstep import OwnStep
from hetero.stm.tensors.fetch import plain
from hetero.stm.tensors.managed import ManagedTensor

__all__ = ["Settled", "before_change", "bring_home", "note_optimizer", "record_of"]

# Weakly: whoever drops a settled model without closing drops all of it.
_settled: "Living[Settled]" = Living()
_by_id: "weakref.WeakValueDictionary[int, ManagedTensor]" = weakref.WeakValueDictionary()
_requires_grad = operator.attrgetter("requires_grad")
_LONGEST_WAIT = 32  # forwards between two attempts


def record_of(parameter: object) -> ManagedTensor | None:
    """The record behind a parameter that a manager has, settled or not."""
    return managed_of(parameter) if is_managed(parameter) else _by_id.get(id(parameter))


def before_change(optimizer: torch.optim.Optimizer) -> None:
    """It is about to get other states, or another group."""
    for settled in _settled:
        if settled.optimizer is optimizer:
            settled.leave()


def bring_home(tensors: Iterable[ManagedTensor]) -> bool:
    """Their parameters are at home afterwards; as with torch, whoever has an alias is left behind. False within a
    forward, where they cannot go."""
    owners = {id(tensor.owner.settled) for tensor in tensors}
    for settled in [one for one in _settled if id(one) in owners]:
        if in_scope() or settled.running:
            return False
        settled.leave(force=True)
    return True


def note_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Its last group is new, or it has other states."""
    for parameter in optimizer.param_groups[-1]["params"] if optimizer.param_groups else ():
        tensor = record_of(parameter)
        if tensor is not None and tensor.owner.settled is not None:
            tensor.owner.settled.note_optimizer(optimizer)


class Settled:
    """Of one manager. ``rest``, ``wake``: called where interception ends, and begins again."""

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
        # False for good: by the user, or because memory ran short.
        self._allowed = allowed
        if step is not None and self._own_step is not None:
            step.step_settled = self._own_step.step
        self._fitting = Fitting(stm, accelerator, budget, step)
        self.onlookers = self._fitting.onlookers
        self._wait = 0
        self._failures = 0
        self.is_on = False
        # Forwards that ran settled, each after one check.
        self.forwards = 0
        self._must_leave = False
        self._times_passed = 0  # the budget, by what depends on more than what tells iterations apart
        self._without_state: set[int] = set()  # parameters that have been stepped, and need none
        # The threads of settled forwards that run now, once for each. Whoever has the manager's lock and finds none may
        # settle or leave.
        self.running: list[int] = []
        self._growth = Growth(peak=0, by_kind={})
        self._limit = budget  # less what was given to others when it settled: `Manager.trim` ends it
        self._seen_failures = self._seen_peak = 0
        self._last: Kind | None = None  # kind of a forward that ran settled
        # Kinds of training forwards since what the iteration takes from there on was last seen to be free, and what the
        # probe was then.
        self._since: list[Kind] = []
        self._versions_then: tuple[int, object] = (0, None)
        self._probe: nn.Parameter | None = None
        self._frozen: list[nn.Parameter] = []
        self._shadows: list[nn.Parameter] = []
        self._placeholders: dict[torch.dtype, torch.Tensor] = {}
        # Of each parameter: its version for autograd before, and its own when it settled.
        self._versions: list[tuple[int, int]] = []
        stm.settled = self
        stm.home_choice.everything_fits = lambda: self._fitting.growth() is not None

    # -- the model's forward --------------------------------------------------------------------------

    def enter(self, trains: bool, signature: object) -> bool:
        """A forward of the model begins: whether as the user's own, by `run`. Settles, or leaves, before."""
        kind = (trains, signature)
        with self._stm.lock:  # other threads may settle or leave as well
            if self.is_on:
                # Written out, because it is all that runs of ours: of a training step, this and what calls it.
                used, peak, failures = self._accelerator.pressure()
                if failures != self._seen_failures:
                    self._note_failures(failures)
                if peak != self._seen_peak and (peak > self._limit or self._seen_peak > self._limit):
                    self._note_peak(peak)
                growth = self._growth.by_kind.get(kind)
                makes_gradients = trains and self._probe is not None and self._probe.grad is None
                admits = (
                    growth is not None
                    and used + (growth.without if makes_gradients else growth.with_gradients) <= self._limit
                    and not self._must_leave
                    and not any(map(_requires_grad, self._frozen))
                )
                fits = admits or self._is_foreseen(kind) or not self.leave()
            else:
                fits = admits = self._try(kind)
            if admits and trains and (probe := self._probe) is not None:
                gradient = probe.grad
                seen = None if gradient is None else (weakref.ref(gradient), gradient._version)
                self._since, self._versions_then = [kind], (probe._version, seen)
            if fits:
                self._last = kind
                self.forwards += 1
                self.running.append(threading.get_ident())
            return fits

    def _is_foreseen(self, kind: Kind) -> bool:
        """Less is free than an iteration takes from such a forward on, because it is one of several in one, and what
        those before it have made is still there; that it all fits was seen at the first. To leave in between would be
        in vain, and gradients of the graphs that there are would be added up by themselves: other bits."""
        probe = self._probe
        if not (kind[0] and self._since) or probe is None or self.optimizer is None:
            return False
        if self._must_leave or any(map(_requires_grad, self._frozen)):
            return False
        # A step since then, or a backward that adds to gradients, would have moved them, but for kernels that do not.
        version, seen = self._versions_then
        gradient = probe.grad
        if probe._version != version:
            return False
        if gradient is not None and seen != (weakref.ref(gradient), gradient._version):
            return False
        if any(group.get("fused") for group in self.optimizer.param_groups):
            return False
        coming = [*self._since, kind]
        for plan in self._stm.plans:
            known = [kind_of(key) for key in plan.keys if key.phase is Phase.FORWARD]
            if any(known[begin : begin + len(coming)] == coming for begin in range(len(known))):
                self._since = coming
                return True
        return False

    def _try(self, kind: Kind) -> bool:
        if not self._allowed or self._stm.plans.last is None:
            return False
        if self._wait > 0:
            self._wait -= 1
            return False
        if self._settle(kind):
            self._failures = 0
            return True
        return False

    def run(self, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The user's own forward, after `enter` has said so."""
        try:
            return inner(*args, **kwargs)
        except torch.OutOfMemoryError:
            self._must_leave, self._allowed = True, False
            raise
        finally:
            self.running.remove(threading.get_ident())

    def _note_failures(self, failures: int) -> None:
        """The allocator's count of them is another than at the last check; less if somebody has reset it."""
        if failures > self._seen_failures:
            self._must_leave, self._allowed = True, False
        self._seen_failures = failures

    def _note_peak(self, peak: int) -> None:
        """It is another than at the last check; lower if somebody has reset it. Settled, it is ours alone to pass."""
        if peak > max(self._seen_peak, self._limit):
            self._must_leave = True
            self._times_passed += 1
            self._wait = 4 << self._times_passed  # forwards
            assert self._last is not None
            model_bytes = self._stm.ledger.device_bytes
            self._stm.plans.note_settled(self._last, peak - self._limit, model_bytes=model_bytes)
        self._seen_peak = peak

    def _settle(self, kind: Kind) -> bool:
        stm = self._stm
        if in_scope() or torch._C._current_graph_task_id() != -1:
            return False
        if self.running or stm.segments.is_running or stm.stepping is not None:  # by another thread
            return False
        with stm.lock, torch.inference_mode(False), torch.no_grad(), plain():
            if not stm.close_iteration():
                return False
            looked, self.onlookers.have_looked = self.onlookers.have_looked, False
            if looked:
                return False
            growth = self._fitting.growth()
            if growth is None or kind not in growth.by_kind or not self._fitting.has_room(growth):
                return False
            if not self._fitting.is_ours_alone():
                self._allowed = False
            if not self._allowed:
                return False
            self._limit = self._budget - stm.plans.margin
            # By what was measured everything fitted before as well; and the counter would not tell of it again.
            if self._times_passed and self._accelerator.peak_bytes() > self._limit:
                self._wait_longer()  # nothing but the user may ever reset it
                return False
            if not self._fitting.is_private() or not self._begin_step():
                self._wait_longer()
                return False
            self._growth = growth
            gradients: dict[int, torch.Tensor] = {}
            if not (self._take_gradients(gradients) and self._exchange_all()):
                self._end_step()
                for index, gradient in gradients.items():
                    stm.gradients.kept.adopt(stm.tensors[index], gradient)
                self._wait_longer()
                return False
            for tensor in stm.tensors:
                tensor.parameter.grad = gradients.get(tensor.index)
            self._finish_settling()
            return True

    def _wait_longer(self) -> None:
        self._failures += 1
        self._wait = min(_LONGEST_WAIT, 1 << self._failures)

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

    # -- there ----------------------------------------------------------------------------------------

    def _begin_step(self) -> bool:
        if self._step is None or self._own_step is None:
            return True
        if not self._step.device_homes.complete():
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

    def _exchange_all(self) -> bool:
        self._shadows, self._versions = [], []
        try:  # now, because whoever leaves may do so for want of memory
            for tensor in self._stm.tensors:
                self._placeholder(tensor.parameter.dtype)
        except torch.OutOfMemoryError:
            self._accelerator.note_answered()
            return False
        for tensor in self._stm.tensors:
            parameter = tensor.parameter
            version = tensor.version
            tensor.cast = None
            data = tensor.data
            assert data is not None
            shadow = nn.Parameter(data.detach(), parameter.requires_grad)
            del data
            try:
                exchange(parameter, shadow)
            except RuntimeError:  # a weak reference to the implementation
                for done, other in zip(self._stm.tensors, self._shadows, strict=False):
                    exchange(done.parameter, other)
                    other.grad = None
                self._shadows = []
                return False
            self._shadows.append(shadow)
            self._versions.append((version, parameter._version))
        return True

    def trim(self) -> int:
        """Give back what the allocator caches; returns how many bytes."""
        before = self._accelerator.reserved_bytes()
        self._accelerator.release_cached()
        return max(0, before - self._accelerator.reserved_bytes())

    def _finish_settling(self) -> None:
        stm = self._stm
        for tensor, shadow in zip(stm.tensors, self._shadows, strict=True):
            parameter = tensor.parameter
            stm.residency.lend(tensor)
            give_back(parameter)
            _by_id[id(parameter)] = tensor
            redirect(shadow, tensor)
        trained = [t.parameter for t in stm.tensors if t.parameter.requires_grad]
        self._probe = trained[-1] if trained else None
        self._frozen = [t.parameter for t in stm.tensors if not t.parameter.requires_grad]
        stm.gradients.norms.stop()
        stm.executor.release_cap()
        self._rest()  # its calls are around those of compiled modules
        if (compiled := self._compiled()) is not None:
            compiled.pause()
        self._must_leave = False
        _, self._seen_peak, self._seen_failures = self._accelerator.pressure()
        self.is_on = True
        _settled.add(self)

    # -- and back -------------------------------------------------------------------------------------

    def make_way(self) -> bool:
        """Another manager of the device lacks room: never again. False if that cannot be now."""
        self.forbid()
        return self.leave(amid=True)

    def leave(self, *, force: bool = False, amid: bool = False) -> bool:
        """Intercept again; False if somebody's alias of a parameter, gradient or state would be left behind.
        ``force``: then too. ``amid``: another model's forward may run, which has no parameter of ours."""
        stm = self._stm
        with stm.lock, torch.inference_mode(False), torch.no_grad(), plain():
            if not self.is_on:
                return True
            if not force and (self.running or (in_scope() and not amid) or not self._may_leave()):
                return False
            if (compiled := self._compiled()) is not None:
                compiled.resume()
            self._wake()
            for tensor, shadow in zip(stm.tensors, self._shadows, strict=True):
                self._leave_one(tensor, shadow, amid=amid)
            self._end_step()
            self._shadows, self._versions, self._frozen, self._probe = [], [], [], None
            self._since = []
            self.is_on = False
            _settled.discard(self)
            stm.begin_anew()
        return True

    def _may_leave(self) -> bool:
        """Nobody has an alias of what would be left behind."""
        if self._own_step is not None and self._own_step.is_viewed(self._stm.tensors):
            return False
        return may_go_back(self._stm.tensors, self._accelerator.device)

    def _leave_one(self, tensor: ManagedTensor, shadow: nn.Parameter, *, amid: bool) -> None:
        parameter = tensor.parameter
        _by_id.pop(id(parameter), None)
        if not is_like(parameter, tensor.home, self._accelerator.device):
            return  # ``p.data`` was replaced by something else; only close() comes here
        gradient, parameter.grad = parameter.grad, None
        version, requires_grad = parameter._version, parameter.requires_grad
        exchange(parameter, shadow)
        parameter.requires_grad_(requires_grad)
        take_over(parameter, tensor)
        written = tensor.stays or version != self._versions[tensor.index][1]
        self._stm.residency.take_back(tensor, shadow.detach())
        if written:  # home does not have its bytes
            tensor.clean_version -= 1
        tensor.may_be_ahead = not written  # through ``p.data``, which is nothing of ours meanwhile
        if gradient is not None:
            self._stm.gradients.kept.adopt(tensor, gradient)
        redirect(shadow, tensor)
        if not amid:  # else an operator may have been given it
            let_go(shadow, self._placeholder(shadow.dtype))

    def _placeholder(self, dtype: torch.dtype) -> torch.Tensor:
        if dtype not in self._placeholders:
            self._placeholders[dtype] = torch.empty((), dtype=dtype, device=self._accelerator.device)
        return self._placeholders[dtype]

    # -- others ---------------------------------------------------------------------------------------

    def version(self, tensor: ManagedTensor) -> int:
        """`ManagedTensor.version`, as graphs from before know it."""
        before, then = self._versions[tensor.index]
        return before + tensor.parameter._version - then

    def note_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """``optimizer`` has parameters of ours. `hetero.stm.tensors.onlookers`"""
        if optimizer is not self.optimizer:
            self._must_leave, self._allowed = True, False
        elif self._step is not None:
            self._step.watch()

    def forbid(self) -> None:
        """`hetero.stm.tensors.onlookers`: for good."""
        self._must_leave, self._allowed = True, False

    def close(self) -> None:
        """Management ends."""
        self.leave(force=True)
        self._placeholders.clear()
        self.onlookers.close()

    def abandon(self) -> None:
        """The manager is gone, with its model."""
        if self.is_on:
            _settled.discard(self)
            for tensor in self._stm.tensors:
                _by_id.pop(id(tensor.parameter), None)
            if self._own_step is not None:
                self._own_step.end()
            self._shadows = []  # whose hooks hold parameters where Python's collector cannot see it
            self.is_on = False
