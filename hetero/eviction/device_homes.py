"""Which parameters should live on the device, with gradient and optimizer states, and be stepped there.

Owns the choice. A parameter that lives on the device takes several times its bytes there, which are lost to copies of
others, and saves its own copies, its gradient's way down and its update on the host. So how many is a matter of which
of compute, link and host is the slowest: several numbers are tried, each with a plan of its own. A pure function.

They are taken in the order of first use: the first layers' gradients come last and their updates are wanted first. But
a large one that is used first (an embedding, a tied head) would keep out all that there is room for. So where one does,
other orders are tried as well, `rankings`: without those that do not fit beside what comes before them, and with small
ones first. No order is always best: a large one saves most where it does fit.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hetero.eviction.model import WORTH, CapacityError, Links, Schedule, Trace

__all__ = ["HomeCost", "HomeStep", "Ranking", "choose_device_homes", "rankings", "step_seconds"]

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
    """Predicted: one iteration with ``homes`` (by first use) on the device, which take ``nbytes`` of it.
    ``moved_bytes``: copies and gradients together; ``moves_more``: than without."""

    homes: tuple[int, ...]
    nbytes: int
    seconds: float
    moved_bytes: int
    moves_more: bool = False


class Ranking:
    """An order in which parameters come to live on the device, as ``ranked``. ``taken``: what none of them, the first,
    the first two and so on take of it."""

    def __init__(self, ranked: Sequence[int], order: Sequence[int], costs: Mapping[int, HomeCost]) -> None:
        self.ranked, self._order = tuple(ranked), order
        self.taken = [0]
        for index in ranked:
            self.taken.append(self.taken[-1] + costs[index].nbytes)

    def first(self, count: int) -> tuple[int, ...]:
        """So many, by first use: the same parameters are the same homes, whatever the ranking."""
        there = frozenset(self.ranked[:count])
        return tuple(index for index in self._order if index in there)

    def within(self, nbytes: int) -> int:
        """How many of them fit."""
        return sum(total <= nbytes for total in self.taken) - 1

    def held(self, nbytes: int) -> int:
        """What those take that fit."""
        return self.taken[self.within(nbytes)]


def rankings(order: Sequence[int], costs: Mapping[int, HomeCost], most_bytes: int) -> list[Ranking]:
    """By first use; the first fit within ``most_bytes``, then the others; small ones, by parts of these, first. The
    latter two only where some allotment of bytes holds half a part more by them than by those before."""
    movable = [index for index in order if index in costs]
    fit, left = [], most_bytes
    for index in movable:
        if costs[index].nbytes <= left:
            fit.append(index)
            left -= costs[index].nbytes
    fitting = frozenset(fit)
    others = [index for index in movable if index not in fitting]
    small_first = sorted(movable, key=lambda index: costs[index].nbytes * _PARTS // max(1, most_bytes))
    allotments = [most_bytes * part // _PARTS for part in range(1, _PARTS + 1)]
    found = [Ranking(movable, order, costs)]
    for ranked in ([*fit, *others], small_first):
        ranking = Ranking(ranked, order, costs)
        more = (ranking.held(nbytes) - max(each.held(nbytes) for each in found) for nbytes in allotments)
        if 2 * _PARTS * max(more) > most_bytes:
            found.append(ranking)
    return found


def choose_device_homes(
    order: Sequence[int],
    costs: Mapping[int, HomeCost],
    sizes: Sequence[int],
    *,
    most_bytes: int,
    links: Links,
    plan: Callable[[tuple[int, ...]], tuple[Trace, Schedule]],
    ranking: Ranking | None = None,
) -> HomeStep:
    """The number of parameters, of those in ``order`` (by first use), that makes the iteration shortest; of about
    equally short ones, that with which the fewest bytes move.

    ``costs``: of the parameters that may live on the device. ``sizes``: bytes of each parameter's copy and of its
    gradient. ``most_bytes``: of the device, for all of them together. ``plan(homes)``: trace and schedule with these
    on the device; may raise `CapacityError`, except for none. ``ranking``: by first use, if None.
    """
    if ranking is None:
        ranking = Ranking([index for index in order if index in costs], order, costs)
    tries = _Tries(order, costs, sizes, links, plan, ranking)
    most = min(ranking.taken[-1], most_bytes)
    fits, too_many = 0, None
    for part in range(_PARTS + 1):
        if not tries.are_affordable and part not in (0, _PARTS // 2, _PARTS):
            continue
        # None at all first, even if some take no bytes.
        count = ranking.within(most * part // _PARTS) if part else 0
        if not tries.fits(count):
            too_many = count
            break
        fits = count
    if too_many is not None:
        _try_as_many_as_fit(tries, ranking, fits, too_many)
        tries.fits(ranking.within(most))  # if all are there, no copy needs room
    return tries.best()


class _Tries:
    """Plans for the first so many parameters of a ranking, and what came of them."""

    def __init__(
        self,
        order: Sequence[int],
        costs: Mapping[int, HomeCost],
        sizes: Sequence[int],
        links: Links,
        plan: Callable[[tuple[int, ...]], tuple[Trace, Schedule]],
        ranking: Ranking,
    ) -> None:
        self._order, self._costs, self._sizes, self._links, self._plan = order, costs, sizes, links, plan
        self._ranking = ranking
        self._found: dict[int, HomeStep] = {}
        self.are_affordable = True

    def fits(self, count: int) -> bool:
        """Whether there is a plan for the first ``count``; none of them first."""
        if count in self._found:
            return True
        homes = self._ranking.first(count)
        try:
            trace, schedule = self._plan(homes)
        except CapacityError:
            return False
        self.are_affordable = len(trace.moments) <= _AFFORDABLE_MOMENTS
        stay = frozenset(homes)
        seconds = step_seconds(trace, schedule, self._links, self._order, stay, self._costs, self._sizes)
        moved = schedule.moved_bytes + sum(self._sizes[index] for index in self._ranking.ranked[count:])
        self._found[count] = HomeStep(
            homes=homes,
            nbytes=self._ranking.taken[count],
            seconds=seconds,
            moved_bytes=moved,
            moves_more=count > 0 and moved > self._found[0].moved_bytes,
        )
        return True

    def best(self) -> HomeStep:
        """The shortest; of about equally short ones, that with which the fewest bytes move."""
        soon = min(step.seconds for step in self._found.values()) * (1.0 + WORTH)
        near = (step for step in self._found.values() if step.seconds <= soon)
        return min(near, key=lambda step: (step.moved_bytes, step.nbytes))


def _try_as_many_as_fit(tries: _Tries, ranking: Ranking, fits: int, too_many: int) -> None:
    """Between two numbers, where up to one part of the device would stay unused."""
    for _ in range(_HALVINGS):
        if too_many - fits <= 1 or not tries.are_affordable:
            return
        middle = ranking.within((ranking.taken[fits] + ranking.taken[too_many]) // 2)
        middle = min(max(middle, fits + 1), too_many - 1)
        if tries.fits(middle):
            fits = middle
        else:
            too_many = middle


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
