"""Which tensors are managed, and the bytes of each in the ledger.

Owns the list of managed parameters and the entries of buffers and optimizer states. Moves nothing.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from hetero.devices import Accelerator, CopyEngine, HostArena
from hetero.stm.tensors.hostcopies import note_at_home
from hetero.stm.tensors.managed import ManagedTensor
from hetero.stm.tensors.owner import Owner
from hetero.stm.tensors.precision import LowTwin, computes_in
from hetero.stm.tensors.state import Kind, Ledger, State, StatefulTensor, Tier

__all__ = ["Registry"]


class Registry:
    """Of one manager. ``precision``: that of device copies, if not the parameters' own."""

    def __init__(
        self,
        ledger: Ledger,
        accelerator: Accelerator,
        engine: CopyEngine,
        arena: HostArena,
        precision: torch.dtype | None,
    ) -> None:
        self._ledger = ledger
        self._accelerator = accelerator
        self._engine = engine
        self._arena = arena
        self._precision = precision
        self._buffers: list[StatefulTensor] = []
        self._states: dict[int, StatefulTensor] = {}
        self.tensors: list[ManagedTensor] = []
        # At home, of low-precision twins: copies, like those on the device.
        self.twin_bytes = 0

    def expect_twins(self, parameters: Iterable[nn.Parameter]) -> None:
        """Low-precision twins of ``parameters`` will be needed: one piece of host memory for all."""
        for parameter in parameters:
            dtype = computes_in(parameter.dtype, self._precision)
            if dtype is not parameter.dtype:
                self._arena.expect(self._arena.slab_bytes(parameter.numel() * dtype.itemsize))

    def add_parameter(self, name: str, parameter: nn.Parameter, owner: Owner) -> ManagedTensor:
        """``parameter`` is at home and becomes managed by ``owner``. Its class is changed by the caller."""
        dtype = computes_in(parameter.dtype, self._precision)
        device_nbytes = self._accelerator.allocated_size(parameter.numel() * dtype.itemsize)
        nbytes = parameter.numel() * parameter.element_size()
        full_nbytes = self._accelerator.allocated_size(nbytes)
        tensor = ManagedTensor(
            self._ledger, name, len(self.tensors), parameter, owner, device_nbytes, full_nbytes
        )
        if dtype is not parameter.dtype:
            twin = self._arena.empty_strided(tuple(parameter.size()), tuple(parameter.stride()), dtype)
            tensor.low = LowTwin(twin, self._engine)
            self.twin_bytes += twin.nbytes
            nbytes += twin.nbytes
        tensor.place(Tier.HOST, nbytes)
        if nbytes == 0:  # no bytes to place, but a tensor all the same
            tensor.transition(State.HOLD)
        self.tensors.append(tensor)
        return tensor

    def add_buffer(self, name: str, buffer: torch.Tensor) -> None:
        """``buffer`` is on the device and stays there."""
        entry = StatefulTensor(self._ledger, Kind.BUFFER, name)
        entry.place(Tier.DEVICE, self._accelerator.allocated_size(buffer.numel() * buffer.element_size()))
        self._buffers.append(entry)

    def buffer_bytes(self) -> int:
        """Of all buffers, on the device."""
        return sum(entry.nbytes(Tier.DEVICE) for entry in self._buffers)

    def set_states(self, states: Sequence[tuple[str, torch.Tensor]]) -> None:
        """What the optimizer keeps now, and where. States that are gone are forgotten."""
        known = {id(tensor): entry for _, tensor in states if (entry := self._states.get(id(tensor)))}
        for key, entry in self._states.items():
            if key not in known:
                entry.release()
        for name, tensor in states:
            entry = known.setdefault(id(tensor), StatefulTensor(self._ledger, Kind.OPTIMIZER_STATE, name))
            nbytes, on_host = tensor.numel() * tensor.element_size(), tensor.device.type == "cpu"
            if on_host and not entry.nbytes(Tier.HOST):
                note_at_home(tensor)
            entry.place(Tier.HOST, nbytes if on_host else 0)
            entry.place(Tier.DEVICE, 0 if on_host else self._accelerator.allocated_size(nbytes))
        self._states = known
