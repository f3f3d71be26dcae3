"""Updates of single parameters, done later by a thread of their own.

Owns the queue between `optimizer.step()` and the next use of each parameter. Invariant: updates run one after
another, each is finished before anybody who waits for it goes on, and an error in one is raised by the next
wait, whichever that is. It does not know what an update does (`hetero.stm.updates.captured`), nor what it writes.

The thread never asks for a lock that a waiting thread may hold, nor touches the books of the manager.

An `Attempt` may be *tried* before it is submitted, while nothing that could be run is waiting: what it writes can be
taken back until then (`hetero.stm.step.speculation`).
"""

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch

from hetero.stm.living import Living

__all__ = ["Attempt", "Batch", "Early", "TrialCounts", "Update", "UpdateQueue", "finish_everything"]

Run = Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Small updates that follow one another and have equal ``key`` are run by one call of ``run_all``, up to
    ``MOST_BYTES`` together, so that nobody waits long for the others of them."""

    key: object
    nbytes: int
    run_all: Callable[[Sequence[Any]], None]

    MOST_BYTES: ClassVar[int] = 1 << 20


class Update:
    """One parameter's update. ``run`` is called once, on the queue's thread, and forgotten.

    ``batch``: it may be run together with others.

    Attributes:
        done: it has run, or failed; whatever was asked for afterwards has been started as well.
        arrival: of the upload that was asked for, once it has been started.
    """

    __slots__ = ("_company", "_run", "_upload", "_uploading", "again", "arrival", "batch", "done")

    def __init__(self, run: Run, batch: Batch | None = None) -> None:
        self._run: Run | None = run
        self.batch = batch
        # Those that are run with it, behind it.
        self._company: list[Update] = []
        self._upload: Callable[[], torch.Event] | None = None
        self._uploading = False
        self.arrival: torch.Event | None = None
        # What uploaded the result of a trial, to be called once more if that was wrong.
        self.again: Callable[[], torch.Event] | None = None
        self.done = False

    # It may still be taken back: nobody but its parameter's manager may know of it.
    tentative = False

    def can_run(self) -> bool:
        """Running it now would not wait."""
        return True


class Early(Protocol):
    """What an `Attempt` does early."""

    def can_begin(self) -> bool:
        """Beginning now would not wait."""

    def can_end(self) -> bool:
        """What decides whether it was right is known."""

    def perform(self) -> None:
        """Once, on the queue's thread. Raises nothing."""


class Attempt(Update):
    """An update that may be tried before it is known to be wanted; of several, those of lower ``rank`` first.

    ``tentative`` until it is submitted, with `confirm`; ``is_claimed``: it is about to be.
    """

    __slots__ = ("is_claimed", "rank", "tentative", "trial", "was_tried")

    def __init__(self, trial: Early, rank: int) -> None:
        super().__init__(_nothing)
        self.trial = trial
        self.rank = rank
        self.tentative = True
        self.is_claimed = False
        self.was_tried = False

    def can_run(self) -> bool:
        """Beginning its trial would not wait, and what decides on it is known."""
        return self.trial.can_begin() and self.trial.can_end()

    def confirm(self, run: Run) -> None:
        """It is wanted: from now on it is an update like others, which ``run`` completes. Submitted next."""
        self._run = run
        self.tentative = False

    def forget(self) -> None:
        """The trial is settled, one way or the other: hold nothing of its."""
        del self.trial


@dataclass(slots=True)
class TrialCounts:
    """Updates that were begun in backward, and those of them that were taken back; what their snapshots take."""

    tried: int = 0
    taken_back: int = 0
    snapshot_bytes: int = 0


def _nothing() -> None:
    """Until it is confirmed."""


class UpdateQueue:
    """Runs updates in the order in which they came, except that one that is waited for goes first."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[Update] = deque()
        self._attempts: list[Attempt] = []
        self._current: Update | None = None
        self._errors: list[BaseException] = []
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hetero-step")
        self._ident = 0
        # An update has failed, and nobody has been told yet.
        self.has_failed = False
        _queues.add(self)

    def submit(self, updates: Sequence[Update]) -> None:
        """Queue ``updates`` behind what is there."""
        if not updates:
            return
        with self._changed:
            self._waiting.extend(updates)
        self._start()

    def try_early(self, attempt: Attempt) -> None:
        """Let the thread try ``attempt`` as long as nothing that could be run is waiting."""
        with self._changed:
            self._attempts.append(attempt)
        self._start()

    def retract(self, attempt: Attempt) -> None:
        """It is not being tried afterwards, nor will it be; what it uploads has been started."""
        with self._changed:
            if attempt in self._attempts:
                self._attempts.remove(attempt)
            attempt._upload = None
            self._changed.wait_for(lambda: self._current is not attempt)

    def upload_after(self, update: Update, upload: Callable[[], torch.Event]) -> bool:
        """Let the thread start ``upload`` as soon as ``update`` is done, or tried; False if it is done already. Of what
        was tried and waits for its turn it is started at once, but not before what was asked for earlier."""
        with self._changed:
            if update.done:
                return False
            if isinstance(update, Attempt) and update.was_tried and self._may_upload(update):
                update.arrival, update.again = upload(), upload
            else:
                update._upload = upload
            return True

    def _may_upload(self, attempt: Attempt) -> bool:
        """Nobody is about to say that its trial was wrong, nor would it overtake another."""
        if attempt.tentative:
            return True
        current = self._current
        if current is attempt or (current is not None and current._upload is not None):
            return False
        return all(one._upload is None for one in self._waiting)

    def upload_again(self, attempt: Attempt) -> None:
        """Its trial was wrong: what was uploaded is worthless. For the queue's thread, when ``attempt`` runs."""
        with self._changed:
            if attempt.arrival is not None:
                attempt.arrival, attempt._upload = None, attempt.again

    def withdraw(self, update: Update) -> bool:
        """Take back what `upload_after` asked for; False if it has been started already."""
        with self._changed:
            update._upload = update.again = None
            self._changed.wait_for(lambda: not update._uploading)
            update.again = None
            return update.arrival is None

    def finish(self, update: Update) -> None:
        """Return once ``update`` is done. Raises nothing: see `raise_error`."""
        with self._changed:
            if update in self._waiting:
                self._waiting.extendleft(reversed(self._take(self._waiting.index(update))))
            self._changed.wait_for(lambda: update.done)

    def finish_all(self) -> None:
        """Return once nothing is queued or running. Raises nothing."""
        with self._changed:
            self._attempts.clear()
            if not self.is_here():
                self._changed.wait_for(lambda: not self._waiting and self._current is None)

    def is_here(self) -> bool:
        """The caller runs on the queue's thread: an update is being made, and cannot be waited for."""
        return threading.get_ident() == self._ident

    def hold(self) -> None:
        """Keep the thread out until `release`: a child that is forked meanwhile finds the queue free."""
        self._changed.acquire()

    def release(self) -> None:
        """End of `hold`."""
        self._changed.release()

    def close(self) -> None:
        """End the thread; nothing may be queued any more."""
        self._worker.shutdown(wait=False)

    def raise_error(self) -> None:
        """Raise what failed since the last call, the first of it with the others as notes."""
        if not self.has_failed:
            return
        with self._changed:
            first, *others = self._errors
            self._errors = []
            self.has_failed = False
        for other in others:
            first.add_note(f"another parameter's update failed as well: {other!r}")
        raise first

    # -- the thread -----------------------------------------------------------------------------------

    def _start(self) -> None:
        try:
            self._worker.submit(self._work)
        except RuntimeError:  # the interpreter is going down, or there is no thread to be had
            self._work()

    def _work(self) -> None:
        self._ident = threading.get_ident()
        while True:
            with self._changed:
                attempt = self._take_attempt()
                update: Update
                if attempt is not None:
                    update = attempt
                elif self._waiting:
                    update, *update._company = self._take(0)
                else:
                    return
                self._current = update
            if attempt is not None:
                self._try(attempt)
            else:
                self._run(update)
            with self._changed:
                self._current = None
                self._changed.notify_all()

    def _take_attempt(self) -> Attempt | None:
        """What is to be tried now; None: what waits goes first, or nothing is left."""
        attempts = self._attempts
        if not attempts or (self._waiting and self._waiting[0].can_run()):
            return None
        ready = [attempt for attempt in attempts if attempt.trial.can_begin()]
        if not ready:
            if self._waiting:
                return None
            ready = attempts[:1]  # gradients come in this order
        best = min(ready, key=lambda attempt: attempt.rank)
        attempts.remove(best)
        return best

    def _try(self, attempt: Attempt) -> None:
        attempt.trial.perform()
        while True:
            with self._changed:
                upload, attempt._upload = attempt._upload, None
                if upload is None:
                    attempt.was_tried = True
                    return
                attempt.again, attempt._uploading = upload, True
            arrival = None
            try:
                arrival = upload()
            except BaseException as error:
                self._note_failure(error)
            with self._changed:
                attempt.arrival, attempt._uploading = arrival, False
                self._changed.notify_all()

    def _take(self, place: int) -> list[Update]:
        """Take the update at ``place`` out of the queue, and what is run together with it."""
        taken = [self._waiting[place]]
        del self._waiting[place]
        self._attempts = [one for one in self._attempts if one is not taken[0]]  # too late to be tried
        batch = taken[0].batch
        nbytes = 0 if batch is None else batch.nbytes
        while batch is not None and place < len(self._waiting):
            other = self._waiting[place].batch
            if other is None or other.key != batch.key or nbytes + other.nbytes > Batch.MOST_BYTES:
                break
            nbytes += other.nbytes
            taken.append(self._waiting[place])
            del self._waiting[place]
        return taken

    def _run(self, update: Update) -> None:
        together = [update, *update._company]
        update._company = []
        runs = [one._run for one in together if one._run is not None]
        for one in together:
            one._run = None
        try:
            if len(runs) == 1:
                runs[0]()
            else:
                assert update.batch is not None
                update.batch.run_all(runs)
        except BaseException as error:
            self._note_failure(error)
        del runs  # they hold the gradients
        with self._changed:
            for one in together:
                one.done = one._upload is None
                one.again = None
            self._changed.notify_all()
        for one in together:
            if not one.done:
                self._finish_one(one)

    def _finish_one(self, update: Update) -> None:
        """Start what was asked for afterwards."""
        while True:
            with self._changed:
                upload, update._upload = update._upload, None
                update._uploading = upload is not None
                if upload is None:
                    update.done = True
                    self._changed.notify_all()
                    return
            try:
                update.arrival = upload()
            except BaseException as error:
                self._note_failure(error)
            del upload

    def _note_failure(self, error: BaseException) -> None:
        with self._changed:
            self._errors.append(error)
            self.has_failed = True


# A forked child has no such thread: what is queued at the fork would never be done there.
_queues = Living[UpdateQueue]()


def finish_everything() -> None:
    """As `UpdateQueue.finish_all`, for every queue of the process."""
    for queue in _queues:
        queue.finish_all()


os.register_at_fork(before=finish_everything)
