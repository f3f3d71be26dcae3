"""StatefulTensorMgr: the hub of the management of one model's tensors.

Owns the lock, how the parts are put together, and what takes several of them: the end of an iteration, a fork, the
end. The parts each own one thing: `Registry` which tensors there are, `Ledger` the count of bytes, `Residency` the
device copies (`Room`: who leaves), `HomeAccess` what is done with homes meanwhile, `Gradients` the way home
(`GradientAccess`: as the user meets it; `Additions`: sums at home), `Activations` what forward saves (`HostSlots`:
where it goes), `UpdateQueue` what the optimizer has left to be done, `PlanBook` the plans, `HomeChoice` who lives on
the device, `Cycles` which iteration it is, `Executor` what is done at each moment of it, `Segments` their boundaries,
`Uses` what operators and backward do with parameters, `Steps` whose step runs, `Relief` what leaves when memory is
short, `Sharing` what others on the device ask, `Standing` whether any of it is to be done at all. Each is given those
below it; what these ask of it is set in `_connect` (what `Room` asks, by `Relief`, `Executor` and `DeviceHomes`
as well).

Thread-safe: autograd runs backward on threads of its own, so one lock guards every entry.
"""

import threading
from collections.abc import Callable

from torch import nn

from hetero.config import Config
from hetero.devices import Accelerator, CopyEngine, HostArena, LinkSpeeds
from hetero.errors import BudgetError
from hetero.eviction import Links, Policy
from hetero.msc import MemStatsCollector, Phase
from hetero.stm.activations.offload import Activations
from hetero.stm.activations.slots import HostSlots
from hetero.stm.copies.residency import Residency
from hetero.stm.deferred import TrialCounts, Update, UpdateQueue
from hetero.stm.forks import watch
from hetero.stm.gradients.access import GradientAccess
from hetero.stm.gradients.additions import Additions
from hetero.stm.gradients.offload import Gradients
from hetero.stm.homeaccess import HomeAccess
from hetero.stm.plans.cycles import Cycles
from hetero.stm.plans.homechoice import HomeChoice
from hetero.stm.plans.making import PlanMaker
from hetero.stm.plans.othershomes import OthersHomes
from hetero.stm.plans.planbook import PlanBook
from hetero.stm.running.executor import Executor
from hetero.stm.running.relief import Relief
from hetero.stm.running.segments import Segments
from hetero.stm.running.staying import take_away_what_is_over
from hetero.stm.running.steps import Steps
from hetero.stm.sharing import Sharing
from hetero.stm.standing import Standing
from hetero.stm.tensors.exposure import measure_incoming
from hetero.stm.tensors.owner import SettledState
from hetero.stm.tensors.registry import Registry
from hetero.stm.tensors.state import Ledger
from hetero.stm.uses import Uses
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
        measure_incoming()  # runs a backward: now that the device is there, and within no other
        self.device = accelerator.device
        self.ledger = Ledger()
        self.collector = MemStatsCollector(accelerator, self.ledger, config.device_budget)
        self._accelerator = accelerator
        self.lock = threading.RLock()
        self.standing = Standing()
        self._budget = config.device_budget
        # Learns of modules that are called by themselves; `hetero.manager` sets this.
        self.note_part: Callable[[nn.Module], None] = lambda part: None
        self.trials = TrialCounts()
        self.engine = engine = CopyEngine(accelerator)
        self.registry = Registry(self.ledger, accelerator, engine, arena, config.precision)
        self.tensors = self.registry.tensors
        self.updates = UpdateQueue()
        self.residency = Residency(
            accelerator, engine, self.ledger, self.collector, policy, config.device_budget, self.updates
        )
        self.host_slots = slots = HostSlots(
            arena, self.ledger, config.host_budget, home_bytes, shares=config.shares_host
        )
        additions = Additions(
            engine,
            self.ledger,
            reserve=slots.reserve,
            sizes=lambda: [t.home.nbytes for t in self.tensors if t.parameter.requires_grad],
            run_later=lambda run: self.updates.submit([Update(run)]),
        )
        self.gradients = Gradients(engine, arena, self.ledger, self.collector, additions)
        self.home_access = HomeAccess(
            self.tensors,
            self.residency,
            self.gradients,
            self.updates,
            engine,
            self.collector,
            lock=self.lock,
            check_process=self.standing.check_process,
        )
        self.gradient_access = GradientAccess(
            self.gradients,
            self.residency,
            accelerator,
            lock=self.lock,
            parameters=lambda: len(self.tensors),
            roll_back=self.home_access.roll_back,
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
        self.sharing = Sharing(
            self.standing,
            self.collector,
            self.tensors,
            self.ledger,
            self.gradients,
            self.activations,
            lock=self.lock,
            device=self.device,
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
            ask=self.sharing.ask,
            has_others=self.sharing.has_others,
            tell=self.sharing.tell,
        )
        self.plans = PlanBook(self._planner(config, policy, links), warmup_steps=config.warmup_steps)
        self.home_choice = HomeChoice(self.tensors, self.plans)
        self.cycles = self._cycles(config, has_optimizer=has_optimizer)
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
        self.uses = Uses(
            self.standing,
            self.segments,
            self.executor,
            self.residency,
            self.gradients,
            self.updates,
            self.collector,
            lock=self.lock,
            device=self.device,
        )
        self.steps = Steps(self.segments, self.standing)
        self._connect()
        watch(self)
        self.sharing.join(self.relief, self.plans, self.cycles)

    def _planner(self, config: Config, policy: Policy, links: LinkSpeeds) -> PlanMaker:
        return PlanMaker(
            self.tensors,
            budget=config.device_budget,
            links=Links(
                h2d_bandwidth=links.h2d_bandwidth, d2h_bandwidth=links.d2h_bandwidth, latency=links.latency
            ),
            policy=policy,
            prefetch=config.prefetch,
            fixed_bytes=self.registry.buffer_bytes,
            host_room=self.activations.host_room,
            others=OthersHomes(self.sharing.homes_of_others, send_home=self.sharing.send_others_home),
            has_excess=self._accelerator.leaves_gaps,
        )

    def _cycles(self, config: Config, *, has_optimizer: bool) -> Cycles:
        return Cycles(
            self.plans,
            self.home_choice,
            warmup_bytes=config.warmup_bytes,
            headroom=self.collector.headroom,
            activation_bytes=lambda: self.activations.device_bytes,
            copies=lambda: {index: t.device_nbytes for index, t in self.residency.resident.items()},
            ends_with_backward=lambda: (
                not (has_optimizer and any(t.parameter.requires_grad for t in self.tensors))
            ),
            others=self.sharing,
            ended=self.host_slots.end_iteration,
        )

    def _connect(self) -> None:
        """What lower parts ask of upper ones."""
        self.engine.meter = self.collector
        self.collector.others = self.sharing
        self.home_choice.room_beside_others = self.sharing.room_beside_others
        self.residency.room.left_to_others = lambda: self.plans.margin
        self.activations.make_room = self.executor.make_room
        self.activations.moment = self.uses.note_activation

    # -- how it stands (`hetero.stm.standing`) ----------------------------------------------------------------

    @property
    def settled(self) -> SettledState | None:
        """The state in which nothing is intercepted."""
        return self.standing.settled

    def check_process(self) -> None:
        """Raises `ManageError` in a forked child, which can neither reach the device nor write homes."""
        self.standing.check_process()

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

    # -- iterations -----------------------------------------------------------------------------------

    def trim(self, device_budget: int | None, *, goes_on: bool = False) -> int:
        """Leave the device's other bytes to others (`Manager.trim`); returns what the process has given back.
        ``goes_on``: everything is on the device, and has to stay there for now; only plans are made anew."""
        with self.lock:
            self.close_books()
            # Before anything is evicted: an allocator without segments gives that back at once.
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
                if not goes_on:
                    self.home_choice.follow_plans(tensor.index for tensor in self.tensors if tensor.stays)
                self.home_choice.choose_again()
            if not goes_on:
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

    def begin_fork(self) -> None:
        """Finish what is under way and let nothing begin until `end_fork`. An update's error waits."""
        self.lock.acquire()
        try:
            if not self.standing.is_closed and not self.standing.is_in_child:
                self.executor.between.take_from_caller()
                take_away_what_is_over()  # for the child, whose operators are nobody's to guard
                self.home_access.end_updates()
                self.residency.write_back_all(unseen=True)
                for tensor in self.tensors:
                    if tensor.is_ahead:  # it lives on the device, where the child cannot look
                        self.collector.count_eviction(0, self.residency.write_back(tensor))
                self.gradients.wait_all(self.tensors)
                self.residency.uploads.wait_all()
        finally:
            self.updates.hold()

    def end_fork(self, *, in_child: bool) -> None:
        """In parent and child."""
        self.standing.is_in_child = self.standing.is_in_child or in_child
        self.updates.release()
        self.lock.release()

    # -- the end --------------------------------------------------------------------------------------

    def close(self) -> None:
        """Homes are true, nothing is on its way, no copy is left."""
        with self.lock:
            self.home_access.end_updates()
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
            self.host_slots.close()
            self.executor.between.release_cap()
            self.uses.note_close([(v, t.version) for v, t in zip(versions, self.tensors, strict=True)])
            self.standing.is_closed = True
            self.updates.close()
