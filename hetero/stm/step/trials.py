"""One parameter's update, tried before ``optimizer.step()`` is called.

Owns what a trial writes and how it is taken back. Invariant: after `Trial.undo`, parameter, states and their version
counters are what they were before `Trial.perform`, and so is the gradient where an optimizer might write to it.

[Note: a trial that was right]
A trial uses the gradient as it came down. If the step turns out to clip, the factor is not exactly 1 and the trial was
wrong. If it is 1, or nobody clips, the update has read the same numbers as it would have after the step, because
multiplying by 1 changes none; settings, states and threads are compared as well.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from hetero.devices import CopyEngine
from hetero.stm.deferred import Attempt, UpdateQueue
from hetero.stm.gradients.changes import Change, Wish
from hetero.stm.step.jobs import Captured, Surroundings, make_job, wait
from hetero.stm.tensors.managed import ManagedTensor
from hetero.stm.updates.captured import ParameterUpdate
from hetero.stm.updates.optimizers import Entry, Group, may_write_to_gradients

__all__ = ["Snapshot", "Trial", "complete", "overwritten_by", "same_value"]


def overwritten_by(home: torch.Tensor, entry: Entry | None) -> list[torch.Tensor]:
    """What an update overwrites."""
    return [home, *(value for value in (entry or {}).values() if isinstance(value, torch.Tensor))]


class Snapshot:
    """Copies of a parameter and its states, in ``buffers`` of their shapes."""

    __slots__ = ("_before", "_buffers", "_entry", "_home", "_saved")

    def __init__(self, home: torch.Tensor, entry: Entry | None, buffers: Sequence[torch.Tensor]) -> None:
        self._home = home
        self._entry = entry
        self._buffers = buffers
        self._before: Entry = {}
        self._saved: list[tuple[torch.Tensor, torch.Tensor, int]] = []

    def take(self) -> None:
        """Copy everything."""
        self._before = dict(self._entry or {})
        tensors = overwritten_by(self._home, self._before)
        with torch.no_grad():
            for tensor, buffer in zip(tensors, self._buffers, strict=True):
                version = tensor._version
                buffer.copy_(tensor)
                self._saved.append((tensor, buffer, version))

    def restore(self) -> None:
        """Copy it back, under the versions of before."""
        with torch.no_grad():
            for tensor, buffer, version in self._saved:
                tensor.copy_(buffer)
                torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))
        if self._entry is not None:
            self._entry.clear()
            self._entry.update(self._before)


@dataclass(slots=True, kw_only=True)
class Trial:
    """Of one parameter's update.

    ``gradient``: an alias of what is to become ``p.grad``, at ``arrival``, whose version was ``version`` then.
    ``settings``: its group's, by `hetero.stm.updates.optimizers.hyper_parameters`. ``uploads``: copies that may be
    reading home.
    """

    engine: CopyEngine
    tensor: ManagedTensor
    update: ParameterUpdate
    entry: Entry | None
    settings: Group
    shell: torch.optim.Optimizer
    gradient: torch.Tensor
    version: int
    arrival: torch.Event
    uploads: Sequence[torch.Event]
    snapshot: Snapshot
    surroundings: Surroundings
    note: Callable[[int, float], None]
    note_copies: Callable[[int, float], None]
    changes: Sequence[Change] = ()
    has_written: bool = False
    has_failed: bool = False
    _gradient_before: torch.Tensor | None = None

    def can_begin(self) -> bool:
        """The gradient has arrived."""
        return self.arrival.query()

    def can_end(self) -> bool:
        """It is known what the changes come to that the step has captured."""
        return all(change.is_known() for change in self.changes if isinstance(change, Wish))

    def perform(self) -> None:
        """Keep what is there, then update. Raises nothing: the update is tried again when it is wanted."""
        try:
            self.surroundings.take_over()
            self.engine.host_after_download(self.arrival, self.gradient)
            self.engine.host_after_uploads(self.uploads, self.tensor.home)
            if may_write_to_gradients(self.shell, self.settings):
                self._gradient_before = self.gradient.clone()
            begin = time.perf_counter()
            self.snapshot.take()
            taken = time.perf_counter()
            self.note_copies(self.tensor.home.nbytes, taken - begin)
            self.has_written = True
            self.update.run()
            self.note(self.tensor.home.nbytes, time.perf_counter() - taken)
        except BaseException:
            self.has_failed = True

    def undo(self) -> None:
        """As if it had not been tried. Copies that read the result have been waited for."""
        if not self.has_written:
            return
        self.has_written = False
        self.engine.before_host_write(self.tensor.home)
        self.snapshot.restore()
        self.tensor.clock.note_write()  # copies made of the result do not pass for copies of what is there now
        if self._gradient_before is not None:
            self.gradient.copy_(self._gradient_before)

    def was_right(self) -> bool:
        """Written, and nothing changes the gradient. Waits until that is known."""
        if not self.has_written or self.has_failed:
            return False
        return all(
            isinstance(change, Wish) and change.changes_nothing(self.engine) for change in self.changes
        )


def complete(
    attempt: Attempt,
    trial: Trial,
    item: Captured,
    *,
    queue: UpdateQueue,
    surroundings: Surroundings,
    tell: Callable[[bool], None],
) -> Callable[[], None]:
    """What is left to be done of ``item`` once it is wanted. ``tell``: whether a trial that was made was right."""
    ordinary = make_job(trial.engine, item, surroundings, trial.note)

    def run() -> None:
        attempt.forget()
        if attempt.was_tried:
            right = trial.was_right()
            tell(right)
            if right:
                item.update.take_over(trial.update)
                return
            if attempt.arrival is not None:
                trial.engine.host_after_uploads([attempt.arrival], item.tensor.home)
            wait(trial.engine, item)
            trial.undo()
            queue.upload_again(attempt)
        ordinary()

    return run


def same_value(first: object, second: object) -> bool:
    """Of settings: the same number, by type and bits, or the same object."""
    if first is second:
        return True
    if type(first) is not type(second):
        return False
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return first.dtype == second.dtype and first.shape == second.shape and torch.equal(first, second)
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return len(first) == len(second) and all(map(same_value, first, second))
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(same_value(first[key], second[key]) for key in first)
    if isinstance(first, float) and isinstance(second, float):
        return first.hex() == second.hex()
    return isinstance(first, int | str | bool | complex) and first == second
