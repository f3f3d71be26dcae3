"""How many parameters live on the device, and how many of the others keep a place there: chosen together.

Owns the search over pairs of numbers. Which parameters these are follows from the numbers: those that live there are
the first of a ranking (`hetero.eviction.device_homes`), places are spread over the others (`hetero.eviction.places`). A
few numbers of homes are tried first, each with a few numbers of places; then the neighbours of what was best so far,
best first. The result is never slower than what the first of these alone finds. Each ranking is searched by itself, and
what they find is compared as pairs are: that there are others makes the result no slower, by more than `WORTH`. A pure
function.

[Note: what it may cost] Planning a pair takes time by its moments. Neighbours are tried as long as all that was planned
has no more than so many moments, so that where the first part alone has as many it is all that is done; and as long as
one of the last so many pairs, those that do not fit among them, saved a share of the step that is worth them. Where
more homes are always a little better, say, and no more fit, all smaller numbers would be tried, one after another; what
is better only beyond a plateau may be missed. And as long as the links hold the best one up: for what is left to win by
fewer transfers alone, the first part's numbers are near enough. All rankings share these limits: there is no other one
where as many moments were planned for those before. Else each has a first part of its own, of as many plans; where that
finds nothing that is about as quick as the best so far, it is all.
"""

import contextlib
import heapq
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from hetero.eviction.device_homes import (
    HomeCost,
    HomeStep,
    Ranking,
    choose_device_homes,
    rankings,
    step_seconds,
)
from hetero.eviction.model import WORTH, CapacityError, Links, Schedule, Trace
from hetero.eviction.places import choose_places, spread

__all__ = ["Placement", "choose_placement"]

# [Note: what it may cost]
_MOST_MOMENTS, _MOST_PAIRS = 40_000, 160
_PATIENCE, _GAIN = 16, WORTH / 5

Planner = Callable[[tuple[int, ...], tuple[int, ...]], tuple[Trace, Schedule]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """What lives on the device, and what else keeps a place there."""

    home: HomeStep
    places: tuple[int, ...]


def choose_placement(
    order: Sequence[int],
    costs: Mapping[int, HomeCost],
    sizes: Sequence[int],
    *,
    may_stay: Sequence[int],
    most_bytes: int,
    links: Links,
    plan: Planner,
    most_pairs: int = _MOST_PAIRS,
) -> Placement:
    """The pair that makes the iteration shortest; of about equally short ones, one with which the fewest bytes move.

    ``may_stay``: those that may keep a place, by first use; none where updates do not begin in backward. ``plan(homes,
    places)``: trace and schedule, whose fetched bytes include those of places; may raise `CapacityError`, except for
    none of both. ``most_pairs``: that are planned, unless the first part takes more. Else as `choose_device_homes`.
    """
    found: list[Placement] = []
    soon, moments = math.inf, 0
    for ranking in rankings(order, costs, most_bytes):
        pairs = _Pairs(order, costs, sizes, may_stay, links, plan, ranking, moments)
        coarse = _coarse(pairs, most_bytes)
        if pairs.quickest() <= soon:
            found.append(_refined(pairs, coarse, most_bytes, most_pairs))
            soon = min(soon, pairs.quickest() * (1.0 + WORTH))
        most_pairs, moments = most_pairs - len(pairs.outcomes), pairs.moments
        if moments > _MOST_MOMENTS or len(found[-1].home.homes) == len(ranking.ranked):
            break
    return min(found, key=lambda each: (each.home.seconds > soon, each.home.moved_bytes))


_Numbers = tuple[int, int]
"""Of homes and of places."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    seconds: float
    issue_seconds: float
    moved_bytes: int


class _Pairs:
    """Plans pairs, and remembers what came of each. ``moments``: of all that was planned; ``each``: of the last."""

    def __init__(
        self,
        order: Sequence[int],
        costs: Mapping[int, HomeCost],
        sizes: Sequence[int],
        may_stay: Sequence[int],
        links: Links,
        plan: Planner,
        ranking: Ranking,
        moments: int = 0,
    ) -> None:
        self.order, self.costs, self.sizes, self.links, self.ranking = order, costs, sizes, links, ranking
        self._may_stay, self._plan = may_stay, plan
        self.outcomes: dict[_Numbers, _Outcome | None] = {}  # None: it does not fit
        self.moments, self.each = moments, 0
        self.least = 0.0  # seconds that operators alone take
        # Plans are large: only those of one number of homes are kept.
        self._row: dict[_Numbers, tuple[Trace, Schedule]] = {}

    def others(self, homes: Collection[int]) -> list[int]:
        """Those that may keep a place beside ``homes``."""
        return [index for index in self._may_stay if index not in homes]

    def pair(self, numbers: _Numbers) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Which these are."""
        homes = self.ranking.first(numbers[0])
        return homes, spread(self.others(frozenset(homes)), numbers[1])

    def planned(self, homes: tuple[int, ...], places: tuple[int, ...]) -> tuple[Trace, Schedule]:
        """Raises `CapacityError` where ``plan`` does."""
        numbers = (len(homes), len(places))
        if numbers in self._row:
            return self._row[numbers]
        try:
            trace, schedule = self._plan(homes, places)
        except CapacityError:
            self.outcomes[numbers] = None
            raise
        self.each = len(trace.moments)
        self.moments += self.each
        self.least = sum(moment.seconds for moment in trace.moments)
        stay, sizes = frozenset(homes), self.sizes
        self.outcomes[numbers] = _Outcome(
            seconds=step_seconds(trace, schedule, self.links, self.order, stay, self.costs, sizes),
            issue_seconds=schedule.issue_seconds,
            moved_bytes=schedule.moved_bytes + sum(sizes[x] for x in self.ranking.ranked if x not in stay),
        )
        if any(count != numbers[0] for count, _ in self._row):
            self._row.clear()
        self._row[numbers] = trace, schedule
        return trace, schedule

    def outcome(self, numbers: _Numbers) -> _Outcome | None:
        """None: it does not fit."""
        if numbers not in self.outcomes:
            with contextlib.suppress(CapacityError):
                self.planned(*self.pair(numbers))
        return self.outcomes[numbers]

    def quickest(self) -> float:
        """Seconds, of all that was planned."""
        return min(outcome.seconds for outcome in self.outcomes.values() if outcome is not None)


def _coarse(pairs: _Pairs, most_bytes: int) -> Placement:
    """A few numbers of homes with a few numbers of places each; then more numbers of places."""

    def places_beside(homes: tuple[int, ...], *, thorough: bool) -> tuple[int, ...]:
        others = pairs.others(frozenset(homes))
        if not others:
            return ()
        return choose_places(others, lambda places: pairs.planned(homes, places), thorough=thorough)

    home = choose_device_homes(
        pairs.order,
        pairs.costs,
        pairs.sizes,
        most_bytes=most_bytes,
        links=pairs.links,
        plan=lambda homes: pairs.planned(homes, places_beside(homes, thorough=False)),
        ranking=pairs.ranking,
    )
    return Placement(home=home, places=places_beside(home.homes, thorough=True))


def _refined(pairs: _Pairs, coarse: Placement, most_bytes: int, most_pairs: int) -> Placement:
    """The best of all pairs that were tried and of their neighbours; ``coarse`` where that is about as good."""
    chosen = (len(coarse.home.homes), len(coarse.places))
    pairs.outcome(chosen)
    without = min(numbers for numbers, outcome in pairs.outcomes.items() if outcome is not None)
    _try_neighbours(pairs, pairs.ranking.within(most_bytes), most_pairs)
    found = {numbers: outcome for numbers, outcome in pairs.outcomes.items() if outcome is not None}
    soon = min(outcome.seconds for outcome in found.values()) * (1.0 + WORTH)
    if chosen in found and found[chosen].seconds <= soon:
        # With more numbers of places tried.
        now = found[chosen]
        home = replace(coarse.home, seconds=now.seconds, moved_bytes=now.moved_bytes)
        return Placement(home=home, places=coarse.places)
    near = (
        (outcome.moved_bytes, numbers, outcome)
        for numbers, outcome in found.items()
        if outcome.seconds <= soon
    )
    moved, numbers, outcome = min(near, key=lambda entry: entry[:2])
    homes, places = pairs.pair(numbers)
    home = HomeStep(
        homes=homes,
        nbytes=pairs.ranking.taken[len(homes)],
        seconds=outcome.seconds,
        moved_bytes=moved,
        moves_more=moved > found[without].moved_bytes,
    )
    return Placement(home=home, places=places)


def _try_neighbours(pairs: _Pairs, most_homes: int, most_pairs: int) -> None:
    """Of the best that has been tried, then of the best then, and so on, [Note: what it may cost]."""
    heap = [(o.seconds, numbers, o) for numbers, o in pairs.outcomes.items() if o is not None]
    heapq.heapify(heap)
    soonest, in_vain = heap[0][0], 0
    while heap:
        _, (homes, places), best = heapq.heappop(heap)
        for numbers in product(range(homes - 1, homes + 2), range(places - 1, places + 2)):
            if best.seconds - best.issue_seconds <= pairs.least * (1.0 + WORTH):
                return
            if numbers in pairs.outcomes or not _exists(pairs, numbers, most_homes):
                continue
            if len(pairs.outcomes) >= most_pairs or pairs.moments + pairs.each > _MOST_MOMENTS:
                return
            if in_vain >= _PATIENCE:
                return
            outcome = pairs.outcome(numbers)
            in_vain += 1
            if outcome is not None:
                heapq.heappush(heap, (outcome.seconds, numbers, outcome))
                if outcome.seconds < soonest * (1.0 - _GAIN):
                    soonest, in_vain = outcome.seconds, 0


def _exists(pairs: _Pairs, numbers: _Numbers, most_homes: int) -> bool:
    homes, places = numbers
    if not 0 <= homes <= most_homes or places < 0:
        return False
    return places <= len(pairs.others(frozenset(pairs.ranking.first(homes))))
