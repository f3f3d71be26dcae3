"""Yardsticks for activations that leave: every saved tensor does.

`save_on_cpu` is torch's: each saved tensor is copied to pinned memory, and back when it is read, while compute waits.
`SwapEverything` is what hides copies best without a plan: each storage goes out once, on a side stream, as soon as it
is saved, and comes back a few storages before it is read. Neither knows a budget: their peak is what it is.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from hetero.devices import Accelerator, CopyEngine, HostArena

__all__ = ["WAYS", "Around", "SwapEverything"]

Around = Callable[[], contextlib.AbstractContextManager[Any]]
"""Makes a context manager, within which a forward saves tensors."""

_AHEAD = 3
_LEAST = 1 << 14  # bytes; smaller ones stay


@dataclass(slots=True)
class _Entry:
    """One storage. ``readers``: saved tensors in it that backward has not read yet."""

    slot: Tensor
    weak: Any
    readers: int = 0
    copy: Tensor | None = None
    event: torch.Event | None = None


class SwapEverything:
    """Saved-tensor hooks; ``kept``: addresses of storages that stay, the weights'."""

    def __init__(self, device: torch.device, kept: set[int]) -> None:
        accelerator = Accelerator(device)
        self.engine = CopyEngine(accelerator)
        self.arena = HostArena(accelerator, pin=True)
        self.kept = kept
        self.slots: list[Tensor] = []
        self.entries: list[_Entry] = []
        self.places: dict[int, int] = {}
        self.leaving: deque[tuple[Tensor, torch.Event]] = deque()

    def pack(self, saved: Tensor) -> Any:
        storage = saved.untyped_storage()
        if storage.data_ptr() in self.kept or saved.device.type == "cpu" or storage.nbytes() < _LEAST:
            return saved
        place = self.places.get(storage._cdata)
        if place is None or self.entries[place].weak.expired():
            place = self.places[storage._cdata] = self._send(saved)
        self.entries[place].readers += 1
        return place, saved.dtype, saved.shape, saved.stride(), saved.storage_offset()

    def unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        while self.leaving:
            self._let_go()
        place, dtype, *layout = packed
        for ahead in range(place, max(-1, place - _AHEAD - 1), -1):
            entry = self.entries[ahead]
            if entry.copy is None and entry.readers:
                entry.copy = torch.empty(
                    entry.slot.shape, dtype=torch.uint8, device=self.engine.accelerator.device
                )
                entry.event = self.engine.upload(entry.slot, entry.copy)
        entry = self.entries[place]
        assert entry.copy is not None
        if entry.event is not None:
            self.engine.compute_after_upload(entry.event)
            entry.event = None
        found = torch.empty(0, dtype=dtype, device=entry.copy.device)
        found.set_(entry.copy.untyped_storage(), layout[2], layout[0], layout[1])
        entry.readers -= 1
        if not entry.readers:
            entry.copy = None
        return found

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        self.entries.clear()
        self.places.clear()
        with saved_tensors_hooks(self.pack, self.unpack):
            yield

    def _send(self, saved: Tensor) -> int:
        storage = saved.untyped_storage()
        place = len(self.entries)
        if place == len(self.slots):
            self.slots.append(self.arena.empty_strided((storage.nbytes(),), (1,), torch.uint8))
        source = torch.empty(0, dtype=torch.uint8, device=saved.device).set_(storage)
        self.leaving.append((source, self.engine.download(source, self.slots[place])))
        while self.leaving and (len(self.leaving) > _AHEAD or self.leaving[0][1].query()):
            self._let_go()
        self.entries.append(_Entry(self.slots[place], StorageWeakRef(storage)))
        return place

    def _let_go(self) -> None:
        memory, event = self.leaving.popleft()
        self.engine.free_after_download(event)
        del memory  # not before


def _swap(device: torch.device, model: nn.Module) -> Around:
    return SwapEverything(device, {p.untyped_storage().data_ptr() for p in model.parameters()}).around


WAYS: dict[str, Callable[[torch.device, nn.Module], Around]] = {
    "unmanaged": lambda device, model: contextlib.nullcontext,
    "save_on_cpu": lambda device, model: lambda: save_on_cpu(pin_memory=True, device_type=device.type),
    "swap_everything": _swap,
}
