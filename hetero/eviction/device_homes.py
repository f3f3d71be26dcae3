"""Which parameters should live on the device, with gradient and optimizer states, and be stepped there.

Owns the choice. A parameter that lives on the device takes several times its bytes there, which are lost to copies of
others, and saves its own copies, its gradient's way down and its update on the host. So how many is a matter of which
of compute, link and host is the slowest: several numbers are tried, each with a plan of its own. A pure function.

They are taken in the order of first use: the first layers' gradients come last and their updates are wanted first.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hetero.eviction.model import WORTH, CapacityError, Links, Schedule, Trace

__all__ = ["HomeCost", "HomeStep", "bytes_of_first", "choose_device_homes", "count_within", "step_seconds"]

_PARTS = 8
_HALVINGS = 4
_AFFORDABLE_MOMENTS = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class HomeCost:
    """Of one parameter: ``nbytes`` of the device while it lives there (copy, gradient, states), ``gradient_nbytes`` of
    these only while it has a gradient, ``step_nbytes`` more during its update; ``step_seconds`` of its update on the
    host while it does not."""

    nbytes: int
    gradient_nbytes: int = 0
    step_nbytes: int
    step_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HomeStep:
    """Predicted: one iteration with ``homes`` on the device, which take ``nbytes`` of it. ``moves_more``: bytes, copies
    and gradients together, than without."""

    homes: tuple[int, ...]
    nbytes: int
    seconds: float
    moves_more: bool = False


def choose_device_homes(
    order: Sequence[int],
    costs: Mapping[int, HomeCost],
    sizes: Sequence[int],
    *,
    most_bytes: int,
    links: Links,
    plan: Callable[[tuple[int, ...]], tuple[Trace, Schedule]],
) -> HomeStep:
    """The number of parameters, of those in ``order`` (by first use), that makes the iteration shortest; of about
    equally short ones, that with which the fewest bytes move.

    ``costs``: of the parameters that may live on the device. ``sizes``: bytes of each parameter's copy and of its
    gradient. ``most_bytes``: of the device, for all of them together. ``plan(homes)``: trace and schedule with these
    on the device; may raise `CapacityError`, except for none.
    """
    tries = _Tries(order, costs, sizes, links, plan)
    most = min(tries.taken[-1], most_bytes)
    fits, too_many = 0, None
    for part in range(_PARTS + 1):
        if not tries.are_affordable and part not in (0, _PARTS // 2, _PARTS):
            continue
        # None at all first, even if some take no bytes.
        count = count_within(tries.taken, most * part // _PARTS) if part else 0
        if not tries.fits(count):
            too_many = count
            break
        fits = count
    if too_many is not None:
        _try_as_many_as_fit(tries, fits, too_many)
        tries.fits(count_within(tries.taken, most))  # if all are there, no copy needs room
    return tries.best()


class _Tries:
    """Plans for the first so many parameters, and what came of them. ``taken``: by `bytes_of_first`."""

    def __init__(
        self,
        order: Sequence[int],
        costs: Mapping[int, HomeCost],
        sizes: Sequence[int],
        links: Links,
        plan: Callable[[tuple[int, ...]], tuple[Trace, Schedule]],
    ) -> None:
        self._order, self._costs, self._sizes, self._links, self._plan = order, costs, sizes, links, plan
        self._movable = [index for index in order if index in costs]
        self.taken = bytes_of_first(self._movable, costs)
        self._found: dict[int, tuple[int, HomeStep]] = {}  # with the bytes that move
        self.are_affordable = True

    def fits(self, count: int) -> bool:
        """Whether there is a plan for the first ``count``; none of them first."""
        if count in self._found:
            return True
        homes = tuple(self._movable[:count])
        try:
            trace, schedule = self._plan(homes)
        except CapacityError:
            return False
        self.are_affordable = len(trace.moments) <= _AFFORDABLE_MOMENTS
        stay = frozenset(homes)
        seconds = step_seconds(trace, schedule, self._links, self._order, stay, self._costs, self._sizes)
        moved = schedule.moved_bytes + sum(self._sizes[index] for index in self._movable[count:])
        step = HomeStep(
            homes=homes,
            nbytes=self.taken[count],
            seconds=seconds,
            moves_more=count > 0 and moved > self._found[0][0],
        )
        self._found[count] = moved, step
        return True

    def best(self) -> HomeStep:
        """The shortest; of about equally short ones, that with which the fewest bytes move."""
        soon = min(step.seconds for _, step in self._found.values()) * (1.0 + WORTH)
        near = [(moved, step) for moved, step in self._found.values() if step.seconds <= soon]
        return min(near, key=lambda entry: (entry[0], entry[1].nbytes))[1]


def _try_as_many_as_fit(tries: _Tries, fits: int, too_many: int) -> None:
    """Between two numbers, where up to one part of the device would stay unused."""
    for _ in range(_HALVINGS):
        if too_many - fits <= 1 or not tries.are_affordable:
            return
        middle = count_within(tries.taken, (tries.taken[fits] + tries.taken[too_many]) // 2)
        middle = min(max(middle, fits + 1), too_many - 1)
        if tries.fits(middle):
            fits = middle
        else:
            too_many = middle


def bytes_of_first(movable: Sequence[int], costs: Mapping[int, HomeCost]) -> list[int]:
    """What none of them, the first, the first two and so on take of the device."""
    taken = [0]
    for index in movable:
        taken.append(taken[-1] + costs[index].nbytes)
    return taken


def count_within(taken: Sequence[int], nbytes: int) -> int:
    """How many of them fit, by `bytes_of_first`."""
    return sum(total <= nbytes for total in taken) - 1


def step_seconds(
    trace: Trace,
    schedule: Schedule,
    links: Links,
    order: Sequence[int],
    homes: frozenset[int],
    costs: Mapping[int, HomeCost],
    sizes: Sequence[int],
) -> float:
    """The iteration: copies as simulated, and the next forward held up by updates that are not done in time."""
    if trace.updates is not None:  # the simulation knows of them, and of gradients
        return schedule.predicted_seconds
    begins: dict[int, float] = {}
    clock = 0.0
    for moment in trace.moments:
        for index in moment.operands:
            begins.setdefault(index, clock)
        clock += moment.seconds
    done = late = down = 0.0
    for index in order:
        if index in homes or index not in costs:
            continue
        done += costs[index].step_seconds
        down += links.d2h_seconds(sizes[index])
        arrival = done + links.h2d_seconds(sizes[index])
        late = max(late, arrival - begins.get(index, clock))
    return max(schedule.predicted_seconds + late, done, down)
