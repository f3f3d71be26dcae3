"""The nouns of swapping: a step's variables and when they are used, gaps between uses, swaps, plans.

Owns the values that scores, selection, schedule and simulation share. It decides nothing.

[Note: time] Operator i runs during ``[i, i + 1)``, a variable lives in ``[begin, end)``, both counted in operators. A
gap ``(after, before)`` lies between two operators that use the variable; it is absent from ``after + 1`` up to and
without ``before``. A persistent variable (weights, states) is there in every iteration, and the gap from its last
use to its first of the next iteration has ``before >= span``.
"""

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from hetero.errors import BudgetError, PlanError
from hetero.simulate import Timeline
from hetero.units import format_bytes

__all__ = ["Floats", "Gap", "Ints", "Step", "Swap", "SwapLimitError", "SwapPlan", "Variable"]

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_ROUNDING = 1e-9  # sums of the same times in another order differ in their last digits


class SwapLimitError(BudgetError):
    """The limit cannot be met by moving what may be moved. Carries ``limit`` and ``least``, in bytes."""

    def __init__(self, *, limit: int, least: int) -> None:
        super().__init__(
            f"swapping every candidate leaves a load of {format_bytes(least)} ({least} bytes), above the limit of "
            f"{format_bytes(limit)} ({limit} bytes): raise the limit by {format_bytes(least - limit)}, lower the "
            "size threshold, or lower the batch size"
        )
        self.limit = limit
        self.least = least

    def __reduce__(self) -> tuple[object, ...]:
        return _limit_error, (self.limit, self.least)


def _limit_error(limit: int, least: int) -> SwapLimitError:
    return SwapLimitError(limit=limit, least=least)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """``nbytes`` bytes alive in ``[begin, end)``, used by the operators ``accesses`` (ascending).

    The first access of one that is not persistent is its allocation. ``persistent``: alive all the time, in the
    next iteration the same. ``writes``: those of the accesses that write to it; None: any of them may.
    """

    nbytes: int
    begin: int
    end: int
    accesses: tuple[int, ...]
    persistent: bool = False
    name: str = ""
    writes: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One iteration: how long each operator takes alone, and the variables in memory.

    Raises `PlanError` naming the first variable whose life or accesses make no sense.
    """

    seconds: tuple[float, ...]
    variables: tuple[Variable, ...]
    load: Ints = field(init=False, compare=False, repr=False)
    starts: Floats = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self.seconds:
            raise PlanError("a step without operators has nothing to plan")
        if not np.isfinite(self.seconds).all() or min(self.seconds) < 0:
            raise PlanError("an operator takes negative or endless time")
        span = len(self.seconds)
        change = np.zeros(span + 1, dtype=np.int64)
        for index, v in enumerate(self.variables):
            _check(index, v, span)
            change[v.begin] += v.nbytes
            change[v.end] -= v.nbytes
        object.__setattr__(self, "load", np.cumsum(change[:-1]))
        object.__setattr__(self, "starts", np.concatenate([[0.0], np.cumsum(self.seconds)]))
        self.load.flags.writeable = False
        self.starts.flags.writeable = False

    @property
    def span(self) -> int:
        """The number of operators."""
        return len(self.seconds)

    @property
    def total_seconds(self) -> float:
        """The step without any swap."""
        return float(self.starts[-1])

    @property
    def peak_bytes(self) -> int:
        """In memory at most, without any swap."""
        return int(self.load.max())

    @property
    def peak_at(self) -> int:
        """The first operator during which the load is at its peak."""
        return int(self.load.argmax())

    def begin_of(self, operator: int) -> float:
        """When ``operator`` starts if nothing waits; at ``span`` and beyond, in the next iteration."""
        turn, place = divmod(operator, self.span)
        return turn * self.total_seconds + float(self.starts[place])

    def end_of(self, operator: int) -> float:
        """When ``operator`` ends if nothing waits."""
        return self.begin_of(operator) + self.seconds[operator % self.span]

    def overhead(self, step_seconds: float) -> float:
        """The share by which a step of ``step_seconds`` is longer than without any swap: >= 0."""
        if self.total_seconds <= 0.0:
            return 0.0
        share = step_seconds / self.total_seconds - 1.0
        return 0.0 if share < _ROUNDING else share


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Two consecutive uses of a variable, and the operators in between, during which it may be away."""

    variable: int
    nbytes: int
    after: int
    before: int

    def spans(self, span: int) -> tuple[tuple[int, int], ...]:
        """The half-open ranges of operators within one iteration during which it may be away."""
        if self.before <= span:
            return ((self.after + 1, self.before),)
        return ((self.after + 1, span), (0, self.before - span))

    def covers(self, operator: int, span: int) -> bool:
        """It may be away during ``operator`` of an iteration of ``span`` operators."""
        return any(low <= operator < high for low, high in self.spans(span))


@dataclass(frozen=True, slots=True, kw_only=True)
class Swap:
    """A gap that is used: out as soon as operator ``gap.after`` has ended, in when ``release - 1`` has.

    ``release`` is counted as ``gap.before`` is: from ``gap.after + 1`` to ``gap.before``.
    """

    gap: Gap
    release: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapPlan:
    """What moves, in the order of its return (per iteration), and how long the step then takes, simulated.

    ``overhead``: the share by which the step is longer than without swaps.
    """

    method: str
    limit: int
    swaps: tuple[Swap, ...]
    timeline: Timeline = field(compare=False)
    overhead: float

    @property
    def moved_bytes(self) -> int:
        """Bytes over both directions in one iteration."""
        return 2 * sum(swap.gap.nbytes for swap in self.swaps)


def _check(index: int, variable: Variable, span: int) -> None:
    called = f"variable {index} ({variable.name})" if variable.name else f"variable {index}"
    if variable.nbytes < 0 or not 0 <= variable.begin < variable.end <= span:
        raise PlanError(
            f"{called} of {variable.nbytes} bytes lives in [{variable.begin}, {variable.end}) of {span} operators"
        )
    if variable.persistent and (variable.begin, variable.end) != (0, span):
        raise PlanError(f"{called} is persistent but lives in [{variable.begin}, {variable.end}) only")
    accesses = variable.accesses
    if accesses and not variable.begin <= accesses[0] <= accesses[-1] < variable.end:
        raise PlanError(f"{called} is used at {accesses[0]} or {accesses[-1]}, outside its life")
    if any(a >= b for a, b in pairwise(accesses)):
        raise PlanError(f"{called}: its accesses are not in ascending order")
    if variable.writes is not None and not set(variable.writes) <= set(accesses):
        raise PlanError(f"{called} is written at {variable.writes}, which are not all among its accesses")
