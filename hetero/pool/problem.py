"""The nouns of offline placement: buffers with known lives, a problem, a solution, and the bound between
them.

Owns `Buffer`, `Problem`, `Solution`, the load lower bound and the competitive ratio. Invariant: a `Problem`
that exists is valid (lives not empty, sizes not negative, ids unique), so planners check nothing. It places
nothing and proves nothing about a solution: `hetero.pool.validation` does, without sharing code with any
planner.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from hetero.errors import PlanError

__all__ = [
    "Buffer",
    "BufferId",
    "IntArray",
    "Problem",
    "Solution",
    "competitive_ratio",
    "load_curve",
    "lower_bound",
    "solution_from_offsets",
]

BufferId = int | str
IntArray = npt.NDArray[np.int64]

# Sums of sizes and differences of times are taken in int64: half of its range leaves room for offset + size.
_MOST_BYTES = 2**62
_LATEST = 2**61


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """One block of memory: ``nbytes`` bytes needed throughout the half-open life ``[begin, end)``.

    Time has no unit: any integers whose order is the order of events. Raises `PlanError` for a negative
    size or an empty life. A size of zero is legal (frameworks allocate empty tensors) and never collides.
    """

    id: BufferId
    begin: int
    end: int
    nbytes: int

    def __post_init__(self) -> None:
        if self.nbytes < 0:
            raise PlanError(f"buffer {self.id!r}: size {self.nbytes} bytes is negative; sizes start at 0")
        if self.begin >= self.end:
            raise PlanError(
                f"buffer {self.id!r}: life [{self.begin}, {self.end}) is empty; lives are half-open, "
                "so the end must come after the begin"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Buffers to place in one linear memory so that none that live at the same time overlap.

    ``begins``, ``ends`` and ``sizes`` are the same facts as int64 arrays of shape (n,), read-only, in the
    order of ``buffers``. Raises `PlanError` for a repeated id, sizes whose sum passes 2**62 bytes, or a time
    beyond 2**61 either way.
    """

    buffers: tuple[Buffer, ...]
    name: str = ""
    begins: IntArray = field(init=False, repr=False, compare=False)
    ends: IntArray = field(init=False, repr=False, compare=False)
    sizes: IntArray = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_unique(self.buffers)
        total = sum(buffer.nbytes for buffer in self.buffers)
        if total > _MOST_BYTES:
            raise PlanError(f"sizes sum to {total} bytes; this planner counts up to {_MOST_BYTES}")
        for buffer in self.buffers:
            if buffer.begin < -_LATEST or buffer.end > _LATEST:
                raise PlanError(
                    f"buffer {buffer.id!r}: life [{buffer.begin}, {buffer.end}) passes {_LATEST}, up to which times "
                    "are counted; number events instead"
                )
        object.__setattr__(self, "begins", _frozen_array(buffer.begin for buffer in self.buffers))
        object.__setattr__(self, "ends", _frozen_array(buffer.end for buffer in self.buffers))
        object.__setattr__(self, "sizes", _frozen_array(buffer.nbytes for buffer in self.buffers))

    def __len__(self) -> int:
        return len(self.buffers)

    @classmethod
    def from_lives(cls, lives: Iterable[tuple[int, int, int]], *, name: str = "") -> "Problem":
        """A problem from ``(begin, end, nbytes)`` triples, numbered from 0."""
        return cls(
            buffers=tuple(
                Buffer(id=index, begin=begin, end=end, nbytes=nbytes)
                for index, (begin, end, nbytes) in enumerate(lives)
            ),
            name=name,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """Where each buffer of a problem goes, and how it was found.

    ``offsets[i]`` (bytes) belongs to ``problem.buffers[i]``; ``footprint`` is the bytes from 0 to the
    highest end, or more where the planner's own blocks are larger than their members (max block, binary
    block). ``proven_optimal``: no placement has a smaller footprint, because it equals the lower bound or
    because an exact search was exhausted. ``seconds`` is wall time. `validate` checks it against the problem.
    """

    offsets: tuple[int, ...]
    footprint: int
    planner: str
    seconds: float
    proven_optimal: bool

    def __post_init__(self) -> None:
        if self.footprint < 0:
            raise PlanError(f"footprint {self.footprint} bytes is negative")


def lower_bound(problem: Problem) -> int:
    """Peak live bytes: no placement can use less."""
    _, load = load_curve(problem)
    return int(load.max(initial=0))


def load_curve(problem: Problem) -> tuple[IntArray, IntArray]:
    """Times of events, ascending and distinct, and the live bytes from each of them to the next."""
    times = np.unique(np.concatenate([problem.begins, problem.ends]))
    change = np.zeros(len(times), dtype=np.int64)
    np.add.at(change, np.searchsorted(times, problem.begins), problem.sizes)
    np.subtract.at(change, np.searchsorted(times, problem.ends), problem.sizes)
    return times, np.cumsum(change)


def competitive_ratio(problem: Problem, solution: Solution) -> float:
    """Footprint over peak live bytes, >= 1 (SmartPool's measure); 1 when nothing is ever live."""
    bound = lower_bound(problem)
    return solution.footprint / bound if bound else 1.0


def solution_from_offsets(
    problem: Problem,
    offsets: Sequence[int] | IntArray,
    *,
    planner: str,
    seconds: float,
    proven_optimal: bool = False,
    footprint: int | None = None,
) -> Solution:
    """A `Solution` whose footprint is measured; ``footprint`` overrides it for planners that reserve more."""
    placed = np.asarray(offsets, dtype=np.int64)
    used = int((placed + problem.sizes).max(initial=0)) if footprint is None else footprint
    return Solution(
        offsets=tuple(placed.tolist()),
        footprint=used,
        planner=planner,
        seconds=seconds,
        proven_optimal=proven_optimal or used <= lower_bound(problem),
    )


def _check_unique(buffers: tuple[Buffer, ...]) -> None:
    seen: set[BufferId] = set()
    for buffer in buffers:
        if buffer.id in seen:
            raise PlanError(f"buffer id {buffer.id!r} appears twice; ids name one buffer each")
        seen.add(buffer.id)


def _frozen_array(values: Iterable[int]) -> IntArray:
    array = np.array(list(values), dtype=np.int64)
    array.flags.writeable = False
    return array
