"""What is simulated: tasks in the order of their servers, what each waits for, and what memory it takes.

Owns `Program`, the form in columns that the event loop reads, and `ProgramBuilder`, which makes one task by task.
Invariant: a program that exists refers to its own tasks only, has compute tasks, and holds no negative number.

[Note: tasks] A server runs its tasks one at a time, in order, the next as soon as the one before has ended, all
that it waits for has ended, and its memory is there. ``allocates`` bytes are taken when a task starts, ``frees``
bytes are given back when it ends. A dependency with lag 1 is on the task of the iteration before. Iterations
follow each other without a pause: a link may still be busy with the last one.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from hetero.errors import PlanError

__all__ = ["SERVERS", "Floats", "Ints", "Program", "ProgramBuilder", "Server", "assemble"]

Server = Literal["compute", "h2d", "d2h", "host"]
SERVERS: tuple[Server, ...] = get_args(Server)
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Program:
    """One iteration of a step in columns; shapes (tasks,) unless said.

    ``server`` is an index into `SERVERS`. ``queue`` holds the task ids of all servers, in each one's order;
    server k's are ``queue[queue_start[k]:queue_start[k + 1]]`` (shape (5,)). Task i waits for ``dep_task[j]`` of
    ``dep_lag[j]`` iterations before, j in ``dep_start[i]:dep_start[i + 1]`` (shape (tasks + 1,)).
    ``initial``: bytes in memory before the first iteration.

    Raises `PlanError` for what makes no sense.
    """

    server: Ints
    seconds: Floats
    allocates: Ints
    frees: Ints
    queue: Ints
    queue_start: Ints
    dep_start: Ints
    dep_task: Ints
    dep_lag: Ints
    initial: int = 0

    def __post_init__(self) -> None:
        count = len(self.server)
        if not len(self.seconds) == len(self.allocates) == len(self.frees) == len(self.queue) == count:
            raise PlanError(f"the columns of a program of {count} tasks differ in length")
        if self.queue_start[1] == self.queue_start[0]:
            raise PlanError("a program without compute tasks has no step to time")
        if not np.isfinite(self.seconds).all() or (self.seconds < 0).any():
            raise PlanError("a task takes negative or endless time")
        if min(self.allocates.min(), self.frees.min(), self.initial) < 0:
            raise PlanError("a task allocates or frees, or memory begins with, a negative number of bytes")
        if len(self.dep_task) and not 0 <= self.dep_task.min() <= self.dep_task.max() < count:
            raise PlanError(f"a task waits for one that is none of the {count}")
        if len(self.dep_lag) and not 0 <= self.dep_lag.min() <= self.dep_lag.max() <= 1:
            raise PlanError("a dependency's lag is 0 or 1 iterations")

    def __len__(self) -> int:
        return len(self.server)

    def order(self, server: Server) -> list[int]:
        """Task ids of ``server``, first to last."""
        k = SERVERS.index(server)
        return [int(i) for i in self.queue[self.queue_start[k] : self.queue_start[k + 1]]]


class ProgramBuilder:
    """Collects tasks; each server runs its own in the order of `add`."""

    def __init__(self, *, initial: int = 0) -> None:
        self._initial = initial
        self._tasks: list[tuple[int, float, int, int]] = []
        self._after: list[tuple[int, int, int]] = []

    def add(
        self,
        server: Server,
        seconds: float,
        *,
        after: Iterable[int] = (),
        after_previous: Iterable[int] = (),
        allocates: int = 0,
        frees: int = 0,
    ) -> int:
        """Add a task of ``seconds`` that waits for ``after``, and for ``after_previous`` of the iteration before;
        returns its id. It ``allocates`` bytes when it starts, and ``frees`` bytes when it ends. Raises `PlanError` for
        a server that is none of `SERVERS`."""
        if server not in SERVERS:
            raise PlanError(f"server {server!r} is not one of {', '.join(SERVERS)}")
        task = len(self._tasks)
        self._tasks.append((SERVERS.index(server), seconds, allocates, frees))
        for other in after:
            self.wait(task, other)
        for other in after_previous:
            self.wait(task, other, lag=1)
        return task

    def wait(self, task: int, other: int, *, lag: int = 0) -> None:
        """Let ``task`` wait for ``other``, which may be added later."""
        self._after.append((task, other, lag))

    def build(self) -> Program:
        """The program. Raises `PlanError` for what makes no sense."""
        if not self._tasks:
            raise PlanError("a program without compute tasks has no step to time")
        server, seconds, allocates, frees = zip(*self._tasks, strict=True)
        return assemble(
            np.array(server, dtype=np.int64),
            np.array(seconds, dtype=np.float64),
            np.array(allocates, dtype=np.int64),
            np.array(frees, dtype=np.int64),
            np.array(self._after, dtype=np.int64).reshape(-1, 3),
            initial=self._initial,
        )


def assemble(
    server: Ints,
    seconds: Floats,
    allocates: Ints,
    frees: Ints,
    after: Ints | Sequence[Sequence[int]],
    *,
    initial: int,
) -> Program:
    """A program from columns and rows ``(task, other, lag)`` of ``after``, in any order."""
    rows = np.asarray(after, dtype=np.int64).reshape(-1, 3)
    rows = rows[np.argsort(rows[:, 0], kind="stable")]
    return Program(
        server=server,
        seconds=seconds,
        allocates=allocates,
        frees=frees,
        queue=np.argsort(server, kind="stable").astype(np.int64),
        queue_start=np.searchsorted(np.sort(server), np.arange(len(SERVERS) + 1)).astype(np.int64),
        dep_start=np.searchsorted(rows[:, 0], np.arange(len(server) + 1)).astype(np.int64),
        dep_task=np.ascontiguousarray(rows[:, 1]),
        dep_lag=np.ascontiguousarray(rows[:, 2]),
        initial=initial,
    )
