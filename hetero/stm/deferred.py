"""Updates of single parameters, done later by a thread of their own.

Owns the queue between `optimizer.step()` and the next use of each parameter. Invariant: updates run one after
another, each is finished before anybody who waits for it goes on, and an error in one is raised by the next
wait, whichever that is. It does not know what an update does (`hetero.stm.optimizers`), nor what it writes.

The thread never asks for a lock that a waiting thread may hold, nor touches the books of the manager.
"""

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

__all__ = ["Update", "UpdateQueue", "finish_everything"]


class Update:
    """One parameter's update. ``run`` is called once, on the queue's thread, and forgotten.

    Attributes:
        done: it has run, or failed; whatever was asked for afterwards has been started as well.
        arrival: of the upload that was asked for, once it has been started.
    """

    __slots__ = ("_run", "_upload", "_uploading", "arrival", "done")

    def __init__(self, run: Callable[[], None]) -> None:
        self._run: Callable[[], None] | None = run
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
            if not update.done and update is not self._current:
                self._waiting.remove(update)
                self._waiting.appendleft(update)
            self._changed.wait_for(lambda: update.done)

    def finish_all(self) -> None:
        """Return once nothing is queued or running. Raises nothing."""
        with self._changed:
            if threading.get_ident() != self._ident:  # as when Python's collector drops a model on our thread
                self._changed.wait_for(lambda: not self._waiting and self._current is None)

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
                update = self._current = self._waiting.popleft()
            self._run(update)
            with self._changed:
                self._current = None
                self._changed.notify_all()

    def _run(self, update: Update) -> None:
        run, update._run = update._run, None
        try:
            assert run is not None
            run()
        except BaseException as error:
            self._note_failure(error)
        del run  # it holds the gradient
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
