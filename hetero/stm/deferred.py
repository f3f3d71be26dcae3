"""Updates of single parameters, done later by a thread of their own.

Owns the queue between `optimizer.step()` and the next use of each parameter. Invariant: updates run one after
another, each is finished before anybody who waits for it goes on, and an error in one is raised by the next
wait, whichever that is. It does not know what an update does (`hetero.stm.updates`), nor what it writes.

The thread never asks for a lock that a waiting thread may hold, nor touches the books of the manager.
"""

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

__all__ = ["Kin", "Update", "UpdateQueue", "finish_everything"]

Run = Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kin:
    """Small updates that follow one another and have equal ``key`` are run by one call of ``run_all``, up to
    ``MOST_BYTES`` together, so that nobody waits long for the others of them."""

    key: object
    nbytes: int
    run_all: Callable[[Sequence[Any]], None]

    MOST_BYTES: ClassVar[int] = 1 << 20


class Update:
    """One parameter's update. ``run`` is called once, on the queue's thread, and forgotten.

    ``kin``: it may be run together with others.

    Attributes:
        done: it has run, or failed; whatever was asked for afterwards has been started as well.
        arrival: of the upload that was asked for, once it has been started.
    """

    __slots__ = ("_company", "_run", "_upload", "_uploading", "arrival", "done", "kin")

    def __init__(self, run: Run, kin: Kin | None = None) -> None:
        self._run: Run | None = run
        self.kin = kin
        # Those that are run with it, behind it.
        self._company: list[Update] = []
        self._upload: Callable[[], torch.Event] | None = None
        self._uploading = False
        self.arrival: torch.Event | None = None
        self.done = False


class UpdateQueue:
    """Runs updates in the order in which they came, except that one that is waited for goes first."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[Update] = deque()
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
        try:
            self._worker.submit(self._work)
        except RuntimeError:  # the interpreter is going down, or there is no thread to be had
            self._work()

    def upload_after(self, update: Update, upload: Callable[[], torch.Event]) -> bool:
        """Let the thread start ``upload`` as soon as ``update`` is done; False if it is done already."""
        with self._changed:
            if update.done:
                return False
            update._upload = upload
            return True

    def withdraw(self, update: Update) -> bool:
        """Take back what `upload_after` asked for; False if it has been started already."""
        with self._changed:
            update._upload = None
            self._changed.wait_for(lambda: not update._uploading)
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
            if threading.get_ident() != self._ident:  # as when Python's collector drops a model on our thread
                self._changed.wait_for(lambda: not self._waiting and self._current is None)

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

    def _work(self) -> None:
        self._ident = threading.get_ident()
        while True:
            with self._changed:
                if not self._waiting:
                    return
                update, *update._company = self._take(0)
                self._current = update
            self._run(update)
            with self._changed:
                self._current = None
                self._changed.notify_all()

    def _take(self, place: int) -> list[Update]:
        """Take the update at ``place`` out of the queue, and what is run together with it."""
        taken = [self._waiting[place]]
        del self._waiting[place]
        kin = taken[0].kin
        nbytes = 0 if kin is None else kin.nbytes
        while kin is not None and place < len(self._waiting):
            other = self._waiting[place].kin
            if other is None or other.key != kin.key or nbytes + other.nbytes > Kin.MOST_BYTES:
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
                assert update.kin is not None
                update.kin.run_all(runs)
        except BaseException as error:
            self._note_failure(error)
        del runs  # they hold the gradients
        with self._changed:
            for one in together:
                one.done = one._upload is None
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
_queues: "weakref.WeakSet[UpdateQueue]" = weakref.WeakSet()


def finish_everything() -> None:
    """As `UpdateQueue.finish_all`, for every queue of the process."""
    for queue in list(_queues):
        queue.finish_all()


os.register_at_fork(before=finish_everything)
