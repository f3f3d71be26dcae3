"""Copies of saved tensors between the device and the host's blocks.

Owns every copy that is on its way, and who uses which of the host's blocks (`hetero.stm.activations.slots`). Invariant:
what a copy reads or writes is neither freed nor used again before the copy has ended, whoever lets go of the record
meanwhile, and whatever interrupts its start. It knows no plan: when something leaves or comes back, and what else leads
to its memory, is `hetero.stm.activations.offload`'s.
"""

import torch

from hetero.autograd import outside_inference
from hetero.devices import Accelerator, CopyEngine, bytes_of
from hetero.msc import MemStatsCollector
from hetero.stm.activations.records import Account, Flight
from hetero.stm.activations.slots import HostSlots
from hetero.stm.tensors.state import Tier

__all__ = ["Flights"]


class Flights:
    """Of one model's records, each known by its account."""

    def __init__(
        self, accelerator: Accelerator, engine: CopyEngine, slots: HostSlots, collector: MemStatsCollector
    ) -> None:
        self._device = accelerator.device
        self._engine = engine
        self._slots = slots
        self._collector = collector
        self._under_way: dict[int, Flight] = {}
        # Both ends of a copy that is being started, kept alive here: an interrupt before its flight is known would let
        # go of them while it runs.
        self._starting: tuple[torch.Tensor, torch.Tensor] | None = None

    def __len__(self) -> int:
        return len(self._under_way)

    def send(self, account: Account, alias: torch.Tensor) -> Flight | None:
        """Start the copy of all bytes of the storage of ``alias`` to the host; None if it has no room for them."""
        with outside_inference():
            memory = bytes_of(alias)
            if account.host is None:
                account.host = self._slots.take(memory.numel())
                if account.host is None:
                    return None
                account.count(Tier.HOST, account.host.nbytes)
            self._starting = (memory, account.host)
            event = self._engine.download(memory, account.host)
            flight = self._begin(Flight(account, memory, event, is_download=True))
        self._collector.count_activation_out(account.device_nbytes)
        return flight

    def bring(self, account: Account) -> torch.Tensor:
        """Device memory (one dimension, bytes) that has what was sent, or to which it is on its way.

        Raises:
            torch.OutOfMemoryError: nothing has changed.
        """
        flight = account.flight
        if flight is not None:  # it has not left yet
            self._engine.free_after_download(flight.event)
            self._end(flight)
            self._collector.count_spared(account.device_nbytes)
            return flight.memory
        assert account.host is not None
        with outside_inference():
            memory = torch.empty(account.host.numel(), dtype=torch.uint8, device=self._device)
            self._starting = (memory, account.host)
            event = self._engine.upload(account.host, memory)
            self._begin(Flight(account, memory, event, is_download=False))
        account.count(Tier.DEVICE, account.device_nbytes)
        self._collector.count_activation_in(account.device_nbytes)
        return memory

    def land(self, flight: Flight) -> None:
        """Let go of a flight's memory, after compute has been told to wait for the copy."""
        account = flight.account
        if flight.is_download:
            self._engine.free_after_download(flight.event)
            account.count(Tier.DEVICE, 0)
        else:
            self._engine.compute_after_upload(flight.event)
        self._end(flight)
        if flight.is_orphan:
            self.close(account)

    def land_all(self) -> None:
        """Nothing is on its way any more."""
        for flight in list(self._under_way.values()):
            self.land(flight)

    def reclaim(self, nbytes: int) -> int:
        """`hetero.stm.activations.offload.Activations.reclaim`"""
        freed = 0
        for flight in list(self._under_way.values()):
            if not (flight.is_download or flight.is_orphan):
                continue
            if freed >= nbytes and not flight.event.query():
                continue
            freed += flight.account.device_nbytes
            self.land(flight)
        return freed

    def close(self, account: Account) -> None:
        """Nobody needs its bytes any more: its host block is given back, when no copy uses that."""
        if account.flight is not None:
            account.flight.is_orphan = True
            return
        account.release()
        if account.host is not None:
            self._slots.give_back(account.host)
            account.host = None

    def forget_starting(self) -> None:
        """`hetero.stm.activations.offload.Activations.forget_starting`"""
        self._starting = None

    def _begin(self, flight: Flight) -> Flight:
        account = flight.account
        self._under_way[id(account)] = flight  # first: what an account leads to is among these
        account.flight = flight
        self._starting = None
        return flight

    def _end(self, flight: Flight) -> None:
        del self._under_way[id(flight.account)]
        flight.account.flight = None
