"""From measured periods to the moments of a trace.

Owns what of a period an eviction planner is told: what has to be on the device, and how much room there is for it.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from hetero.eviction import Moment, OnTheirWay, Send
from hetero.msc import Period, PeriodTimes, Phase, Segment
from hetero.stm.plans.lives import Lives

__all__ = [
    "Rows",
    "copies_of_others",
    "freed_once_made",
    "home_gradients",
    "mandatory_in",
    "non_model_peak",
    "sends_to_come",
]


@dataclass(slots=True, kw_only=True)
class Rows:
    """What becomes of each measured period, in order; `hetero.stm.plans.plan.CyclePlan` says what the lists are.

    ``room``: bytes of the budget for model data and what was measured beside; of these, ``others[i]``, which was not,
    lives on the device of other managers in period i (``others_states``: of optimizer states), and ``placed[i]`` are
    taken, with what is kept free for gradients on their way (``sending``). ``elsewhere``: parameters that the trace's
    moments do not move.
    """

    room: int
    others: Sequence[int]
    others_states: int
    placed: Sequence[int]
    sending: Sequence[OnTheirWay]
    at_home: frozenset[int]
    elsewhere: frozenset[int]
    places: tuple[int, ...]
    moments: list[Moment] = field(default_factory=list)
    operands: list[tuple[int, ...]] = field(default_factory=list)
    limits: list[int] = field(default_factory=list)
    non_model: list[int] = field(default_factory=list)
    bounds: list[int] = field(default_factory=lambda: [0])
    others_gave: list[bool] = field(default_factory=list)
    others_more: list[int] = field(default_factory=list)
    others_away: list[int] = field(default_factory=list)
    others_away_at_peak: list[int] = field(default_factory=list)
    guarded: list[bool] = field(default_factory=list)

    def add_segment(
        self,
        measured: Sequence[Segment],
        lives: Lives,
        sizes: Sequence[int],
        times: Sequence[PeriodTimes] | None,
    ) -> None:
        """The newest of ``measured``, all of one key; ``times`` of its periods, if they are better known."""
        phase = measured[-1].key.phase
        guarded, is_backward = False, phase is Phase.BACKWARD
        for index, period in enumerate(measured[-1].periods):
            now = len(self.moments)
            mandatory = tuple(t for t in mandatory_in(period, lives, now) if t not in self.elsewhere)
            limit = self.room - self.others[now] - non_model_peak(measured, index) - lives.unseen[now]
            capacity = limit - self.placed[now]
            least = sum(sizes[tensor] for tensor in mandatory)
            samples = _same(measured, index)
            guarded |= any(p.relieved and (p.lost_own or capacity < least) for p in samples)
            more = self.others[now] - max(p.others_home_bytes for p in samples)
            if not self.elsewhere:  # these did fit when measured, with gradients handed over at once
                guarded |= more > 0 and capacity < least  # of what came to live there since
                capacity = max(capacity, least)
            time = _times(period) if times is None else times[index]
            self.moments.append(
                Moment(
                    operands=mandatory,
                    seconds=time.seconds,
                    capacity=capacity,
                    dirties=lives.produced[now],
                    produces=lives.produced[now],
                    invalidates=(
                        *(t for t in dict.fromkeys(period.invalidates) if t not in self.elsewhere),
                        *lives.ended[now],
                    ),
                    sends=_sends(time, self.at_home),
                    awaits=tuple(t for t in dict.fromkeys(period.operands) if t in self.places),
                    still_sending=self.sending[now].begin if is_backward else None,
                )
            )
            self.operands.append(period.operands)
            self.limits.append(limit)
            self.others_gave.append(any(p.others_gave for p in samples))
            beside, peak = max(p.beside_bytes for p in samples), non_model_peak(measured, index)
            self.non_model.append(beside + self.others[now])
            self.others_more.append(more)
            whole = max(p.with_others_bytes for p in samples) + self.others_states
            self.others_away.append(whole - self.non_model[-1])
            # What runs after the step is another iteration's, of whoever it is.
            is_over = phase is Phase.STEP and index == len(measured[-1].periods) - 1
            most = max(p.with_others_bytes if is_over else p.most_with_others_bytes for p in samples)
            self.others_away_at_peak.append(most + self.others_states - peak - self.others[now])
        self.bounds.append(len(self.moments))
        self.guarded.append(guarded)


def _times(period: Period) -> PeriodTimes:
    """As measured with memory, while nothing better is known."""
    return PeriodTimes(seconds=period.seconds, sends=period.sends)


def _sends(times: PeriodTimes, at_home: frozenset[int]) -> tuple[Send, ...]:
    return tuple(
        Send(tensor=index, nbytes=nbytes, seconds=seconds)
        for index, nbytes, seconds in times.sends
        if index in at_home
    )


def mandatory_in(period: Period, lives: Lives, moment: int) -> tuple[int, ...]:
    """What must be on the device in this period, each once."""
    return (*dict.fromkeys(period.operands + period.held), *sorted(lives.present[moment]))


def home_gradients(
    measured: Sequence[Sequence[Segment]],
    sizes: Mapping[int, int],
    *,
    are_there: Sequence[bool],
    cast: Collection[int] = (),
) -> list[int]:
    """For each period of an iteration, bytes of the gradients of what lives on the device, beside `non_model_peak`.

    Each is there from when it was made to the end of the optimizer's step, or, in segments where they ``are_there`` as
    they begin, all along. In the period that makes it, it is part of that peak already. ``measured``: of each segment,
    all samples. ``sizes``: by parameter. One whose gradient was not seen is made as backward begins. Those of ``cast``
    come in a type of fewer bytes, and are there twice for a moment.
    """
    seen = {index for samples in measured for p in samples[-1].periods for index, _, _ in p.sends}
    rows: list[int] = []
    for samples, all_there in zip(measured, are_there, strict=True):
        there = set(sizes) if all_there else set()
        if samples[-1].key.phase is Phase.BACKWARD:
            there |= sizes.keys() - seen
        nbytes = sum(sizes[index] for index in there)
        for number, period in enumerate(samples[-1].periods):
            sent = {x: sizes[x] for x, _, _ in period.sends if x in sizes}
            made = {x: size for x, size in sent.items() if x not in there}
            as_they_are = {x: size for x, size in made.items() if x not in cast}
            most = max(p.non_model_with(as_they_are) for p in _same(samples, number)) if as_they_are else 0
            beside = most - non_model_peak(samples, number) if as_they_are else 0
            rows.append(nbytes + beside + sum(size for x, size in sent.items() if x in cast))
            there |= made.keys()
            nbytes += sum(made.values())
    return rows


def freed_once_made(samples: Sequence[Segment], index: int, at_home: Collection[int]) -> int:
    """Of the non-model peak of period ``index``, what is free again once its gradients are on their way; 0 where that
    is not known, or some of them stay."""
    most = 0
    for period in _same(samples, index):
        made = period.handed_over
        if not made or len(made) < len(period.sends) or any(each.index not in at_home for each in made):
            return 0
        most = max(most, min(period.non_model_bytes, max(each.beside_bytes for each in made)))
    return non_model_peak(samples, index) - most


def sends_to_come(segment: Segment, at_home: frozenset[int]) -> list[bool]:
    """For each period: a gradient goes home in it or after it."""
    sends = [i for i, period in enumerate(segment.periods) if any(x in at_home for x, _, _ in period.sends)]
    return [index <= max(sends, default=-1) for index in range(len(segment.periods))]


def non_model_peak(samples: Sequence[Segment], index: int) -> int:
    """Highest non-model peak of period ``index`` over the samples that have it."""
    return max(period.non_model_bytes for period in _same(samples, index))


def copies_of_others(samples: Sequence[Segment], index: int, *, most: int) -> int:
    """Of `non_model_peak`, bytes that were copies of other managers' parameters, of which no more than ``most`` in a
    sample count: where these live on the device, they are among what does."""
    periods = _same(samples, index)
    return non_model_peak(samples, index) - max(
        period.non_model_bytes - min(most, period.others_copy_bytes) for period in periods
    )


def _same(samples: Sequence[Segment], index: int) -> list[Period]:
    """Period ``index`` of each sample that has it."""
    return [segment.periods[index] for segment in samples if index < len(segment.periods)]
