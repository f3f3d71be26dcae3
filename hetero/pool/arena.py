"""A training loop whose intermediate tensors lie at planned offsets of one arena.

Owns `planned`, the `Arena` and its statistics: iterations are recorded until two in a row allocate alike,
planned, and replayed by allocation index. Invariant: bytes of the arena belong to at most one living storage;
whatever cannot be placed, for whatever reason, stays where the ordinary allocator put it. It runs operators
and plans nothing itself. With `hetero.pool.placing` and `hetero.pool.slots`, what of the pool knows torch.

[Note: placing] An operator runs as ever, below autograd; then the storage it has made is copied to its slot,
byte for byte, and its tensors are set upon the slot's storage. That is right for every operator, strides and
all, and costs a copy and, for a moment, the memory twice. Operators in `INTO_OUT` (`hetero.pool.placing`) run
the same kernel with ``out=`` a tensor of the recorded strides, if their arguments look exactly as they did when
recorded: no copy. On the virtual accelerator no operator needs one: its allocator is offered the slots that the
operator is expected to fill, and hands them out as if they were new.

[Note: whose storage] A storage is the operator's own if nobody but the tensors returned holds it, by
reference count. So views that a schema does not admit, cached results and the like are left alone.

[Note: lives] Every slot in use is a storage of its own, with its own version counters and size. It is free
again when that storage dies, views, saved tensors and exported arrays included; its finalizer holds the
arena's memory, so that no tensor outlives its bytes. Finalizers run at any time: they only append to a queue.
"""

import threading
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import _disable_current_modes

from hetero.devices import virtual
from hetero.devices.operators import tensors_of
from hetero.errors import ConfigError
from hetero.pool.cycle import CyclePlan, CyclicLife, plan_cycle
from hetero.pool.placing import IntoOut, Placing, look_of, only_plain
from hetero.pool.planner import Planner
from hetero.pool.portfolio import portfolio
from hetero.pool.slots import Birth, Call, Memory, Offer

__all__ = ["Arena", "ArenaStats", "planned"]

_COUNTS = ("placed", "into_out", "in_slot", "copied", "unplanned", "unexpected", "busy")
# Kernels may allocate temporaries of the size of their result before the result; more is not looked for.
_MOST_PASSED_OVER = 4
# How far to look for an allocation among the expected ones, when some did not happen this time.
_LOOK_AHEAD = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaStats:
    """What an arena has done so far; allocations are storages that operators made on its device.

    ``planned_nbytes`` is the arena's size and ``load_nbytes`` the most planned bytes alive at once, its lower
    bound. ``placed`` allocations went to their slot: ``into_out`` of them because the operator wrote its result
    there, ``in_slot`` because the device's allocator was offered it; ``copied_nbytes`` were copied for the others.
    The rest fell back since there is a plan: ``unplanned`` live longer than an iteration, ``unexpected`` were not
    made at this place by the recorded iteration, or with another size, ``busy`` found something still alive in
    their slot. ``footprint_nbytes`` is the arena plus the most bytes that allocations made since then had outside
    it at once, what is outside only until it is copied included.
    """

    iterations: int
    plans: int
    planned_nbytes: int
    load_nbytes: int
    placed: int
    into_out: int
    in_slot: int
    copied_nbytes: int
    unplanned: int
    unexpected: int
    busy: int
    footprint_nbytes: int


@contextmanager
def planned(
    *,
    device: torch.device | str = "cpu",
    optimizer: torch.optim.Optimizer | None = None,
    planner: Planner | None = None,
) -> Iterator["Arena"]:
    """Run a training loop with its intermediate tensors on ``device`` at planned offsets of one arena.

        with hetero.pool.planned(device="cuda", optimizer=optimizer) as arena:
            for images, labels in loader:
                train_step(model, optimizer, images, labels)
        print(arena.stats)

    An iteration ends when ``optimizer`` has stepped; without one, when `Arena.step` is called. Results are
    bit for bit those of the loop without it. As soon as two iterations in a row make the same allocations
    they are placed by ``planner`` (default: the portfolio, for a second); when two in a row differ from the
    plan but not from each other, they are planned anew. Tensors may outlive the ``with``: they keep the
    arena's memory.

    Not for tensors whose storage is resized through `torch.UntypedStorage.resize_`, which raises for a
    placed one, nor for memory inside operators (workspaces), which stays the allocator's. Under
    `torch.compile` the loop runs eager, as under any dispatch mode.
    """
    arena = Arena(device, planner or partial(portfolio, seconds=1.0))
    with ExitStack() as stack:
        if optimizer is not None:
            hook = optimizer.register_step_post_hook(lambda *_: arena.step())
            stack.callback(hook.remove)
        stack.callback(arena.close)
        stack.enter_context(Placing(arena))
        yield arena


class Arena:
    """Records, plans and replays the allocations of a loop on one device; made by `planned`."""

    def __init__(self, device: torch.device | str, planner: Planner) -> None:
        self.device = torch.empty(0, device=device).device  # as tensors spell it, index and all
        if self.device.type == "meta":
            raise ConfigError("device='meta' holds no bytes to place: name the device the loop runs on")
        self._planner = planner
        self._granularity = 64 if self.device.type == "cpu" else 512  # as torch's own allocators align
        self._stream = self._current_stream()
        self._takes_offers = self.device.type == "virtual"
        self._lock = threading.RLock()
        self._dead: deque[Birth] = deque()
        self._clock = 0
        self._current: list[Birth] = []
        self._previous: list[Birth] = []
        self._expected: list[Birth] = []
        self._plan: CyclePlan | None = None
        self._memory: Memory | None = None
        self._position = 0
        self._placed_at: dict[int, Birth] = {}
        self._counts = dict.fromkeys(_COUNTS, 0)
        self._iterations = self._plans = 0
        self._outside = self._footprint = 0

    @property
    def stats(self) -> ArenaStats:
        """The counts so far."""
        counts, plan = self._counts, self._plan
        return ArenaStats(
            iterations=self._iterations,
            plans=self._plans,
            planned_nbytes=plan.nbytes if plan else 0,
            load_nbytes=plan.load_nbytes if plan else 0,
            placed=counts["placed"],
            into_out=counts["into_out"],
            in_slot=counts["in_slot"],
            copied_nbytes=counts["copied"],
            unplanned=counts["unplanned"],
            unexpected=counts["unexpected"],
            busy=counts["busy"],
            footprint_nbytes=self._footprint,
        )

    def step(self) -> None:
        """An iteration has ended here; plans, if it made the allocations of the one before."""
        with self._lock:
            self._bury()
            self._iterations += 1
            repeated = self._current and _alike(self._current, self._previous)
            if repeated and not (self._plan and _alike(self._current, self._expected)):
                self._make_plan(self._previous)
            self._previous, self._current = self._current, []
            self._position = 0

    def close(self) -> None:
        """Drop the plan; the memory goes with the last tensor in it. `stats` stay."""
        with self._lock:
            self._bury()
            self._memory = None
            self._current, self._previous, self._expected = [], [], []

    def run_into_slot(
        self, func: OpOverload, into: IntoOut, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[torch.Tensor | None, Call | None]:
        """Run ``func`` with ``out=`` its slot: the result, or None and the call to be remembered."""
        if not only_plain(args, kwargs):
            return None, None
        call = Call(look_of((args, kwargs)))
        with self._lock:
            expected = self._peek(func)
            if expected is None or expected.call is None or expected.call.arguments != call.arguments:
                return None, call
            birth = self._enter(func, expected.nbytes, expected.call)
            storage = self._slot(birth)
        made = expected.call
        assert made.size is not None
        if storage is None:  # the slot is in use
            storage = torch.empty(birth.nbytes, dtype=torch.uint8, device=self.device).untyped_storage()
            self._watch(storage, birth)
        out = torch.empty(0, dtype=made.dtype, device=self.device).set_(storage, 0, made.size, made.stride)
        into.func(*args, **kwargs, **{into.argument: out})
        self._counts["into_out"] += birth.memory is not None
        return out, None

    def offer(self, func: OpOverload) -> Offer | None:
        """Reserve the slots that a call of ``func`` is expected to fill, and offer them to the allocator."""
        if self._plan is None or self._memory is None or not self._takes_offers:
            return None
        with self._lock:
            self._bury()
            first = self._peek(func)
            if first is None or self._stream != self._current_stream():
                return None
            memory = self._memory
            base, owner = memory.base.data_ptr(), memory.base.untyped_storage().data_ptr()
            offer, slots = Offer(memory=memory, offsets={}, indices={}), []
            for index in range(self._position, min(self._position + first.batch, len(self._expected))):
                expected, offset = self._expected[index], self._plan.offsets[index]
                if offset is None or expected.left_alone or expected.passed_over > _MOST_PASSED_OVER:
                    continue
                if memory.reserve(offset, expected.nbytes):
                    slots.append((base - owner + offset, expected.nbytes, expected.passed_over))
                    offer.offsets[base + offset], offer.indices[base + offset] = offset, index
        if not slots:
            return None
        virtual.offer_slots(owner, slots)
        return offer

    def withdraw(self, offer: Offer) -> None:
        """The operator is done: what it has not taken, or has given back, is free again."""
        taken = virtual.withdraw_slots()
        with self._lock:
            for address in set(offer.offsets) - taken:
                offer.memory.release(offer.offsets.pop(address))
                offer.missed.add(offer.indices[address])

    def settle(
        self,
        func: OpOverload,
        out: Any,
        args: tuple[Any, ...],
        call: Call | None,
        *,
        bare: bool,
        offer: Offer | None,
    ) -> None:
        """Move the storages that ``func`` has made for ``out`` to their slots; ``bare``: nothing in them."""
        transient = 0
        births: list[Birth] = []
        for storage, tensors in self._made_by(out, args):
            nbytes = storage.nbytes()
            taken = None if offer is None else offer.offsets.pop(storage.data_ptr(), None)
            # See [Note: whose storage]: the tensors and the Python object hold it, nobody else.
            alone = torch._C._storage_Use_Count(storage._cdata) == len(tensors) + 1
            if not nbytes or (not alone and taken is None):
                continue
            if call is not None and alone:
                call.size, call.stride, call.dtype = tensors[0].size(), tensors[0].stride(), tensors[0].dtype
            if offer is not None and taken is not None:
                births += self._settle_taken(storage, func, call, offer.memory, taken, alone=alone)
                continue
            with self._lock:
                birth = self._enter(func, nbytes, call)
                slot = self._slot(birth)
                if offer is not None and birth.index in offer.missed:
                    self._expected[birth.index].passed_over += 1  # a temporary came first
            births.append(birth)
            if slot is None:
                self._watch(storage, birth)
                continue
            transient += nbytes
            if not bare:
                slot.copy_(storage, non_blocking=True)
                self._counts["copied"] += nbytes
            for tensor in tensors:
                tensor.set_(slot, tensor.storage_offset(), tensor.size(), tensor.stride())
        if births:
            births[0].batch = len(births)
        self._measure(transient)

    def _settle_taken(
        self,
        storage: torch.UntypedStorage,
        func: OpOverload,
        call: Call | None,
        memory: Memory,
        offset: int,
        *,
        alone: bool,
    ) -> list[Birth]:
        """The allocator has put ``storage`` into a slot; not ``alone``: the recorded iteration left it alone."""
        with self._lock:
            if alone:
                birth = self._enter(func, storage.nbytes(), call)
                birth.index = self._match(birth)
                self._counts["placed"] += 1
                self._counts["in_slot"] += 1
            else:
                birth = Birth(func, storage.nbytes(), self._clock, None)
            birth.memory, birth.offset = memory, offset
        self._watch(storage, birth)
        return [birth] if alone else []

    def _made_by(
        self, out: Any, args: tuple[Any, ...]
    ) -> Iterator[tuple[torch.UntypedStorage, list[torch.Tensor]]]:
        """The storages on the device that are in ``out`` and not among ``args``, each with its tensors."""
        made: dict[int, list[torch.Tensor]] = {}
        given = {id(tensor) for tensor in tensors_of(args)}
        for tensor in tensors_of(out):
            plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
            if plain and tensor.device == self.device and id(tensor) not in given:
                made.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)
        for tensors in made.values():
            yield tensors[0].untyped_storage(), tensors

    def leave_alone(self, args: Any, *, resized: bool) -> None:
        """Never place again what is in ``args``: it is being resized, or used on another stream."""
        for tensor in tensors_of(args):
            if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
                continue
            storage = tensor.untyped_storage()
            birth = self._placed_at.get(storage._cdata)
            if birth is None:
                continue
            birth.left_alone = True
            if birth.index is not None:
                self._expected[birth.index].left_alone = True
            birth.on_other_stream |= not resized
            if resized and birth.memory is not None and torch._C._storage_Use_Count(storage._cdata) == 2:
                own = torch.empty(birth.nbytes, dtype=torch.uint8, device=self.device).untyped_storage()
                own.copy_(storage)
                tensor.set_(own, tensor.storage_offset(), tensor.size(), tensor.stride())

    def _make_plan(self, births: list[Birth]) -> None:
        lives = [CyclicLife(nbytes=birth.nbytes, length=_length(birth)) for birth in births]
        self._plan = plan_cycle(lives, self._planner, granularity=self._granularity)
        # Slack, so that the first slot can be aligned wherever the allocator puts the arena.
        size = self._plan.nbytes + self._granularity
        with _disable_current_modes():  # it is no allocation of the loop
            base = torch.empty(size, dtype=torch.uint8, device=self.device)
            self._memory = Memory(base[-base.data_ptr() % self._granularity :])
        self._expected = births
        self._plans += 1
        for birth in self._placed_at.values():
            birth.counted = False
        self._outside = 0
        self._footprint = self._plan.nbytes

    def _peek(self, func: OpOverload) -> Birth | None:
        """The expected allocation that a call of ``func`` is about to make, if that is the very next."""
        if self._plan is None or self._position >= len(self._expected):
            return None
        expected = self._expected[self._position]
        return expected if expected.func is func else None

    def _enter(self, func: OpOverload, nbytes: int, call: Call | None) -> Birth:
        self._bury()
        birth = Birth(func, nbytes, self._clock, call)
        self._clock += 1
        self._current.append(birth)
        return birth

    def _slot(self, birth: Birth) -> torch.UntypedStorage | None:
        """The planned storage for ``birth``, reserved and watched; None if it has to stay outside."""
        if self._plan is None or self._memory is None:
            return None  # nothing is planned yet: no fallback
        index = birth.index = self._match(birth)
        offset = None if index is None else self._plan.offsets[index]
        if index is None or offset is None or self._expected[index].left_alone:
            self._counts["unexpected" if index is None else "unplanned"] += 1
            return None
        if self._stream != self._current_stream() or not self._memory.reserve(offset, birth.nbytes):
            self._counts["busy"] += 1
            return None
        birth.memory, birth.offset = self._memory, offset
        storage = self._memory.storage(offset, birth.nbytes)
        self._watch(storage, birth)
        self._counts["placed"] += 1
        return storage

    def _match(self, birth: Birth) -> int | None:
        """The index in the plan of the next allocation like ``birth``; some may not happen this time."""
        stop = min(self._position + _LOOK_AHEAD, len(self._expected))
        for index in range(self._position, stop):
            if birth.same_as(self._expected[index]):
                self._position = index + 1
                return index
        return None

    def _watch(self, storage: torch.UntypedStorage, birth: Birth) -> None:
        self._placed_at[storage._cdata] = birth
        if birth.memory is None and self._plan is not None:
            birth.counted = True
            self._outside += birth.nbytes
            self._measure(0)
        weakref.finalize(storage, self._died, storage._cdata, birth).atexit = False

    def _died(self, cdata: int, birth: Birth) -> None:
        birth.died = self._clock
        if self._placed_at.get(cdata) is birth:
            del self._placed_at[cdata]
        self._dead.append(birth)

    def _bury(self) -> None:
        while self._dead:
            birth = self._dead.popleft()
            if birth.memory is not None:
                # Work of another stream may still read it; no wait of ours tells when it has.
                if not birth.on_other_stream:
                    birth.memory.release(birth.offset)
                birth.memory = None
            elif birth.counted:
                self._outside -= birth.nbytes

    def _measure(self, transient: int) -> None:
        if self._plan is not None:
            self._footprint = max(self._footprint, self._plan.nbytes + self._outside + transient)

    def _current_stream(self) -> object:
        return None if self.device.type == "cpu" else torch.accelerator.current_stream(self.device)


def _alike(births: list[Birth], others: list[Birth]) -> bool:
    return len(births) == len(others) and all(
        one.same_as(other) for one, other in zip(births, others, strict=True)
    )


def _length(birth: Birth) -> int | None:
    if birth.died is None or birth.left_alone:
        return None
    return max(1, birth.died - birth.born)
