"""When the chosen gaps' transfers happen (section IV-E), and the step as a program to be simulated.

Owns the rules. Outs start in the order of their uses, each when its use has ended and the out before it. Ins come in
the order of their next uses: planned backwards, as late as is in time, but not before the planned load has
room for them until they are used. Allocations and ins wait while late outs still hold the memory: that is the
simulation's part, as long as the planned load is within the limit it cannot get stuck.
"""

from collections.abc import Sequence

import numpy as np

from hetero.simulate import Machine, Program
from hetero.simulate.program import assemble
from hetero.swap.model import Floats, Gap, Ints, Step, Swap
from hetero.swap.selection import load_without

__all__ = ["Lowering", "lower", "schedule"]


def schedule(
    step: Step, gaps: Sequence[Gap], machine: Machine, limit: int, *, eager: bool = False
) -> tuple[Swap, ...]:
    """The swaps of ``gaps``, in the order of their next uses within an iteration.

    ``eager``: ins start as early as the planned load has room, instead of as late as is in time. The planned load of
    ``gaps`` must be within ``limit``.
    """
    span = step.span
    ordered = sorted(gaps, key=lambda gap: (gap.before % span, gap.after, gap.variable))
    load = load_without(step, ordered)
    return tuple(
        Swap(gap=gap, release=_with_room(load, gap, wanted, limit))
        for gap, wanted in zip(ordered, _wanted(step, ordered, machine, eager=eager), strict=True)
    )


def lower(step: Step, swaps: Sequence[Swap], machine: Machine) -> Program:
    """The program of ``step`` with ``swaps``; its first ``span`` tasks are the operators.

    Then come the outs, in the order of ``swaps``, then the ins.
    """
    return Lowering(step, machine).program(swaps)


class Lowering:
    """Makes programs of one step; what does not depend on the swaps is computed once."""

    def __init__(self, step: Step, machine: Machine) -> None:
        self.step, self.machine = step, machine
        span, load = step.span, step.load
        allocates = np.zeros(span, dtype=np.int64)
        frees = np.zeros(span, dtype=np.int64)
        for v in step.variables:
            if v.begin > 0:
                allocates[v.begin] += v.nbytes
            if v.end < span:
                frees[v.end - 1] += v.nbytes
        # What both ends of the iteration hold goes on; what only one of them holds comes and goes there.
        self.carried = int(min(load[0], load[-1]))
        allocates[0] += load[0] - self.carried
        frees[-1] += load[-1] - self.carried
        self.allocates, self.frees = allocates, frees
        self.seconds = np.array(step.seconds)

    def program(self, swaps: Sequence[Swap]) -> Program:
        """One iteration with ``swaps``: tasks as `lower` numbers them."""
        span, n = self.step.span, len(swaps)
        nbytes = np.array([swap.gap.nbytes for swap in swaps], dtype=np.int64)
        after = np.array([swap.gap.after for swap in swaps], dtype=np.int64)
        before = np.array([swap.gap.before for swap in swaps], dtype=np.int64)
        release = np.array([swap.release for swap in swaps], dtype=np.int64)
        out, back = self.machine.d2h, self.machine.h2d
        outs = np.argsort(after, kind="stable")  # tasks of a server run in the order of their ids
        out_task = np.empty(n, dtype=np.int64)
        out_task[outs] = span + np.arange(n)
        in_task = span + n + np.arange(n)
        wraps = (before >= span).astype(np.int64)
        # An in belongs to the iteration of its use; what it waits for may lie in the one before.
        trigger = release - 1
        lag = wraps - (trigger >= span)
        zero = np.zeros(n, dtype=np.int64)
        rows = np.concatenate(
            [
                np.stack([out_task, after, zero], axis=1),
                np.stack([in_task, out_task, wraps], axis=1),
                np.stack([in_task, trigger % span, lag], axis=1),
                np.stack([before % span, in_task, zero], axis=1),
            ]
        )
        return assemble(
            np.concatenate([np.zeros(span, dtype=np.int64), zero + 2, zero + 1]),
            np.concatenate(
                [
                    self.seconds,
                    out.latency + nbytes[outs] * out.seconds_per_byte,
                    back.latency + nbytes * back.seconds_per_byte,
                ]
            ),
            np.concatenate([self.allocates, zero, nbytes]),
            np.concatenate([self.frees, nbytes[outs], zero]),
            rows,
            initial=self.carried - int(nbytes[wraps > 0].sum()),
        )


def _wanted(step: Step, gaps: Sequence[Gap], machine: Machine, *, eager: bool) -> list[int]:
    """The operator before which each in should start, unrolled as ``gap.before`` is."""
    if eager:
        return [gap.after + 1 for gap in gaps]
    starts: Floats = np.zeros(len(gaps))
    following = np.inf
    for turn in range(2):
        for index in range(len(gaps) - 1, -1, -1):
            gap = gaps[index]
            deadline = min(step.begin_of(gap.before % step.span), following)
            following = starts[index] = deadline - machine.h2d.seconds(gap.nbytes)
        if turn == 0:
            # The next iteration's first ins may have to start in this one, behind its last.
            following = following + step.total_seconds
    wanted = []
    for gap, start in zip(gaps, starts.tolist(), strict=True):
        turn, rest = divmod(start, step.total_seconds) if step.total_seconds > 0 else (0, 0.0)
        operator = int(np.searchsorted(step.starts[:-1], rest, side="right")) - 1 + int(turn) * step.span
        operator += gap.before - gap.before % step.span
        wanted.append(min(max(operator, gap.after + 1), gap.before))
    return wanted


def _with_room(load: Ints, gap: Gap, wanted: int, limit: int) -> int:
    """The first release from ``wanted`` on such that the in fits in every period until its use; takes it."""
    span = len(load)
    release = wanted
    for low, high in ((max(wanted, span), gap.before), (wanted, min(gap.before, span))):
        if low >= high:
            continue
        full = np.flatnonzero(load[low % span : low % span + high - low] + gap.nbytes > limit)
        if len(full):
            release = low + int(full[-1]) + 1
            break
    for low, high in ((release, min(gap.before, span)), (max(release, span), gap.before)):
        if low < high:
            load[low % span : low % span + high - low] += gap.nbytes
    return release
