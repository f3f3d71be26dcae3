"""Which device copies exist: fetching and evicting.

Owns every transfer of parameters between home and device. Invariant: a copy that compute may read has arrived, and
memory that a copy still reads or writes is not given back. It decides nothing about the future: when to prefetch is the
schedule's answer, who leaves is `hetero.stm.copies.room`'s matter, and copies of homes that are yet to be written are
`hetero.stm.copies.orders`'.
"""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from hetero.autograd import outside_inference
from hetero.devices import Accelerator, CopyEngine
from hetero.errors import ManageError
from hetero.eviction import Policy
from hetero.msc import MemStatsCollector
from hetero.stm.copies.following import refresh, refuse_written_twice
from hetero.stm.copies.orders import Orders
from hetero.stm.copies.room import Room
from hetero.stm.copies.uploads import Uploads
from hetero.stm.deferred import UpdateQueue
from hetero.stm.tensors.managed import ManagedTensor, refused_write
from hetero.stm.tensors.precision import Master
from hetero.stm.tensors.state import Kind, Ledger, Tier

__all__ = ["RESIDENT", "Residency"]

# Storage identity -> whose copy it is. Shared by all managers of the process, so that the saved-tensor hooks of
# one model recognise the weights of another that is used inside it.
RESIDENT: dict[int, ManagedTensor] = {}


class Residency:
    """The device copies of one manager's parameters."""

    def __init__(
        self,
        accelerator: Accelerator,
        engine: CopyEngine,
        ledger: Ledger,
        meter: MemStatsCollector,
        policy: Policy,
        device_budget: int,
        updates: UpdateQueue,
    ) -> None:
        self._accelerator = accelerator
        self._engine = engine
        self._ledger = ledger
        self._meter = meter
        self._budget = device_budget
        self._updates = updates
        self._placeholders: dict[torch.dtype, torch.Tensor] = {}
        self._clock = 0
        self._stream: torch.Stream | None = None  # that copies were allocated for
        self._stream_of_nodes: torch.Stream | None = None
        # Operands that are being made resident: an allocation on the way may run out of memory, and must not be
        # relieved by evicting them.
        self.wanted: frozenset[int] = frozenset()
        self.uploads = Uploads(engine)
        self.orders = Orders(engine, self.uploads, updates, discard=self.discard)
        self.resident: dict[int, ManagedTensor] = {}
        # Of those of them that live on the device, how many bytes each takes.
        self._living: dict[int, int] = {}
        self.living_bytes = 0  # of parameters that live on the device; plain, because every operator may ask
        self.home_changes = 0  # how often a parameter has come to live on the device, or at home
        self.room = Room(accelerator, ledger, policy, device_budget, resident=self.resident, evict=self.evict)
        self._starting: torch.Tensor | None = None  # the destination of a copy that is being started

    def holds(self, operands: Sequence[ManagedTensor], *, limit: int) -> bool:
        """`require` would have nothing to do, nor would `Room.trim`: each has a device copy that has arrived and is as
        new as home. Written out, because every operator asks."""
        self._clock = clock = self._clock + 1
        for tensor in operands:
            if tensor.data is None or tensor.ready is not None or tensor.pending is not None:
                return False
            if tensor.clock.now != tensor.loaded_clock:
                return False
            tensor.last_use = clock
        return self._ledger.device_bytes <= limit and not self._updates.has_failed

    def require(self, operands: Sequence[ManagedTensor], *, limit: int, operator: Callable[[], str]) -> int:
        """Make every operand resident and safe to read by compute. Returns how many had to be fetched now.

        Raises `BudgetError` if they cannot fit; then no copy was made.
        """
        self._clock += 1
        missing: dict[int, ManagedTensor] = {}
        for tensor in operands:
            if tensor.is_tried:
                self.orders.roll_back(tensor)
            if tensor.is_stale:
                self._meter.count_stale(tensor.index)
                self.follow_home(tensor)
            if tensor.data is None:
                missing[tensor.index] = tensor
            tensor.last_use = self._clock
        if missing:
            wanted = sum(tensor.device_nbytes for tensor in missing.values())
            self.room.require(
                wanted, limit=limit, keep=[tensor.index for tensor in operands], operator=operator
            )
            for tensor in missing.values():
                self._fetch(tensor)
        for tensor in operands:
            if tensor.pending is not None or tensor.ready is not None:
                self._wait(tensor)
        self._updates.raise_error()
        return len(missing)

    def prefetch(self, tensor: ManagedTensor, *, limit: int) -> bool:
        """Start fetching if it fits as things are; False if it does not."""
        if tensor.is_stale:
            self.follow_home(tensor)
        if tensor.data is not None:
            return True
        if not self.room.claim(tensor.device_nbytes, limit=limit):
            return False
        try:
            self._fetch(tensor)
        except torch.OutOfMemoryError:  # somebody else's, on the same device: it can wait
            self._accelerator.note_answered()
            return False
        return True

    def evict(self, tensor: ManagedTensor) -> bool:
        """Drop the device copy, written back first if it was written. False if it is in use or held, or lives there."""
        if tensor.data is None or tensor.users or tensor.stays or tensor.index in self.wanted:
            return False
        self.orders.withdraw(tensor)
        if not tensor.is_resident:  # what it waited for has turned out to be wrong
            return True
        if tensor.is_held():
            return False
        written_back = self.write_back(tensor)
        self._meter.count_eviction(tensor.device_nbytes, written_back)
        self.drop(tensor)
        return True

    def drop(self, tensor: ManagedTensor) -> None:
        """Forget the copy, but not its place in graphs."""
        self.orders.withdraw(tensor)
        if tensor.ready is not None:
            # Its memory goes back to compute, which must not write there before the copy has.
            self._engine.compute_after_upload(tensor.ready)
        RESIDENT.pop(tensor.storage_key, None)
        self.resident.pop(tensor.index, None)
        if tensor.stays:
            self._count_living(tensor)
        tensor.detach(self._placeholder(tensor.origin.dtype))
        tensor.place(Tier.DEVICE, 0)

    def discard(self, tensor: ManagedTensor) -> None:
        """As `drop`, and its place in graphs too: home has overtaken it. Whoever still holds it keeps it."""
        if tensor.data is not None:
            tensor.identity = None
            self.drop(tensor)

    def follow_home(self, tensor: ManagedTensor) -> None:
        """Home has overtaken the copy: bring it up to date if somebody else holds it, else forget it."""
        if not tensor.is_held():
            self.discard(tensor)
            return
        self._drop_master(tensor)
        with outside_inference(), torch.no_grad():
            self.uploads.refresh_low(tensor)
            refresh(tensor, self._engine, self.uploads)
        self._meter.count_fetch(tensor.device_nbytes)

    def follow_homes(self, tensors: Iterable[ManagedTensor]) -> None:
        """As `follow_home`, wherever home has been written, or may have been without our knowing."""
        self.follow_unknown_writes(tensors)
        for tensor in list(self.resident.values()):
            if tensor.is_stale:
                self.follow_home(tensor)

    def follow_unknown_writes(self, tensors: Iterable[ManagedTensor]) -> None:
        """As `follow_homes`, only where nothing tells whether home has been written. Such copies keep their place in
        graphs: most often nobody has written, and two forwards with one backward are to end in the same nodes."""
        for tensor in tensors:
            if tensor.note_unknown_writes() and tensor.is_stale and not tensor.users:
                if tensor.is_held():
                    self.follow_home(tensor)
                else:
                    self.drop(tensor)

    def evict_idle(self) -> int:
        """Evict whatever no operator uses; returns the bytes freed."""
        before = self._ledger.device_bytes
        self.room.reclaim(before)
        for tensor in list(self.resident.values()):
            self.evict(tensor)
        return before - self._ledger.device_bytes

    def follow_stream(self) -> None:
        """Compute may have moved to another stream: nothing allocated for the one before is left to it.

        Raises nothing; copies that are held stay, and are the caller's to order, as any tensor of theirs.
        """
        stream, before = self._accelerator.compute_stream(), self._stream
        if before is not None and stream != before:
            with before:
                self.room.send_home(self._budget)
                self.evict_idle()
            stream.wait_event(before.record_event())
        self._stream = self._engine.allocates_on = stream

    def follow_stream_with_nodes(self, tensors: Iterable[ManagedTensor]) -> None:
        """Autograd runs a node on the stream on which it was made: on another than what hands it a gradient, that
        gradient's memory would be kept for as long as the other stream has work."""
        stream, before = self._accelerator.compute_stream(), self._stream_of_nodes
        if before is None or stream != before:
            self._stream_of_nodes = stream
            for tensor in tensors:
                tensor.identity = None

    @contextlib.contextmanager
    def on_its_stream(self) -> Iterator[None]:
        """Another manager asks, which may compute on another stream: what leaves is ordered on ours, and what they
        compute comes after it."""
        stream, ours = self._accelerator.compute_stream(), self._stream
        if ours is None or stream == ours:
            yield
            return
        with ours:
            yield
        stream.wait_event(ours.record_event())

    def await_copies(self) -> None:
        """After an interrupt, that may have come between a copy's start and our knowing of it: none is on its way."""
        self._accelerator.synchronize()

    def write_back(self, tensor: ManagedTensor) -> int:
        """Bring home up to date with writes to the device copy; returns the bytes moved."""
        if not tensor.is_dirty:
            return 0
        assert tensor.data is not None
        if tensor.is_miswritten:
            if tensor.master is not None:  # home may be behind what was stepped
                self._bring_home(tensor, tensor.master.values)
            self.discard(tensor)
            raise refused_write(tensor)
        if tensor.is_stale:
            refuse_written_twice(tensor)
        self.orders.finish_update(tensor)
        living = tensor.living
        assert living is not None
        self._bring_home(tensor, living)
        return tensor.full_nbytes

    def write_back_all(self, *, unseen: bool = False) -> None:
        """What was written to copies is home afterwards, for every parameter that lives there; ``unseen``: also what
        may have been written without our seeing it."""
        refused = None
        for tensor in list(self.resident.values()):
            is_behind = tensor.is_dirty if unseen else tensor.is_written
            if is_behind and (not tensor.stays or tensor.is_miswritten):
                try:
                    self._meter.count_eviction(0, self.write_back(tensor))
                except ManageError as error:
                    refused = error
        if refused is not None:
            raise refused

    def before_host_write(self, tensor: ManagedTensor) -> None:
        """Its home is about to be written: wait until it is settled and no copy reads it."""
        self.settle(tensor)
        self.uploads.wait(tensor, tensor.home)

    def settle(self, tensor: ManagedTensor) -> None:
        """Return once home is up to date, and the copy on order, if any, on its way.

        Raises what failed in the queue, whichever parameter's update it was; all is settled then as well.
        """
        self.orders.finish_update(tensor)
        if tensor.is_dirty:
            self._meter.count_eviction(0, self.write_back(tensor))

    def home_bytes(self) -> int:
        """Of what lives on the device: parameters and optimizer states, without gradients."""
        # Not a sum over all of them: where there is more than was measured, every operator asks.
        return self.living_bytes + self._ledger.nbytes(Tier.DEVICE, Kind.OPTIMIZER_STATE)

    def stay(self, tensor: ManagedTensor) -> None:
        """From now on it lives on the device. Raises `BudgetError` if it cannot be fetched."""
        self.require([tensor], limit=self._budget, operator=lambda: f"fetching {tensor.name} for good")
        if tensor.living is None:
            self._fetch_master(tensor)
        self.note_staying(tensor)

    def note_staying(self, tensor: ManagedTensor) -> None:
        """It lives on the device from now on, where it is already."""
        tensor.stays = True
        self.home_changes += 1
        self._count_living(tensor)

    def move_home(self, tensor: ManagedTensor) -> None:
        """It lives at home again; its copy is like any other."""
        self.settle(tensor)
        self._drop_master(tensor)
        tensor.stays = False
        self.home_changes += 1
        self._count_living(tensor)

    def lend(self, tensor: ManagedTensor) -> None:
        """Its copy has become the parameter itself (`hetero.stm.settled`). The bytes still count."""
        del RESIDENT[tensor.storage_key], self.resident[tensor.index]
        self._count_living(tensor)
        tensor.identity = None
        tensor.detach(self._placeholder(tensor.origin.dtype))

    def take_back(self, tensor: ManagedTensor, copy: torch.Tensor) -> None:
        """``copy`` is its copy again."""
        tensor.attach(copy)
        RESIDENT[tensor.storage_key] = self.resident[tensor.index] = tensor
        self._count_living(tensor)

    def drop_stale(self, tensors: Iterable[ManagedTensor]) -> None:
        """Forget the copies of ``tensors`` that home has overtaken, and their place in old graphs."""
        for tensor in tensors:
            if tensor.is_stale:
                self.follow_home(tensor)
            elif tensor.data is None:
                tensor.identity = None

    # -- helpers --------------------------------------------------------------------------------------

    def _fetch(self, tensor: ManagedTensor) -> None:
        tensor.follow_parameter()
        tensor.note_unknown_writes()
        if self._starting is not None:  # an interrupt came between the start of a copy and our knowing of it
            self.await_copies()
        # Copies made inside the user's inference_mode would be unusable for training later.
        with outside_inference(), torch.no_grad():
            if tensor.pending is None:
                self.uploads.refresh_low(tensor)
            self._starting = copy = torch.empty_like(tensor.origin, device=self._accelerator.device)
            if not self.orders.place(tensor, copy):
                tensor.ready = self._engine.upload(tensor.origin, copy)
                self.uploads.note(tensor.ready, tensor)
            tensor.attach(copy)
        self._starting = None
        RESIDENT[tensor.storage_key] = tensor
        self.resident[tensor.index] = tensor
        if tensor.stays:
            self._count_living(tensor)
        tensor.fetched_at = self._clock
        tensor.place(Tier.DEVICE, tensor.device_nbytes)
        self._meter.count_fetch(tensor.device_nbytes)

    def _count_living(self, tensor: ManagedTensor) -> None:
        """It has come to the device or left it, or its home has moved."""
        nbytes = tensor.living_nbytes if tensor.stays and tensor.index in self.resident else 0
        self.living_bytes += nbytes - self._living.pop(tensor.index, 0)
        if nbytes:
            self._living[tensor.index] = nbytes

    def _fetch_master(self, tensor: ManagedTensor) -> None:
        """Home's values beside the copy that was made of them. Raises `BudgetError` if there is no room."""
        self.room.require(
            tensor.full_nbytes,
            limit=self._budget,
            keep=[tensor.index],
            operator=lambda: f"fetching {tensor.name} for good",
        )
        assert tensor.data is not None
        with outside_inference(), torch.no_grad():
            values = torch.empty_like(tensor.home, device=self._accelerator.device)
        event = self._engine.upload(tensor.home, values)
        self.uploads.note(event, tensor)
        self._engine.compute_after_upload(event)
        tensor.master = Master(values, tensor.data._version)
        tensor.place(Tier.DEVICE, tensor.living_nbytes)
        self._meter.count_fetch(tensor.full_nbytes)

    def _drop_master(self, tensor: ManagedTensor) -> None:
        if tensor.master is not None:
            tensor.master = None
            tensor.place(Tier.DEVICE, tensor.device_nbytes)

    def _bring_home(self, tensor: ManagedTensor, values: torch.Tensor) -> None:
        """Home is ``values`` now, which are the copy's, or what it was made of."""
        version = tensor.version
        self.uploads.wait(tensor, tensor.home)
        event = self._engine.download(values, tensor.home)
        self._engine.host_after_download(event, tensor.home)
        self._engine.free_after_download(event)
        # The copy counts as one write; autograd's check must see as many as there were on the device.
        torch._C._autograd._unsafe_set_version_counter((tensor.home,), (version,))
        tensor.note_loaded()

    def _wait(self, tensor: ManagedTensor) -> None:
        begin = time.perf_counter()
        if tensor.pending is not None:
            with self._meter.waiting_for_host():
                self.orders.finish(tensor)
            if tensor.data is None:
                self._updates.raise_error()
        assert tensor.ready is not None
        self._engine.compute_after_upload(tensor.ready)
        tensor.ready = None
        self._meter.count_stall(time.perf_counter() - begin)

    def _placeholder(self, dtype: torch.dtype) -> torch.Tensor:
        placeholder = self._placeholders.get(dtype)
        if placeholder is None:
            with outside_inference():
                placeholder = torch.empty(0, dtype=dtype, device=self._accelerator.device)
            self._placeholders[dtype] = placeholder
        return placeholder
