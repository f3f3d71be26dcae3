"""Reading a CUDA memory snapshot, as `torch.cuda.memory._snapshot` gives and `_dump_snapshot` pickles it.

Owns the translation of allocator events into storages: every allocation is one operator (``alloc`` with the
innermost user frame as its module), so lives keep the order of events exactly. Blocks that were there before
the recording began live from 0. Invariant: the pickle is read without running anything in it; a snapshot
holds plain values only.

The format (docs.pytorch.org, "Understanding CUDA Memory Usage"): ``segments`` lists what the allocator holds,
with ``blocks`` of ``size``, ``requested_size`` and ``state``; ``device_traces`` lists, per device, the events
``alloc``, ``free_requested``, ``free_completed``, ``segment_alloc``, ``segment_free``, ``snapshot``, ``oom``.
"""

import io
import os
import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hetero.errors import PlanError
from hetero.trace.steptrace import Operator, StepTrace, Storage

__all__ = ["from_snapshot", "read_snapshot"]

_NO_FRAME = "unknown"


def read_snapshot(path: str | os.PathLike[str], *, device: int | None = None) -> StepTrace:
    """The trace of one device in a snapshot pickle (default: the device with most events).

    Raises `PlanError` if the pickle is cut short, holds anything but plain values, or was taken without
    recording (``torch.cuda.memory._record_memory_history()``), `OSError` if it cannot be read.
    """
    raw = Path(path).read_bytes()
    try:
        snapshot = _PlainUnpickler(io.BytesIO(raw)).load()
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from error
    except Exception as error:  # a cut pickle raises nearly anything: EOFError, KeyError, UnpicklingError ...
        raise PlanError(
            f"{path} is not a whole pickle, it may have been cut short: {type(error).__name__}: {error}"
        ) from error
    return from_snapshot(snapshot, device=device, name=str(path))


def from_snapshot(snapshot: Any, *, device: int | None = None, name: str = "the snapshot") -> StepTrace:
    """The trace of one device in what `torch.cuda.memory._snapshot` returned; errors as in
    `read_snapshot`."""
    try:
        traces = snapshot["device_traces"]
        if device is None:
            device = max(range(len(traces)), key=lambda i: len(traces[i]), default=0)
        events = traces[device] if 0 <= device < len(traces) else []
        replay = _Replay(device=f"cuda:{device}")
        for event in events:
            replay.take(event)
        replay.finish(snapshot.get("segments", []), device)
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise PlanError(f"{name} is not a CUDA memory snapshot: {type(error).__name__}: {error}") from error
    if not replay.operators:
        raise PlanError(
            f"{name} has no allocation on device {device}: call torch.cuda.memory._record_memory_history() "
            "before the step, and take the snapshot after it"
        )
    return replay.trace()


@dataclass(slots=True)
class _Block:
    begin: int
    nbytes: int
    name: str
    end: int | None = None


@dataclass(slots=True, kw_only=True)
class _Replay:
    """The allocator's events taken one by one; ``operators`` counts allocations, which are the time."""

    device: str
    operators: list[str] = field(default_factory=list)
    blocks: list[_Block] = field(default_factory=list)
    live: dict[int, _Block] = field(default_factory=dict)

    def take(self, event: Any) -> None:
        action, address, nbytes = event["action"], int(event.get("addr", 0)), int(event.get("size", 0))
        if action == "alloc":
            where = _frame(event.get("frames", ()))
            if address in self.live:  # its free fell out of the recording's ring buffer
                self.live[address].end = len(self.operators)
            self.live[address] = self._add(_Block(len(self.operators), nbytes, where))
            self.operators.append(where)
        elif action == "free_completed":
            block = self.live.pop(address, None)
            if block is None:  # older than the recording
                block = self._add(_Block(0, nbytes, f"before: {_frame(event.get('frames', ()))}"))
            block.end = len(self.operators)

    def finish(self, segments: Any, device: int) -> None:
        """Add the blocks that were there before the recording and still are."""
        for segment in segments:
            if int(segment.get("device", device)) != device:
                continue
            address = int(segment["address"])
            for block in segment["blocks"]:
                at = int(block.get("address", address))
                address = at + int(block["size"])
                if str(block["state"]).startswith("active") and at not in self.live:
                    nbytes = int(block.get("requested_size", block["size"]))
                    self._add(_Block(0, nbytes, f"before: {_frame(block.get('frames', ()))}"))

    def trace(self) -> StepTrace:
        span = len(self.operators)
        storages: list[Storage] = []
        written: list[list[int]] = [[] for _ in self.operators]
        for block in sorted(self.blocks, key=lambda b: b.begin):
            end = span if block.end is None else block.end
            if end <= block.begin:
                continue  # there before, and gone before the first allocation
            before = block.name.startswith("before: ")
            if not before:
                written[block.begin].append(len(storages))
            storages.append(
                Storage(
                    id=len(storages),
                    begin=block.begin,
                    end=end,
                    nbytes=block.nbytes,
                    kind="input" if before else "temporary",
                    name=block.name,
                    device=self.device,
                )
            )
        return StepTrace(
            operators=tuple(
                Operator(name="alloc", phase="forward", module=where, reads=(), writes=tuple(writes))
                for where, writes in zip(self.operators, written, strict=True)
            ),
            storages=tuple(storages),
            span=span,
            device=self.device,
            source="snapshot",
        )

    def _add(self, block: _Block) -> _Block:
        self.blocks.append(block)
        return block


class _PlainUnpickler(pickle.Unpickler):
    """Unpickles containers, numbers and text, and nothing that names a class or function."""

    def find_class(self, module: str, name: str) -> Any:
        raise PlanError(
            f"it names {module}.{name}, but a CUDA memory snapshot holds plain values only: not read"
        )


def _frame(frames: Any) -> str:
    """The innermost Python frame that is not torch's own, as ``file:line function``."""
    python = [f for f in frames if str(f.get("filename", "")).endswith(".py")]
    own = [f for f in python if "/torch/" not in str(f["filename"])]
    for frame in own or python:
        return f"{Path(str(frame['filename'])).name}:{frame.get('line', 0)} {frame.get('name', '')}"
    return _NO_FRAME
