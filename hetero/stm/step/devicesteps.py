"""The step of parameters that live on the device.

Owns which of them take one call of the optimizer's own arithmetic together, and what becomes of one for which there is
no room at that moment: it is stepped at home.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import cast

import torch

from hetero.devices import Accelerator
from hetero.stm.manager import StatefulTensorMgr
from hetero.stm.step.devicehomes import DeviceHomes
from hetero.stm.tensors.managed import ManagedTensor
from hetero.stm.updates.captured import ParameterUpdate, run_together
from hetero.stm.updates.optimizers import may_write_to_gradients

__all__ = ["DeviceSteps", "DeviceUpdate"]


@dataclass(frozen=True, slots=True)
class DeviceUpdate:
    """A captured update of a parameter that lived on the device at the capture: ``make(parameter, gradient)``."""

    tensor: ManagedTensor
    make: Callable[[torch.Tensor, torch.Tensor], ParameterUpdate]


class DeviceSteps:
    """Of one optimizer, whose ``homes`` say which live there."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        stm: StatefulTensorMgr,
        accelerator: Accelerator,
        homes: DeviceHomes,
    ) -> None:
        self._optimizer = optimizer
        self._stm = stm
        self._accelerator = accelerator
        self._homes = homes

    def run(
        self, updates: Iterable[DeviceUpdate], note: Callable[[ManagedTensor, ParameterUpdate], None]
    ) -> None:
        """Step them, and ``note`` each once it is done: it may have made a state. Those with one `batch_key`
        that there is room for side by side take one call of step."""
        groups = self._homes.groups()
        batch: list[tuple[ManagedTensor, ParameterUpdate]] = []
        # Asked once for a batch: a real device takes long to say what is in use.
        left = reserved = 0
        for item in updates:
            tensor = item.tensor
            writes = may_write_to_gradients(self._optimizer, groups[id(tensor.parameter)])
            copies = tensor.full_nbytes if writes else self._stm.gradient_access.on_device_nbytes(tensor)
            room = self._homes.update_bytes(tensor, groups) + copies
            if not (batch and reserved + room <= left):
                self._run_here(batch, note)
                self._homes.make_room(room)
                left, reserved = self._stm.residency.room.left(), 0
            if not tensor.stays or tensor.living is None:  # it had to leave just now
                self._run_at_home(item, note)
                continue
            if not self._homes.is_measured:
                if not self._try_here(item, note):
                    self._homes.send(tensor, groups)
                    self._run_at_home(item, note)
                continue
            gradient = (
                self._stm.gradient_access.own(tensor)
                if writes
                else self._stm.gradient_access.on_device(tensor)
            )
            update = item.make(tensor.living, gradient)
            if batch and (update.batch_key is None or update.batch_key != batch[-1][1].batch_key):
                self._run_here(batch, note)
                left, reserved = self._stm.residency.room.left(), 0
            batch.append((tensor, update))
            reserved += room
        self._run_here(batch, note)

    # -- helpers --------------------------------------------------------------------------------------

    def _run_at_home(
        self, item: DeviceUpdate, note: Callable[[ManagedTensor, ParameterUpdate], None]
    ) -> None:
        """It lives there again."""
        tensor = item.tensor
        self._stm.home_access.before_writes([tensor])
        update = item.make(tensor.home, cast(torch.Tensor, tensor.parameter.grad))
        update.run()
        tensor.clock.note_write()
        note(tensor, update)

    def _try_here(self, item: DeviceUpdate, note: Callable[[ManagedTensor, ParameterUpdate], None]) -> bool:
        """False: it takes more memory than there is, and nothing has been done. It is at home for a while."""
        tensor = item.tensor
        value, gradient = cast(torch.Tensor, tensor.living), self._stm.gradient_access.own(tensor)
        version, before = value._version, None
        update = item.make(value, gradient)
        try:
            with self._accelerator.capped(self._stm.plans.budget):
                before = gradient.clone()
                update.run()
        except torch.OutOfMemoryError:
            self._accelerator.note_answered()
            if before is not None:
                gradient.copy_(before)
            self._homes.refuse(tensor)
            return False
        tensor.note_stepped(version)
        note(tensor, update)
        return True

    def _run_here(
        self,
        batch: list[tuple[ManagedTensor, ParameterUpdate]],
        note: Callable[[ManagedTensor, ParameterUpdate], None],
    ) -> None:
        """And leave it empty."""
        if not batch:
            return
        present, batch[:] = list(batch), []
        versions = [cast(torch.Tensor, tensor.living)._version for tensor, _ in present]
        run_together([update for _, update in present])
        for (tensor, update), version in zip(present, versions, strict=True):
            tensor.note_stepped(version)
            note(tensor, update)
