"""How long things take in iterations that follow their plan: what the next plan is made of.

Owns which iterations are timed, and what is made of it. A measured iteration tells memory, at the price of its times:
reading counters takes time, gradients are handed over one by one, and what has left comes back in the middle of
periods. So some of the iterations that follow the plan are timed by events, and the plan is made again with own times
(`hetero.msc.periods`), with copies as fast as these were, and with the host's updates as they ran beside it. It decides
nothing else, and asks the device nothing in other iterations.

[Note: not for good] The first iterations need not be like the others: clocks rise with the load, memory is touched for
the first time, other programs come and go. So what is known is looked at again after some iterations, then ever more
rarely, and plans are made anew where operators or links have become faster or slower. Iterations that leave something
out tell nothing of it: after some of these, the look is given up until the next.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from hetero.eviction import Links
from hetero.msc import CopyTime, IterationTimes, PeriodTimes, Segment, SegmentKey, read_times

__all__ = ["AT_LAST", "UNTIL_AGAIN", "Keys", "Timing", "Timings", "fit_links"]

Keys = tuple[SegmentKey, ...]
"""What kind of iteration it is: that of each of its segments."""

Work = tuple[int, float]  # bytes of parameters that somebody is done with, and the seconds that took

AT_LAST = 3  # iterations timed under the plan that is to stay; the middle one counts
_WORTH = 0.01  # share of the iteration that what moves on trial has to save
_SETTLING = 2  # iterations that are not, after a plan that lets something else live on the device
# [Note: not for good]: iterations until the first look, and how many times as many until each further one; the share by
# which operators' time, or a link's bandwidth, has to differ.
UNTIL_AGAIN, _RARER = 8, 8
_OPERATORS_DRIFT, _LINK_DRIFT = 0.03, 0.1
_MOST_USELESS = 8  # iterations of a look that tell nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """``periods``: of each segment. ``queued``: parameters that the host updates later, which takes ``host_seconds``
    a byte, and ``copy_seconds`` more if it begins in backward. ``typical_seconds``: of an iteration, the
    median of all rounds."""

    periods: tuple[tuple[PeriodTimes, ...], ...]
    links: Links
    queued: tuple[int, ...]
    host_seconds: float
    copy_seconds: float
    typical_seconds: float

    @property
    def own_seconds(self) -> float:
        """Of all operators, without waits."""
        return _own_seconds(self.periods)


@dataclass(slots=True)
class _State:
    rounds: list[IterationTimes] = field(default_factory=list)
    timing: Timing | None = None
    is_final: bool = False
    skip: int = 0  # iterations that are not timed
    until_again: int = UNTIL_AGAIN
    useless: int = 0  # iterations of this look that told nothing
    before: Timing | None = None  # what was known before something moved on trial

    def rest(self) -> None:
        """Until the next look ([Note: not for good])."""
        self.rounds, self.useless = [], 0
        self.skip, self.until_again = self.until_again, self.until_again * _RARER


class Timings:
    """Of all kinds of iterations of one manager. ``links``: as probed."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self._states: dict[Keys, _State] = {}
        self._host_before: Work = (0, 0.0)
        self._copies_before: Work = (0, 0.0)
        # Bytes of parameters that the queue's thread has updated so far, and the seconds it took;
        # `hetero.stm.step.hostrate` sets this.
        self.host_work: Callable[[], Work] = lambda: (0, 0.0)
        # Likewise of those of which it has first copied what the update overwrites, and what that took;
        # `hetero.stm.step.speculation` sets this.
        self.copy_work: Callable[[], Work] = lambda: (0, 0.0)
        # The least time that a byte of any update took, seconds; 0 before there was one.
        self.host_fastest: Callable[[], float] = lambda: 0.0

    def get(self, keys: Keys) -> Timing | None:
        """What is known of iterations of these segments."""
        state = self._states.get(keys)
        return None if state is None else state.timing

    def links(self, keys: Keys) -> Links:
        """As fast as copies were, or as probed."""
        timing = self.get(keys)
        return self._links if timing is None else timing.links

    def wants(self, keys: Keys) -> bool:
        """The iteration of these segments that begins should be timed."""
        return self._states.setdefault(keys, _State()).skip == 0

    def learn(self, keys: Keys, segments: Sequence[Segment]) -> bool:
        """An iteration is over. True: plans should be made anew."""
        state = self._states.get(keys)
        if state is None:
            return False
        if state.skip:
            state.skip -= 1
            self._host_rates()
            return False
        times = read_times(segments)
        host = self._host_rates()
        before = state.timing
        if state.is_final and (times is None or not _has_periods_of(times, before)):
            state.useless += 1
            if state.useless == _MOST_USELESS:
                state.rest()
            return False
        if times is None:
            return False
        state.rounds.append(times)
        if before is not None and len(state.rounds) < AT_LAST:
            return False
        timing = _middle(state.rounds, self._links, before, *host)
        if before is None:
            state.rounds, state.timing = [], timing
            return True
        state.rest()
        if state.is_final and not _has_drifted(before, timing):
            state.timing = replace(before, typical_seconds=timing.typical_seconds)
            return False
        state.is_final, state.timing = True, timing
        return True

    def is_final(self, keys: Keys) -> bool:
        """Times were measured under the plan that is to stay."""
        state = self._states.get(keys)
        return state is not None and state.is_final

    def note_moved(self, keys: Keys, *, on_trial: bool) -> None:
        """Something else lives on the device from now on: times are to be measured again. ``on_trial``: it has to show
        then that it was worth it (`was_in_vain`)."""
        state = self._states.setdefault(keys, _State())
        state.before = state.timing if on_trial and state.is_final else None
        state.rounds, state.is_final, state.useless = [], False, 0
        state.skip, state.until_again = _SETTLING, UNTIL_AGAIN

    def was_in_vain(self, keys: Keys) -> bool:
        """What moved on trial has made these iterations no faster, as measured: a prediction does not know what its
        copies and updates take from operators. Said once; what was known before is what is known again."""
        state = self._states.get(keys)
        if state is None or state.before is None or not state.is_final or state.timing is None:
            return False
        before, state.before = state.before, None
        if state.timing.typical_seconds <= before.typical_seconds * (1.0 - _WORTH):
            return False
        state.timing = before
        return True

    def forget(self, keys: Keys) -> None:
        """These iterations are no longer what they were."""
        self._states.pop(keys, None)

    def _host_rates(self) -> tuple[float, float]:
        """Of a byte, to update it and to copy what that overwrites, since the last time this was asked; 0 for what was
        not done."""
        host, copies = self.host_work(), self.copy_work()
        found = _rate(self._host_before, host), _rate(self._copies_before, copies)
        self._host_before, self._copies_before = host, copies
        return found


def _rate(before: Work, now: Work) -> float:
    return (now[1] - before[1]) / (now[0] - before[0]) if now[0] > before[0] else 0.0


def _middle(
    rounds: Sequence[IterationTimes], probed: Links, before: Timing | None, host: float, copies: float
) -> Timing:
    """That of several rounds which took the median of own time, as a whole: medians of single periods would add up to
    less than any round took, because something is late in each. Copies are those of all rounds."""
    # A pause in one of them, for a collection of garbage, say, would count for each of a few transfers.
    issue = [each.issue_seconds / each.issued for each in rounds if each.issued]
    if not issue and before is not None:
        issue = [before.links.issue]
    own = [_own_seconds(one.segments) for one in rounds]
    one = rounds[own.index(statistics.median_low(own))]
    known = probed
    if before is not None:  # of a direction that had no copies now
        h2d, d2h = before.links.h2d_bandwidth, before.links.d2h_bandwidth
        known = replace(probed, h2d_bandwidth=h2d, d2h_bandwidth=d2h)
    return Timing(
        periods=one.segments,
        links=replace(
            fit_links([copy for each in rounds for copy in each.copies], known),
            issue=statistics.median_low(issue) if issue else 0.0,
        ),
        # What lives on the device was not queued, and would be at home.
        queued=tuple(dict.fromkeys((*one.queued, *(() if before is None else before.queued)))),
        host_seconds=host or (0.0 if before is None else before.host_seconds),
        copy_seconds=copies or (0.0 if before is None else before.copy_seconds),
        typical_seconds=statistics.median(each.seconds for each in rounds),
    )


def _own_seconds(segments: Sequence[Sequence[PeriodTimes]]) -> float:
    return sum(period.seconds for periods in segments for period in periods)


def _has_periods_of(times: IterationTimes, timing: Timing | None) -> bool:
    return timing is not None and list(map(len, times.segments)) == list(map(len, timing.periods))


def _has_drifted(before: Timing, now: Timing) -> bool:
    """Plans made of these would be of another machine ([Note: not for good])."""
    bandwidths = [(t.links.h2d_bandwidth, t.links.d2h_bandwidth) for t in (before, now)]
    return _differ(before.own_seconds, now.own_seconds, _OPERATORS_DRIFT) or any(
        _differ(then, today, _LINK_DRIFT) for then, today in zip(*bandwidths, strict=True)
    )


def _differ(before: float, now: float, share: float) -> bool:
    return abs(now - before) > share * before


def fit_links(copies: Sequence[CopyTime], probed: Links) -> Links:
    """Bandwidths such that these copies take as long together as they did; each costs the latency that was probed, or
    what the fastest took, if that is less."""
    latency = min([probed.latency, *(copy.seconds for copy in copies)])
    found = replace(probed, latency=latency)
    for is_upload in (True, False):
        mine = [copy for copy in copies if copy.is_upload is is_upload]
        seconds = sum(copy.seconds for copy in mine) - latency * len(mine)
        nbytes = sum(copy.nbytes for copy in mine)
        if seconds > 0.0 and nbytes:
            name = "h2d_bandwidth" if is_upload else "d2h_bandwidth"
            found = replace(found, **{name: nbytes / seconds})
    return found
