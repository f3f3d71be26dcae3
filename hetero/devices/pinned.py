"""Host memory that a device can copy to and from without blocking: a few large slabs, cut up by us.

Owns page-locked memory. Its invariant: memory lives as long as any tensor cut from it, whoever holds that
tensor, because each tensor's storage holds a reference to the slab it was cut from.

[Note: slabs]
torch's own pinned allocator rounds every block up to a power of two (20.4 GiB becomes 32), and pinning many
small blocks takes minutes. A slab is one anonymous ``mmap`` of the exact size, page-locked once
(``cudaHostRegister``). It is a shared mapping (Python's default): with a private one, a forked data loader would
make the next write go to another physical page than the one the device reads. ``torch.frombuffer`` gives each
tensor its own storage over its part of the slab, so a checkpoint of one parameter does not write its
neighbours, and version counters are not shared.
"""

import contextlib
import mmap
import os
import sys
import warnings
import weakref
from collections.abc import Callable

import torch

from hetero.devices.accelerator import Accelerator
from hetero.devices.storage import extent_of
from hetero.units import round_up

__all__ = ["HostArena"]

_ALIGNMENT = 512  # so that no two tensors share a cache line or a DMA granule
_SLAB_BYTES = 1 << 30  # one registration; larger ones fail as a whole where locked memory is short


class Slab(mmap.mmap):
    """One anonymous mapping, page-locked after `pin`. Unlocks itself when the last tensor cut from it is gone."""

    # mmap has no useful __init__: construct with ``Slab(-1, nbytes)``, then `pin`.
    _unpin: Callable[[], None] | None = None
    when_gone: Callable[[int], None] | None = None

    def pin(self, accelerator: Accelerator) -> bool:
        """Page-lock for ``accelerator``; False if the system refuses (WSL2, containers)."""
        address = torch.frombuffer(self, dtype=torch.uint8).data_ptr()
        unpin = _register(accelerator, address, len(self))
        if unpin is None:
            return False
        self._unpin = unpin
        return True

    def __del__(self) -> None:
        # Not by a weak reference: mmap unmaps first and calls those afterwards, when a copy may still be reading the
        # memory, and the next mapping may already have its address. At exit the device may be gone: it is the system's.
        if sys.is_finalizing():
            return
        if self._unpin is not None:
            self._unpin()
        if self.when_gone is not None:
            self.when_gone(len(self))


class HostArena:
    """Cuts host tensors, pinned where possible, out of slabs.

    Parameters: ``accelerator`` to pin for; ``pin`` False gives ordinary memory of the same layout.
    """

    def __init__(self, accelerator: Accelerator, *, pin: bool) -> None:
        self._accelerator = accelerator
        self._pin = pin
        self._slab: Slab | None = None
        self._offset = 0
        self._expected_nbytes = 0
        self._requested_nbytes = 0
        # Of the slabs that there are.
        self.nbytes = 0

    def expect(self, nbytes: int) -> None:
        """Tensors of ``nbytes`` in total follow: make slabs that large, and no larger."""
        self._expected_nbytes += nbytes

    @staticmethod
    def slab_bytes(nbytes: int) -> int:
        """What a tensor of ``nbytes`` takes in a slab."""
        return round_up(nbytes, _ALIGNMENT)

    def lost_bytes(self, nbytes: int) -> int:
        """What slabs will have beyond the tensors cut from them once one of ``nbytes`` more is."""
        return self.nbytes + self._growth(nbytes) - self._requested_nbytes - nbytes

    def note_tensors_gone(self, nbytes: int) -> None:
        """Tensors of ``nbytes`` are no more. A slab goes with the last one cut from it, unless more may be."""
        self._requested_nbytes -= nbytes

    def empty_strided(
        self, size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        """An uninitialised host tensor of its own storage, and no inference tensor whatever the mode. Layout as
        `torch.empty_strided`."""
        extent = extent_of(size, stride)
        nbytes = extent * dtype.itemsize
        with torch.inference_mode(False):
            if nbytes == 0:
                return torch.empty_strided(size, stride, dtype=dtype, device="cpu")
            slab, offset = self._cut(nbytes)
            flat = torch.frombuffer(slab, dtype=dtype, count=extent, offset=offset)
            # set_ instead of as_strided: the result is no view, so nothing ties it to `flat`.
            return torch.empty(0, dtype=dtype, device="cpu").set_(flat.untyped_storage(), 0, size, stride)

    def _cut(self, nbytes: int) -> tuple[Slab, int]:
        growth = self._growth(nbytes)
        if growth or self._slab is None:
            self._slab = self._new_slab(growth)
            self._offset = 0
        slab, offset = self._slab, self._offset
        self._offset += self.slab_bytes(nbytes)
        self._expected_nbytes = max(0, self._expected_nbytes - self.slab_bytes(nbytes))
        self._requested_nbytes += nbytes
        return slab, offset

    def _growth(self, nbytes: int) -> int:
        """Of the slab that a tensor of ``nbytes`` would make necessary; 0 if the last one has room."""
        if self._slab is not None and self._offset + nbytes <= len(self._slab):
            return 0
        wanted = max(nbytes, min(self._expected_nbytes, _SLAB_BYTES))
        return round_up(wanted, mmap.PAGESIZE)

    def _new_slab(self, nbytes: int) -> Slab:
        slab = Slab(-1, nbytes)
        note_gone = weakref.WeakMethod(self._note_slab_gone)  # who drops the arena drops its slabs at once
        slab.when_gone = lambda nbytes: None if (call := note_gone()) is None else call(nbytes)
        self.nbytes += nbytes
        if self._pin and not slab.pin(self._accelerator):
            self._pin = False
            warnings.warn(
                f"pinning {nbytes} bytes of host memory was refused: copies will block and run slower. Raise the "
                "locked-memory limit (ulimit -l, or the container's), or pass pin_memory=False to silence this",
                RuntimeWarning,
                stacklevel=2,
            )
        return slab

    def _note_slab_gone(self, nbytes: int) -> None:
        self.nbytes -= nbytes


def _register(accelerator: Accelerator, address: int, nbytes: int) -> Callable[[], None] | None:
    """Page-lock ``[address, address + nbytes)``; the function that undoes it, or None if refused."""
    if accelerator.device.type == "virtual":
        from hetero.devices import virtual

        virtual.host_register(address, nbytes)
    elif accelerator.device.type == "cuda":  # ROCm answers to the same names
        # Else another device, if it is current, is given a context for it.
        with torch.cuda.device(accelerator.device):
            if int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0)) != 0:
                _forget_cuda_error(accelerator.device)
                return None
    else:
        return None

    process = os.getpid()

    def undo() -> None:
        if os.getpid() != process:
            return  # a forked child has the memory, not the device
        accelerator.synchronize()  # a copy nobody waited for may still be reading this memory
        _unregister(accelerator.device, address)

    return undo


def _unregister(device: torch.device, address: int) -> None:
    if device.type == "virtual":
        from hetero.devices import virtual

        virtual.host_unregister(address)
    else:
        with torch.cuda.device(device):
            torch.cuda.cudart().cudaHostUnregister(address)


def _forget_cuda_error(device: torch.device) -> None:
    """A refused registration leaves its error behind, which the next kernel launch would report as its own."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=device)
