"""What further micro-batches add to gradients at home.

Owns the memory in which it comes down, and the additions themselves. Invariant: each contribution is added exactly
once, after all that came before it, by autograd's own arithmetic, and before anybody reads ``p.grad``: by the queue's
thread, or by whoever comes first.

[Note: not by autograd]
Autograd would add on the thread that runs backward, which had to wait there for every copy; so it is told that there
is no gradient. Who counts the holders of ``p.grad`` must find autograd's alone: an addition holds its memory, and
reaches it through a tensor of a storage of its own.

[Note: the ring]
Contributions come down one behind the other into one piece of pinned memory, and its beginning again. Where they meet
one that has not been added yet, that is done first.
"""

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import torch

from hetero.autograd import outside_inference
from hetero.devices import CopyEngine, HostArena, has_no_gaps
from hetero.stm.tensors.precision import Upcast
from hetero.stm.tensors.state import Kind, Ledger, StatefulTensor, Tier

__all__ = ["Addition", "Additions", "can_be_added"]

_LOW = (torch.bfloat16, torch.float16)

# At least this much of the ring is worth having, if there are as many gradients.
_RING_BYTES = 256 << 20
# So many bytes of additions are worth waking the thread.
_BATCH_BYTES = 1 << 20


class Addition:
    """One contribution, in ``landing`` from ``arrival`` on, to ``target``. ``before``: what has to be done first."""

    __slots__ = ("_arrival", "_before", "_dtype", "_engine", "_landing", "_lock", "_memory", "_offset")

    def __init__(
        self,
        engine: CopyEngine,
        landing: torch.Tensor,
        arrival: torch.Event,
        target: torch.Tensor,
        before: Upcast | None,
    ) -> None:
        self._engine = engine
        self._landing: torch.Tensor | None = landing
        self._arrival = arrival
        self._memory: torch.UntypedStorage | None = target.untyped_storage()
        self._offset = int(target.storage_offset())
        self._dtype = target.dtype
        self._before = before
        self._lock = threading.Lock()

    @property
    def is_over(self) -> bool:
        """Done, or cancelled: ``landing`` is not needed any more."""
        return self._landing is None

    def make(self) -> None:
        """Add it, unless that has been done."""
        with self._lock:
            landing, memory = self._landing, self._memory
            if landing is None or memory is None:
                return
            if self._before is not None:
                self._before.apply(self._engine)
                self._before = None
            with outside_inference(), torch.no_grad():
                gradient = _alias(memory, self._offset, landing.numel(), self._dtype)
                self._engine.host_after_download(self._arrival, landing)
                self._engine.before_host_write(gradient)
                gradient.add_(landing)
            self._landing = self._memory = None

    def apply(self, engine: CopyEngine, gradient: torch.Tensor) -> None:
        """`make`. ``gradient``: the one to which it is to be added."""
        self.make()
        torch.autograd.graph.increment_version(gradient)  # as adding in place does

    def cancel(self) -> None:
        """Nobody will read the gradient. Its memory is not touched afterwards."""
        with self._lock:
            self._landing = self._memory = self._before = None


class Additions:
    """Of one manager's gradients.

    ``reserve``: that much pinned memory on the host, as a flat tensor of bytes, or None; ``sizes``: bytes of each
    gradient that there may be; ``run_later``: have it run by another thread, soon.
    """

    def __init__(
        self,
        engine: CopyEngine,
        ledger: Ledger,
        *,
        reserve: Callable[[int], torch.Tensor | None],
        sizes: Callable[[], Sequence[int]],
        run_later: Callable[[Callable[[], None]], None],
    ) -> None:
        self._engine = engine
        self._reserve = reserve
        self._sizes = sizes
        self._run_later = run_later
        self._ring: torch.Tensor | None = None
        # There was no memory for it when this backward asked; another may find some.
        self._is_refused = False
        self._entry = StatefulTensor(ledger, Kind.GRADIENT, "ring of gradients")
        # Since the first, as if the ring had no end: of the next contribution, and of those that may be left.
        self._next = 0
        self._in_ring: deque[tuple[int, Addition]] = deque()
        self._batch: list[Addition] = []
        self._batch_bytes = 0

    def begin(
        self, target: torch.Tensor, gradient: torch.Tensor, before: Upcast | None
    ) -> tuple[Addition, torch.Event] | None:
        """Start the copy of ``gradient``, and let it be added to ``target``, whose `can_be_added` is true. Keep
        ``gradient`` until the event. None if there is no memory where it could come down."""
        nbytes = HostArena.slab_bytes(gradient.nbytes)
        ring = self._ring_for(nbytes)
        if ring is None:
            return None
        start = self._free_place(nbytes, ring.numel())
        place = start % ring.numel()
        landing = ring[place : place + gradient.nbytes].view(gradient.dtype)
        event = self._engine.download(
            gradient, landing.as_strided(gradient.size(), gradient.stride(), landing.storage_offset())
        )
        addition = Addition(self._engine, landing, event, target, before)
        self._in_ring.append((start, addition))
        self._batch.append(addition)
        self._batch_bytes += gradient.nbytes
        if self._batch_bytes >= _BATCH_BYTES:
            self.flush()
        return addition, event

    def flush(self) -> None:
        """Let the thread begin with what has been started so far. A backward ends, or much has come together."""
        self._is_refused = False
        batch, self._batch, self._batch_bytes = self._batch, [], 0
        if batch:
            self._run_later(partial(_make_all, batch))

    def _ring_for(self, nbytes: int) -> torch.Tensor | None:
        """The ring, if so many bytes fit."""
        if self._ring is None and not self._is_refused:
            sizes = [HostArena.slab_bytes(size) for size in self._sizes()]
            wanted = min(sum(sizes), max(*sizes, _RING_BYTES))
            self._ring = self._reserve(wanted)
            self._is_refused = self._ring is None
            if self._ring is not None:
                self._entry.place(Tier.HOST, self._ring.nbytes)
        return None if self._ring is None or self._ring.numel() < nbytes else self._ring

    def _free_place(self, nbytes: int, length: int) -> int:
        """Where the next one comes down ([Note: the ring])."""
        start = self._next
        if start % length + nbytes > length:
            start += length - start % length
        while self._in_ring and (
            self._in_ring[0][1].is_over or start + nbytes - self._in_ring[0][0] > length
        ):
            self._in_ring.popleft()[1].make()
        self._next = start + nbytes
        return start


def can_be_added(gradient: torch.Tensor, target: torch.Tensor) -> bool:
    """Number by number in the order of memory, as autograd would have added it to ``target``, an ordinary tensor."""
    return (
        (gradient.dtype is target.dtype or (gradient.dtype in _LOW and target.dtype is torch.float32))
        and gradient.numel() > 0
        and (gradient.size(), gradient.stride()) == (target.size(), target.stride())
        and has_no_gaps(gradient)
        and not (target.is_conj() or target.is_neg())
    )


def _make_all(batch: Sequence[Addition]) -> None:
    for addition in batch:
        addition.make()


def _alias(memory: torch.UntypedStorage, offset: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """``count`` numbers of ``memory``, through a storage of its own."""
    buffer = (ctypes.c_char * (count * dtype.itemsize)).from_address(
        memory.data_ptr() + offset * dtype.itemsize
    )
    return torch.frombuffer(buffer, dtype=dtype)
