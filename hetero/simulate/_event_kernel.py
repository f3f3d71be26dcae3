"""The event loop, on plain arrays: compiled where Numba is installed, the same code in Python where it is not.

Owns nothing but the rules in `hetero.simulate.program`. Deterministic: among tasks that could start at one time, the
compute server's takes its memory first, then h2d, d2h and host.

[Note: stuck] If nothing runs and the next tasks only lack memory, no wait can help. Then the first of them starts
nevertheless, and the bytes above the limit are reported.
"""

from typing import Any

from hetero.jit import jit

__all__ = ["COMPUTE", "MEMORY", "run"]

COMPUTE = 0
MEMORY = 4
_IDLE = -1


@jit
def run(
    server: Any,
    seconds: Any,
    allocates: Any,
    frees: Any,
    queue: Any,
    queue_start: Any,
    dep_start: Any,
    dep_task: Any,
    dep_lag: Any,
    initial: int,
    limit: int,
    rounds: int,
    tolerance: float,
    starts: Any,
    ends: Any,
    stalls: Any,
    finished: Any,
    peaks: Any,
    running: Any,
    position: Any,
    head_cause: Any,
) -> tuple[int, int]:
    """Fills starts, ends (rounds x tasks, -1 where not reached), stalls (rounds x 5), finished, peaks (rounds).

    Returns the number of iterations whose compute tasks have ended, and the most bytes by which memory
    passed the limit; (-1, server) if the tasks wait for each other. Stops when an iteration takes as long as
    the one before.
    """
    count = len(server)
    now = 0.0
    used = initial
    over = 0
    done = 0
    while True:
        for k in range(4):
            if running[k] != _IDLE:
                continue
            length = queue_start[k + 1] - queue_start[k]
            if length == 0 or position[k] >= rounds * length:
                continue
            turn = position[k] // length
            task = queue[queue_start[k] + position[k] % length]
            cause = -1
            for j in range(dep_start[task], dep_start[task + 1]):
                earlier = turn - dep_lag[j]
                if earlier >= 0 and ends[earlier * count + dep_task[j]] < 0.0:
                    cause = server[dep_task[j]]
                    break
            if cause < 0 and allocates[task] > 0 and used + allocates[task] > limit:
                cause = MEMORY
            head_cause[k] = cause
            if cause < 0:
                used += allocates[task]
                if used > peaks[done]:
                    peaks[done] = used
                starts[turn * count + task] = now
                running[k] = turn * count + task
        coming = -1.0
        for k in range(4):
            if running[k] != _IDLE:
                end = starts[running[k]] + seconds[running[k] % count]
                if coming < 0.0 or end < coming:
                    coming = end
        if coming < 0.0:  # [Note: stuck]
            stuck = -1
            for k in range(4):
                length = queue_start[k + 1] - queue_start[k]
                if length > 0 and position[k] < rounds * length and head_cause[k] == MEMORY:
                    stuck = k
                    break
            if stuck < 0:
                return -1, head_cause[COMPUTE]
            length = queue_start[stuck + 1] - queue_start[stuck]
            turn = position[stuck] // length
            task = queue[queue_start[stuck] + position[stuck] % length]
            used += allocates[task]
            over = max(over, used - limit)
            if used > peaks[done]:
                peaks[done] = used
            starts[turn * count + task] = now
            running[stuck] = turn * count + task
            continue
        if running[COMPUTE] == _IDLE:
            stalls[done * 5 + head_cause[COMPUTE]] += coming - now
        now = coming
        for k in range(4):
            if running[k] != _IDLE and starts[running[k]] + seconds[running[k] % count] <= now:
                ends[running[k]] = now
                used -= frees[running[k] % count]
                running[k] = _IDLE
                position[k] += 1
        length = queue_start[1] - queue_start[0]
        if running[COMPUTE] == _IDLE and position[COMPUTE] == (done + 1) * length:
            finished[done] = now
            done += 1
            if done == rounds:
                return done, over
            peaks[done] = used
            if done >= 3:
                last = finished[done - 1] - finished[done - 2]
                before = finished[done - 2] - finished[done - 3]
                if abs(last - before) <= tolerance * last:
                    return done, over
