"""StatefulTensorMgr: the hub of the management of one model's tensors.

Owns the lock, and which part is asked what. The parts each own one thing: `Registry` which tensors there are, `Ledger`
the count of bytes, `Residency` the device copies (`Room`: who leaves), `HomeAccess` what is done with homes meanwhile,
`Gradients` the way home (`GradientAccess`: as the user meets it), `Activations` what forward saves, `PlanBook` the
plans, `Cycles` which iteration it is, `Executor` what is done at each moment of it, `Segments` their boundaries,
`Steps` whose step runs, `Relief` what leaves when memory is short. Thread-safe: autograd runs backward on threads of
its own, so one lock guards every entry.
"""

import contextlib
import threading
from collections.abc import Callable

import torch
from torch import nn

from hetero.autograd import in_backward
from hetero.config import Config
from hetero.devices import Accelerator, CopyEngine, HostArena, LinkSpeeds
from hetero.errors import BudgetError
from hetero.eviction import Links, Policy
from hetero.msc import MemStatsCollector, Phase
from hetero.stm.activations.offload import Activations
from hetero.stm.activations.slots import HostSlots
from hetero.stm.copies.residency import Residency
from hetero.stm.deferred import TrialCounts, Update, UpdateQueue
from hetero.stm.forks import in_child, watch
from hetero.stm.gradients.access import GradientAccess
from hetero.stm.gradients.additions import Additions
from hetero.stm.gradients.memory import owns_memory
from hetero.stm.gradients.offload import Gradients
from hetero.stm.homeaccess import HomeAccess
from hetero.stm.interception.parameter import is_managed, managed_of
from hetero.stm.neighbours import ask, join, note_relieved
from hetero.stm.plans.cycles import Cycles
from hetero.stm.plans.homechoice import HomeChoice
from hetero.stm.plans.making import PlanMaker
from hetero.stm.plans.planbook import PlanBook
from hetero.stm.running.executor import Executor
from hetero.stm.running.relief import Relief
from hetero.stm.running.segments import Segments
from hetero.stm.running.staying import take_away_what_is_over
from hetero.stm.running.steps import Steps
from hetero.stm.tensors.exposure import measure_incoming
from hetero.stm.tensors.fetch import make_identity
from hetero.stm.tensors.managed import ManagedTensor, modified_in_place
from hetero.stm.tensors.owner import SettledState
from hetero.stm.tensors.registry import Registry
from hetero.stm.tensors.state import Ledger, begin_compute, end_compute
from hetero.units import format_bytes

__all__ = ["StatefulTensorMgr"]


class StatefulTensorMgr:
    """Every parameter, gradient, optimizer state and buffer of one model (Gemini's STM)."""

    def __init__(
        self,
        accelerator: Accelerator,
        arena: HostArena,
        config: Config,
        policy: Policy,
        links: LinkSpeeds,
        *,
        home_bytes: int,
        has_optimizer: bool,
    ) -> None:
        measure_incoming()
        self.device = accelerator.device
        self.ledger = Ledger()
        self.collector = MemStatsCollector(accelerator, self.ledger, config.device_budget)
        self._accelerator = accelerator
        self.lock = threading.RLock()
        self.settled: SettledState | None = None  # `hetero.stm.settled`
        self._closed = False
        # By index, as graphs that are alive know them, and as they are once everything is at home.
        self._versions_at_close: list[tuple[int, int]] = []
        self.is_in_child = False
        self._budget = config.device_budget
        # Learns of modules that are called by themselves; `hetero.manager` sets this.
        self.note_part: Callable[[nn.Module], None] = lambda part: None
        # May begin a parameter's update as soon as its gradient leaves; `hetero.stm.step.speculation` sets this.
        self.try_early: Callable[[ManagedTensor, torch.Tensor], None] | None = None
        self.trials = TrialCounts()
        engine = CopyEngine(accelerator)
        engine.meter = self.collector
        self.engine = engine
        self.registry = Registry(self.ledger, accelerator, engine, arena, config.precision)
        self.tensors = self.registry.tensors
        self.updates = UpdateQueue()
        self.residency = Residency(
            accelerator, engine, self.ledger, self.collector, policy, config.device_budget, self.updates
        )
        self.host_slots = slots = HostSlots(arena, self.ledger, config.host_budget, home_bytes)
        additions = Additions(
            engine,
            self.ledger,
            reserve=slots.reserve,
            sizes=lambda: [t.home.nbytes for t in self.tensors if t.parameter.requires_grad],
            run_later=lambda run: self.updates.submit([Update(run)]),
        )
        self.gradients = Gradients(engine, arena, self.ledger, self.collector, additions)
        self.homes = HomeAccess(
            self.tensors,
            self.residency,
            self.gradients,
            self.updates,
            engine,
            self.collector,
            lock=self.lock,
            check_process=self.check_process,
        )
        self.grads = GradientAccess(
            self.gradients,
            self.residency,
            accelerator,
            lock=self.lock,
            parameters=lambda: len(self.tensors),
            roll_back=self.homes.roll_back,
        )
        self.activations = Activations(
            accelerator,
            engine,
            slots,
            self.ledger,
            self.collector,
            lock=self.lock,
            device_budget=config.device_budget,
        )
        self.relief = Relief(
            accelerator,
            self.ledger,
            self.residency,
            self.gradients,
            self.activations,
            self.collector,
            lock=self.lock,
            device_budget=config.device_budget,
            ask=self._ask,
            tell=lambda: note_relieved(self),
        )
        planner = PlanMaker(
            self.tensors,
            budget=config.device_budget,
            links=Links(
                h2d_bandwidth=links.h2d_bandwidth, d2h_bandwidth=links.d2h_bandwidth, latency=links.latency
            ),
            policy=policy,
            prefetch=config.prefetch,
            fixed_bytes=self.registry.buffer_bytes,
            host_room=self.activations.host_room,
        )
        self.plans = PlanBook(planner, warmup_steps=config.warmup_steps)
        self.residency.room.left_to_others = lambda: self.plans.margin
        self.home_choice = HomeChoice(self.tensors, self.plans)
        self.cycles = Cycles(
            self.plans,
            self.home_choice,
            warmup_bytes=config.warmup_bytes,
            headroom=self.collector.headroom,
            activation_bytes=lambda: self.activations.device_bytes,
            copies=lambda: {index: t.device_nbytes for index, t in self.residency.resident.items()},
            ends_with_backward=not has_optimizer,
            ended=slots.end_iteration,
        )
        self.executor = Executor(
            self.tensors,
            self.residency,
            self.gradients,
            self.activations,
            self.collector,
            self.cycles,
            self.plans,
            accelerator,
            self.relief,
        )
        self.activations.moment = self._activation_moment
        self.activations.make_room = self.executor.make_room
        self.segments = Segments(
            self.tensors,
            self.residency,
            self.gradients,
            self.activations,
            self.collector,
            self.executor,
            lock=self.lock,
            has_optimizer=has_optimizer,
        )
        self.steps = Steps(self.segments, lambda: self.settled)
        watch(self)
        join(self)

    # -- what the optimizer's step asks (`hetero.stm.step.hoststep`) -----------------------------------------

    def device_homes(self) -> frozenset[int]:
        """Parameters that the plans want to live on the device, by index."""
        with self.lock:
            return frozenset(self.plans.device_homes)

    def by_first_use(self) -> dict[int, int]:
        """Rank of each parameter by when the planned iteration first uses it; by index. Empty without a plan."""
        with self.lock:
            plan = self.plans.last
            return {} if plan is None else plan.first_uses

    # -- what interception calls (`hetero.stm.tensors.owner.Owner`) ---------------------------------------

    @property
    def _is_settled(self) -> bool:
        """Everything is there, and nothing of it is intercepted; asked with the lock held."""
        return self.settled is not None and self.settled.is_on

    def begin_outside(self) -> None:
        """Autograd records an operator outside of the model's forward."""
        self.check_process()  # before the device's counters are read, which a child cannot do
        self.segments.begin_outside()

    def call_within_backward(self) -> contextlib.AbstractContextManager[None]:
        """Around a call of the model there: the backward's segment begins, if it has not, and the call is guarded as
        that is. A reentrant checkpoint around the whole model calls it so, in a backward that no forward of ours has
        waited for."""
        with self.lock:
            if not self._is_settled:
                self.segments.enter_backward()
            return self.executor.guarded_within()

    def begin_operator(self, operands: list[ManagedTensor], name: object) -> None:
        """The pre-op sampling moment; operands are resident and in COMPUTE afterwards."""
        self.check_process()
        with self.lock:
            # Else another thread has settled since these parameters were looked at: they are there, as themselves.
            if not self._is_settled:
                if in_backward():
                    self.segments.enter_backward()
                self.executor.before_operator(operands, name)
            begin_compute(operands)

    def end_operator(self, operands: list[ManagedTensor]) -> None:
        """The operator is done."""
        with self.lock:
            end_compute(operands)

    def note_unguarded(self) -> None:
        """An operator is about to come that cannot be tried again when it runs out of memory."""
        self.executor.runs_unguarded = True

    def copy_for(self, tensor: ManagedTensor) -> torch.Tensor:
        """The identity, or for a frozen parameter the bare copy."""
        if tensor.data is None:  # settled: see `begin_operator`
            return tensor.parameter
        # Without grad mode too: kernels are chosen by `requires_grad` whatever the mode (matmul folds batches by it).
        # And not a leaf with that flag, whose casts autocast would keep, and the copy with them.
        if not tensor.parameter.requires_grad:
            return tensor.data
        if tensor.identity is None:
            with self.lock:
                make_identity(tensor)
        assert tensor.identity is not None
        return tensor.identity

    def load_saved(self, tensor: ManagedTensor, version: int) -> torch.Tensor:
        """A saved parameter is about to be read by backward: its copy, after autograd's version check."""
        with self.lock:
            if self._closed:  # a graph from before: the parameter is wherever it lives now
                if (now := self._version_after_close(tensor)) != version:
                    raise modified_in_place(tensor.parameter, now, version)
                return tensor.parameter.detach().to(self.device)
            if self.settled is not None and self.settled.is_on:  # likewise
                if self.settled.version(tensor) != version:
                    raise modified_in_place(tensor.parameter, self.settled.version(tensor), version)
                return tensor.parameter.detach()
            if tensor.pending is not None or self.updates.has_failed:
                self.residency.orders.finish_update(tensor)
            if tensor.version != version:
                raise modified_in_place(tensor.home, tensor.version, version)
            self.segments.enter_backward()
            self.executor.before_operator([tensor], "backward")
            assert tensor.data is not None
            # From here on the reference count of the view stands for COMPUTE: nobody tells when backward is done
            # with it, and a copy that is held is not evicted.
            return tensor.data

    def _version_after_close(self, tensor: ManagedTensor) -> int:
        """`ManagedTensor.version`, had management gone on; it may have begun anew."""
        record = tensor
        if is_managed(tensor.parameter):
            record = managed_of(tensor.parameter)
            record.owner.homes.wait(record)
        before, then = self._versions_at_close[tensor.index]
        return before + record.version - then

    def hand_over(
        self, tensor: ManagedTensor, gradient: torch.Tensor, *, is_shared: bool
    ) -> torch.Tensor | None:
        """A parameter's gradient is complete on the device; what autograd should take for it at home, if anything."""
        with self.lock:
            if self._closed:
                return gradient.to(tensor.parameter.device).to(tensor.parameter.dtype)
            if self._is_settled:  # a graph from before: it ends at home
                return gradient.to(tensor.home.device)
            self.segments.enter_backward()
            # Autograd may add to the gradient that the queue reads.
            self.residency.orders.finish_update(tensor)
            if gradient.layout is torch.strided:  # the only ones whose bytes can be told
                own = gradient.nbytes if owns_memory(gradient, is_shared=is_shared) else 0
                self.collector.note_gradient(tensor.index, gradient.nbytes, own_nbytes=own)
            host = self.gradients.hand_over(tensor, gradient, is_shared=is_shared)
            if self.try_early is not None and host is not None:
                self.try_early(tensor, host)
            return host

    def _activation_moment(self, name: str) -> None:
        """A large tensor was saved, or is about to be read by backward: a sampling moment."""
        if in_backward():
            self.segments.enter_backward()
        self.executor.before_operator([], name)

    # -- other managers (`hetero.stm.neighbours`) ---------------------------------------------------------

    def give(self, nbytes: int, *, urgent: bool) -> int:
        """`hetero.stm.neighbours`"""
        if not self.lock.acquire(blocking=False):
            return 0
        try:
            if self._closed or self.is_in_child:
                return 0
            if self.settled is not None and self.settled.is_on and not (urgent and self.settled.make_way()):
                return 0
            return self.relief.give(nbytes, urgent=urgent)
        finally:
            self.lock.release()

    def _ask(self, nbytes: int, urgent: bool) -> int:
        """Of other managers of the device; returns how many bytes they have given."""
        given = ask(self, nbytes, urgent=urgent)
        if given:
            self.collector.note_given()
        return given

    def note_relieved_by_others(self) -> None:
        """`hetero.stm.neighbours`"""
        self.collector.note_relieved_by_others()

    @property
    def is_closed(self) -> bool:
        """`hetero.stm.neighbours`"""
        return self._closed

    def make_room(self, nbytes: int) -> bool:
        """`hetero.stm.neighbours`"""
        if not self.lock.acquire(blocking=False):
            return True  # as far as anybody knows
        try:
            is_ours = not (self._closed or self.is_in_child or self._is_settled)
            return not is_ours or self.relief.make_room(nbytes)
        finally:
            self.lock.release()

    # -- iterations -----------------------------------------------------------------------------------

    def trim(self, device_budget: int | None) -> int:
        """Leave the device's other bytes to others (`Manager.trim`); returns what the process has given back."""
        with self.lock:
            self.close_books()
            before = self._accelerator.reserved_bytes()
            needs = self.plans.needs()
            if needs is not None:
                least, present = needs
                if device_budget is not None and device_budget < least:
                    raise BudgetError(
                        f"trim(device_budget={device_budget}): the measured iterations need {format_bytes(least)} "
                        f"of the device: pass at least {least} bytes"
                    )
                budget = max(least, present if device_budget is None else device_budget)
                self.plans.trim(min(budget, self._budget))
                self.home_choice.choose_again()
            self.residency.evict_idle()
            self._accelerator.release_cached()
            return max(0, before - self._accelerator.reserved_bytes())

    def close_books(self) -> None:
        """Of the iteration if its last segment is over, so that they can be read."""
        with self.lock:
            self.activations.close_gone()
            segment = self.executor.segment
            if segment is not None and segment.key.phase is Phase.STEP and segment.complete:
                self.executor.finish_segment()
                self.cycles.finish()

    def close_iteration(self) -> bool:
        """Close the books of what ran last; False if it goes on, or has left something to be done."""
        self.executor.finish_segment()
        self.cycles.finish()
        return not (self.cycles.is_under_way or self.updates.has_failed or self.activations.has_records)

    def begin_anew(self) -> None:
        """What ran meanwhile was none of ours."""
        self.executor.finish_segment()
        self.cycles.begin_anew()
        self.segments.forget_forwards()

    # -- forks (`hetero.stm.forks`) --------------------------------------------------------------------

    def check_process(self) -> None:
        """Raises `ManageError` in a forked child, which can neither reach the device nor write homes."""
        if self.is_in_child:
            raise in_child()

    def begin_fork(self) -> None:
        """Finish what is under way and let nothing begin until `end_fork`. An update's error waits."""
        self.lock.acquire()
        try:
            if not self._closed and not self.is_in_child:
                self.executor.take_from_caller()
                take_away_what_is_over()  # for the child, whose operators are nobody's to guard
                self.homes.end_updates()
                self.residency.write_back_all(unseen=True)
                for tensor in self.tensors:
                    if tensor.is_ahead:  # it lives on the device, where the child cannot look
                        self.collector.count_eviction(0, self.residency.write_back(tensor))
                self.gradients.wait_all(self.tensors)
                self.residency.uploads.wait_all()
        finally:
            self.updates.hold()

    def end_fork(self) -> None:
        """In parent and child."""
        self.updates.release()
        self.lock.release()

    # -- the end --------------------------------------------------------------------------------------

    def close(self) -> None:
        """Homes are true, nothing is on its way, no copy is left."""
        with self.lock:
            self.homes.end_updates()
            versions = [tensor.version for tensor in self.tensors]
            self.executor.finish_segment()
            self.collector.peaks.close()
            self.residency.room.send_home(self._budget)
            self.residency.write_back_all(unseen=True)
            self.gradients.wait_all(self.tensors)
            self.gradients.reclaim(self.ledger.device_bytes)
            self.gradients.norms.stop()
            self.residency.uploads.wait_all()
            for tensor in self.tensors:
                self.residency.discard(tensor)
                tensor.identity = None
            self.activations.close()
            self.executor.release_cap()
            self._versions_at_close = [(v, t.version) for v, t in zip(versions, self.tensors, strict=True)]
            self._closed = True
            self.updates.close()
