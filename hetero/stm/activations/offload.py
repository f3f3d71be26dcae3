"""Saved tensors that may leave the device.

Owns which records there are of what forward saved for backward and is no parameter (`hetero.stm.activations.records`),
what the plan calls them, and when each leaves or comes back; the copies are `hetero.stm.activations.flights`'s.
Invariant: what backward reads has the bytes that forward saved; a storage leaves only while nobody but the graph
holds it, so that leaving frees its memory and nobody can write to it meanwhile. It decides nothing about the future:
who leaves is the plan's answer, or, where memory is short, whoever was saved first: backward needs it last.

[Note: model data]
While it is on the device a record counts as model data, of a kind of its own, from the moment it is saved. So what is
measured as non-model data does not depend on which records were away. A period's own new records are non-model data
until the next sampling moment, because the period's peak holds them whatever the plan says.
"""

import contextlib
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from hetero.autograd import in_backward, outside_inference
from hetero.devices import Accelerator, CopyEngine, storage_of
from hetero.eviction.model import large_bytes
from hetero.msc import MemStatsCollector
from hetero.stm.activations.flights import Flights
from hetero.stm.activations.records import Account, Activation, Flight, Key, Saved
from hetero.stm.activations.slots import HostSlots
from hetero.stm.tensors.exposure import WRAPPER_USES, listed_alone
from hetero.stm.tensors.fetch import plain
from hetero.stm.tensors.state import Kind, Ledger, Tier

__all__ = ["Activations"]

# Ordinary numbers: their bytes say everything (a quantized tensor has a scale beside them).
_DTYPES = frozenset(
    {
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
        *(torch.float8_e4m3fn, torch.float8_e5m2, torch.bool, torch.uint8),
        *(torch.int8, torch.int16, torch.int32, torch.int64),
    }
)
# Of the device budget: of less than one part in so many, a transfer's latency is worth more than its bytes.
_WORTH_MOVING = 1 << 14


class Activations:
    """The saved tensors of one model. ``lock``: the manager's."""

    def __init__(
        self,
        accelerator: Accelerator,
        engine: CopyEngine,
        slots: HostSlots,
        ledger: Ledger,
        collector: MemStatsCollector,
        *,
        lock: contextlib.AbstractContextManager[bool],
        device_budget: int,
    ) -> None:
        self._accelerator = accelerator
        self._device = accelerator.device
        self._ledger = ledger
        self._collector = collector
        self._lock = lock
        self._slots = slots
        self._flights = Flights(accelerator, engine, slots, collector)
        self.least = device_budget // _WORTH_MOVING  # bytes of a storage that is worth a record
        self._large = large_bytes(device_budget)
        self._by_storage: dict[int, weakref.ref[Activation]] = {}
        self._live: dict[weakref.ref[Activation], Account] = {}  # in the order in which they were saved
        self._gone: deque[weakref.ref[Activation]] = deque()
        self._by_index: dict[int, weakref.ref[Activation]] = {}
        # Those that somebody besides the graph may hold: who does saved it, or has been given it since it was last seen
        # to be let go of.
        self._may_be_held: dict[Account, weakref.ref[Activation]] = {}
        # Of buffers: who has such a reference knows that no other storage has the address.
        self._counted: dict[int, StorageWeakRef] = {}
        self._whole_bytes = 0
        self._forward = 0
        self._ordinal = 0
        # The plan's numbers of the next one that is saved, and of the first it does not know.
        self.coming = self._stop = 0
        self._closed = False
        self.kept = 0  # tensors that were saved as they are
        # Set by the manager: what a sampling moment is, and who makes room.
        self.moment: Callable[[str], None] = lambda name: None
        self.make_room: Callable[[int], None] = lambda nbytes: None

    # -- saving and reading ----------------------------------------------------------------------------

    def save(self, tensor: torch.Tensor, storage_key: int, nbytes: int) -> Saved | None:
        """A handle for ``tensor``, which autograd saves, in a storage of at least `least` ``nbytes``; None if it is to
        be kept as it is."""
        if tensor.device != self._device:
            return None
        if storage_key in self._counted or nbytes % tensor.itemsize or not _may_move(tensor):
            self.kept += 1
            return None
        reference = self._by_storage.get(storage_key)
        record = None if reference is None else reference()
        if record is not None and record.aliases is not None:
            return Saved(record, record.add(_alias(tensor)), tensor._version)
        with self._lock:
            if self._closed:
                return None
            record = self._register(storage_key, nbytes)
            # Without its node: an operator's own output would hold the node that holds what we return.
            saved = Saved(record, record.add(_alias(tensor)), tensor._version)
            if nbytes >= self._large:
                self.moment("saved")
        return saved

    def load(self, saved: Saved) -> tuple[torch.Tensor, int]:
        """The tensor again, on the device, and its version."""
        record = saved.record
        account = record.account
        with self._lock:
            if not self._closed:
                if account.device_nbytes >= self._large and in_backward():
                    self.moment("saved")
                if not account.is_retired:
                    self._collector.note_used(account.key)
            if record.aliases is None:
                self._bring(record)
            if account.flight is not None:
                self._await(account.flight)
            self._may_be_held[account] = weakref.ref(record)
            return record.read(saved.place)

    def leave_out(self, tensor: torch.Tensor) -> None:
        """A buffer's memory, which counts as model data, and stays, whether it is saved or not."""
        storage = storage_of(tensor)
        if storage is not None:
            self._counted[storage._cdata] = StorageWeakRef(storage)

    def _register(self, storage_key: int, nbytes: int) -> Activation:
        if self._gone:
            self.close_gone()
        ordinal = self._ordinal
        self._ordinal = ordinal + 1
        device_nbytes = self._accelerator.allocated_size(nbytes)
        # Of whatever size: an expert's tensors have another in every iteration.
        index = self.coming if self.coming < self._stop else -1
        self.coming += 1
        account = Account(self._ledger, (self._forward, ordinal), device_nbytes, index)
        account.storage_key = storage_key
        self._whole_bytes += device_nbytes
        record = Activation(self, account)
        reference = weakref.ref(record, self._note_gone)
        self._by_storage[storage_key] = reference
        self._live[reference] = account
        self._may_be_held[account] = reference
        if index >= 0:
            self._by_index[index] = reference
        self._collector.note_saved(account.key, device_nbytes)
        return record

    # -- following the iteration ------------------------------------------------------------------------

    def begin_iteration(self) -> None:
        """What is left over from the one before is the caller's."""
        self.close_gone()
        self._by_index.clear()
        self._retire(self._live.values())

    def begin_forward(self, number: int) -> None:
        """Forward ``number`` of those that wait for their backward begins. An earlier one of that number, whose graph
        was kept, is the caller's from now on."""
        self.close_gone()
        self._retire(account for account in self._live.values() if account.key[0] == number)
        self._forward, self._ordinal = number, 0

    def follow(self, first: int, stop: int) -> None:
        """What is saved from now on is known to the plan as ``first`` and those that follow, and not at all from
        ``stop`` on."""
        self.coming, self._stop = first, stop

    def held(self) -> tuple[Key, ...]:
        """The records that cannot leave now, because somebody besides the graph holds them."""
        self.close_gone()
        self._may_be_held = {
            account: reference
            for account, reference in self._may_be_held.items()
            if not account.is_retired and (record := reference()) is not None and self._is_held(record)
        }
        return tuple(account.key for account in self._may_be_held)

    def close_gone(self) -> None:
        """Close the accounts of records that are gone. Cheap if there are none."""
        if self._gone:
            self._close_gone()

    def _close_gone(self) -> None:
        while self._gone:
            reference = self._gone.popleft()
            account = self._live.pop(reference, None)
            if account is None:
                continue
            self._may_be_held.pop(account, None)
            if not account.is_retired:
                self._whole_bytes -= account.device_nbytes
                self._collector.note_dropped(account.key)
            if self._by_storage.get(account.storage_key) is reference:
                del self._by_storage[account.storage_key]
            if self._by_index.get(account.index) is reference:
                del self._by_index[account.index]
            self._flights.close(account)

    def _retire(self, accounts: Iterable[Account]) -> None:
        for account in accounts:
            if not account.is_retired:
                self._whole_bytes -= account.device_nbytes
                account.retire()

    def _note_gone(self, reference: "weakref.ref[Activation]") -> None:
        # Runs wherever the last reference happens to go, perhaps while another thread has the lock.
        self._gone.append(reference)

    # -- what the plan asks for (`hetero.stm.running.backlog`) ----------------------------------------------------

    def is_resident(self, index: int) -> bool:
        """The plan's record ``index`` is on the device, perhaps still on its way, or is needed no more."""
        record = self._planned(index)
        return record is None or record.aliases is not None

    def nbytes(self, index: int) -> int:
        """What the plan's record ``index`` takes of the device when it is there; 0 if it is needed no more."""
        record = self._planned(index)
        return 0 if record is None else record.account.device_nbytes

    def evict(self, index: int) -> bool:
        """Start the plan's record ``index`` on its way out; False if it cannot leave yet."""
        record = self._planned(index)
        if record is None or record.aliases is None:
            return True
        return self._leave(record, at_once=False) > 0

    def prefetch(self, index: int, *, limit: int) -> bool:
        """Start bringing the plan's record ``index`` back if it fits as things are; False if it does not."""
        record = self._planned(index)
        if record is None or record.aliases is not None:
            return True
        account = record.account
        if account.flight is None:
            excess = self._ledger.device_bytes + account.device_nbytes - limit
            if excess > 0:
                self.reclaim(excess)
                if self._ledger.device_bytes + account.device_nbytes > limit:
                    return False
        try:
            self._start_back(record)
        except torch.OutOfMemoryError:  # somebody else's, on the same device: it can wait
            self._accelerator.note_answered()
            return False
        return True

    def _planned(self, index: int) -> Activation | None:
        reference = self._by_index.get(index)
        return None if reference is None else reference()

    # -- making room -------------------------------------------------------------------------------------

    def shed(self, nbytes: int) -> int:
        """Free at least ``nbytes`` if idle records have as many, the first saved first; returns how many."""
        self.close_gone()
        freed = self.reclaim(nbytes)
        for reference in list(self._live):
            if freed >= nbytes:
                break
            record = reference()
            if record is not None:
                freed += self._leave(record, at_once=True)
        return freed

    def reclaim(self, nbytes: int) -> int:
        """Give back at least ``nbytes`` of what is on its way out, if there is as much; returns how many. What has
        arrived is given back in any case."""
        return self._flights.reclaim(nbytes)

    @property
    def has_records(self) -> bool:
        """A graph is alive that has saved some."""
        self.close_gone()
        return bool(self._live)

    @property
    def device_bytes(self) -> int:
        """Of all records that count, on the device now."""
        return self._ledger.nbytes(Tier.DEVICE, Kind.ACTIVATION)

    @property
    def whole_bytes(self) -> int:
        """Of all records that count, were all of them on the device; and of what is gone, until `close_gone`."""
        return self._whole_bytes

    def without_host_room(self) -> int:
        """Bytes on the device of records that could leave, had the host's budget room for them."""
        self.close_gone()
        records = [record for reference in self._live if (record := reference()) is not None]
        idle = [
            r for r in records if r.aliases is not None and r.account.flight is None and not self._is_held(r)
        ]
        stuck = [r.account for r in idle if r.account.host is None and not r.is_clean()]
        return sum(a.device_nbytes for a in stuck if not self._slots.has_room(a.device_nbytes))

    def host_room(self) -> int:
        """Bytes of host memory that records may take in all."""
        return self._slots.most_bytes

    def close(self) -> None:
        """Nothing is on its way. Graphs that are left can still be read."""
        self.close_gone()
        self._flights.land_all()
        self._retire(self._live.values())
        self._by_index.clear()
        self._closed = True

    def forget_starting(self) -> None:
        """After an interrupt, and a wait for the whole device: no copy is on its way that nobody knows of."""
        self._flights.forget_starting()

    # -- moves -------------------------------------------------------------------------------------------

    def _is_held(self, record: Activation) -> bool:
        aliases = record.aliases
        if aliases is None:
            return False
        if record.account.flight is not None:
            return False
        # Of what needs no gradient, autograd gives out the alias itself.
        uses: int = torch._C._storage_Use_Count(record.account.storage_key)
        return uses > len(aliases) + WRAPPER_USES or not listed_alone(aliases)

    def _leave(self, record: Activation, *, at_once: bool) -> int:
        """Free its device memory, ``at_once`` or when the copy has ended; returns how many bytes (0: it cannot)."""
        account = record.account
        if at_once and account.flight is not None and not account.flight.is_download:
            self._flights.land(account.flight)  # brought back ahead of its use: what runs now goes first
        if record.aliases is None or account.flight is not None or self._is_held(record):
            return 0
        if record.is_clean():
            self._fold(record)
            account.count(Tier.DEVICE, 0)
            self._collector.note_shed(account.key)
            return account.device_nbytes
        flight = self._flights.send(account, record.aliases[0])
        if flight is None:
            return 0
        self._fold(record)
        if at_once:
            self._collector.note_shed(account.key)
            self._flights.land(flight)
        return account.device_nbytes

    def _fold(self, record: Activation) -> None:
        """Nothing here leads to its device memory any more."""
        account = record.account
        self._by_storage.pop(account.storage_key, None)
        account.storage_key = 0
        record.fold()

    def _bring(self, record: Activation) -> None:
        account = record.account
        comes_back = account.flight is None and not self._closed
        if comes_back and account.index >= 0:
            self._collector.count_unplanned(1)
        # In the middle of a period, whose peak is not measured against what leaves for it.
        with self._collector.evicting(for_operator=False):
            if comes_back:
                self.make_room(account.device_nbytes)
            try:
                self._start_back(record)
            except torch.OutOfMemoryError:
                if self.shed(account.device_nbytes) == 0:
                    raise
                self._accelerator.note_answered()
                self._accelerator.release_cached()
                self._start_back(record)

    def _start_back(self, record: Activation) -> None:
        """Its bytes are on the device again, or on their way there."""
        account = record.account
        memory = self._flights.bring(account)
        with outside_inference():
            record.unfold(memory)
        account.clean_version = memory._version
        account.storage_key = memory.untyped_storage()._cdata

    def _await(self, flight: Flight) -> None:
        """A record that is on its way back is read next."""
        begin = time.perf_counter()
        self._flights.land(flight)
        self._collector.count_stall(time.perf_counter() - begin)


def _may_move(tensor: torch.Tensor) -> bool:
    """Whether its storage's bytes say all of it; the caller knows that it is on the device, and strided."""
    return (
        (type(tensor) is torch.Tensor or _is_ordinary(tensor))
        and tensor.dtype in _DTYPES
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor.is_inference()
    )


def _is_ordinary(tensor: torch.Tensor) -> bool:
    """Of a class of the user's own that only its ``__torch_function__`` tells from a tensor, and that backward does not
    see: autograd gives back one that requires gradients as an ordinary tensor, whatever a hook has returned."""
    kind: Any = type(tensor)
    dispatches = kind.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl
    return tensor.requires_grad and not (dispatches or issubclass(kind, torch.nn.Parameter))


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    if type(tensor) is torch.Tensor:
        return tensor.detach()
    with plain():
        return tensor.detach()
