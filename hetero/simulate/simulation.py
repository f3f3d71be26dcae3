"""Running a program until its steps repeat: step time, stalls by cause, memory over time.

Owns the answer's meaning. The event loop is `hetero.simulate._event_kernel`'s. Deterministic; it decides nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from hetero.errors import PlanError
from hetero.jit import COMPILED
from hetero.simulate.program import SERVERS, Floats, Ints, Program, Server

__all__ = ["CAUSES", "Cause", "Timeline", "simulate_program"]

Cause = Literal["compute", "h2d", "d2h", "host", "memory"]
CAUSES: tuple[Cause, ...] = get_args(Cause)
_NO_LIMIT = 2**62
_TOLERANCE = 1e-12  # relative: the same sums in another order
_ROUNDS = 12  # a step settles in two or three; a link that lags behind may take longer


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Timeline:
    """The last iteration simulated, which took as long as the one before it.

    ``step_seconds``: from the end of the last iteration's compute to the end of this one's; never less than any
    server is busy in one iteration, because a backlog that grows is paid in the end. ``stall_seconds``: time that
    compute waited, by what it waited for; ``memory`` is an allocation that had to wait. ``starts``, ``ends``:
    of each task of the iteration, seconds since its compute began, shape (tasks,); of a transfer that was not over when
    compute was, as in the iteration before, one step later; -1 where there was none. ``peak_bytes``: the most in
    memory; ``over_bytes``: how far it had to pass the limit because no wait would have helped. ``events``: task starts
    and ends simulated.
    """

    step_seconds: float
    busy_seconds: Mapping[Server, float]
    stall_seconds: Mapping[Cause, float]
    starts: Floats
    ends: Floats
    peak_bytes: int
    over_bytes: int
    iterations: int
    events: int
    memory_seconds: Floats
    memory_bytes: Ints

    @property
    def bound_seconds(self) -> float:
        """No overlap, however perfect, makes these tasks faster than this."""
        return max(self.busy_seconds.values())


def simulate_program(
    program: Program, *, limit: int | None = None, iterations: int = _ROUNDS, memory: bool = False
) -> Timeline:
    """Run ``program`` with ``limit`` bytes of memory until its step time repeats, at most ``iterations`` times.

    ``memory=True`` fills ``memory_seconds`` and ``memory_bytes``: memory in use from each of these times on, over all
    the iterations. Raises `PlanError` if tasks wait for each other.
    """
    if iterations < 1:
        raise PlanError(f"iterations={iterations}: at least one must be simulated")
    count = len(program)
    out = _Out(count, iterations)
    done, over = _run(program, _NO_LIMIT if limit is None else limit, iterations, out)
    if done < 0:
        who = "" if over < 0 else f"; compute waits for {CAUSES[over]}"
        raise PlanError(f"the tasks wait for each other in a circle, or in the wrong order{who}")
    finished = [float(t) for t in out.finished[:done]]
    began = finished[-2] if done > 1 else 0.0
    busy = {name: float(program.seconds[program.server == k].sum()) for k, name in enumerate(SERVERS)}
    times, bytes_ = _memory(program, out, done) if memory else (np.zeros(0), np.zeros(0, dtype=np.int64))
    return Timeline(
        step_seconds=max(finished[-1] - began, *busy.values()) if done > 1 else finished[-1],
        busy_seconds=busy,
        stall_seconds={
            cause: float(out.stalls[(done - 1) * len(CAUSES) + k]) for k, cause in enumerate(CAUSES)
        },
        starts=_times(out.starts, finished, count),
        ends=_times(out.ends, finished, count),
        peak_bytes=int(out.peaks[done - 1]),
        over_bytes=int(over),
        iterations=done,
        events=2 * int((np.asarray(out.ends) >= 0).sum()),
        memory_seconds=times,
        memory_bytes=bytes_,
    )


class _Out:
    """What the event loop fills: arrays if it is compiled, lists (faster to index) if it is not."""

    def __init__(self, count: int, rounds: int) -> None:
        self.starts = _column(np.full(rounds * count, -1.0))
        self.ends = _column(np.full(rounds * count, -1.0))
        self.stalls = _column(np.zeros(rounds * len(CAUSES)))
        self.finished = _column(np.zeros(rounds))
        self.peaks = _column(np.zeros(rounds, dtype=np.int64))
        self.running = _column(np.full(len(SERVERS), -1, dtype=np.int64))
        self.position = _column(np.zeros(len(SERVERS), dtype=np.int64))
        self.head_cause = _column(np.full(len(SERVERS), -1, dtype=np.int64))


def _column(array: Any) -> Any:
    return array if COMPILED else array.tolist()


def _run(program: Program, limit: int, rounds: int, out: _Out) -> tuple[int, int]:
    # Imported late: it imports Numba, see hetero.jit.
    from hetero.simulate import _event_kernel

    out.peaks[0] = program.initial
    return _event_kernel.run(
        _column(program.server),
        _column(program.seconds),
        _column(program.allocates),
        _column(program.frees),
        _column(program.queue),
        _column(program.queue_start),
        _column(program.dep_start),
        _column(program.dep_task),
        _column(program.dep_lag),
        program.initial,
        limit,
        rounds,
        _TOLERANCE,
        out.starts,
        out.ends,
        out.stalls,
        out.finished,
        out.peaks,
        out.running,
        out.position,
        out.head_cause,
    )


def _times(column: Any, finished: list[float], count: int) -> Floats:
    """Of the last iteration's tasks, since its compute began."""
    done = len(finished)
    last = np.asarray(column[(done - 1) * count : done * count])
    began = finished[-2] if done > 1 else 0.0
    if done == 1:
        return np.where(last < 0, -1.0, last)
    before = np.asarray(column[(done - 2) * count : (done - 1) * count])
    later = finished[-1] - 2 * began  # one step, and counted from the beginning of this one
    return np.where(last >= 0, last - began, np.where(before < 0, -1.0, before + later))


def _memory(program: Program, out: _Out, done: int) -> tuple[Floats, Ints]:
    """Bytes in use after each change, frees before allocations at one time, from the first iteration on."""
    size = done * len(program)
    starts, ends = np.asarray(out.starts[:size]), np.asarray(out.ends[:size])
    begun, ended = starts >= 0, ends >= 0
    times = np.concatenate([ends[ended], starts[begun]])
    changes = np.concatenate([-np.tile(program.frees, done)[ended], np.tile(program.allocates, done)[begun]])
    order = np.argsort(times, kind="stable")
    moments, first = np.unique(times[order], return_index=True)
    after = np.concatenate([first[1:], [len(order)]]) - 1
    return moments, program.initial + np.cumsum(changes[order])[after]
