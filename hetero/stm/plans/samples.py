"""Measured segments.

Owns which of them are kept, and so what plans are made of: of each key the first ones, and those that were measured
again because an iteration has outgrown them (`hetero.stm.plans.outgrown`). The newest of a warm-up stays the last in
its list, because what follows a plan has other things on the device.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet

from hetero.msc import BackwardSignature, Period, Phase, Segment, SegmentKey
from hetero.stm.plans.rows import non_model_peak

__all__ = ["Samples"]

_MOST_AT_ONCE = 8  # of one key in one iteration
_MUCH = 4  # one part in so many of what was known
_LONG = 32  # segments of a key in a row that begin without gradients
_ON_ITS_WAY = 4  # times a gradient's bytes: its cast and norm, which depend on the room that there is


class Samples(Mapping[SegmentKey, Sequence[Segment]]):
    """Of each key, the latest of the warm-up last. ``warmup_steps``: iterations that are measured.

    Attributes:
        excess: bytes in use that nobody has asked for, the most that was seen, or was in the way later. It is of no
            period by itself: where blocks lie, and so by how much they are too large, is another matter each time.
    """

    def __init__(self, warmup_steps: int) -> None:
        self._warmup_steps = warmup_steps
        self._kept: dict[SegmentKey, list[Segment]] = {}
        # Of those that are no longer what they were, there is nothing better for other plans that have them.
        self._outdated: set[SegmentKey] = set()
        # What was known of those, where it may turn out to be all of what they are now, and more.
        self._before: dict[SegmentKey, list[Segment]] = {}
        # Segments that gradients are there to see begin: of earlier micro-batches, of a loop that drops them late.
        self._with_gradients: set[SegmentKey] = set()
        self._unplanned_gradients: set[SegmentKey] = set()  # of these, those that plans do not know of yet
        # In a row, segments of those that have begun without; and how many it takes to believe it.
        self._without_gradients: Counter[SegmentKey] = Counter()
        self._until_without: dict[SegmentKey, int] = {}
        self._grown: Counter[SegmentKey] = Counter()  # times that `note_callers` was told of little more
        self._told = 0
        self._has_news = False
        self._has_larger = self._has_less = False
        self.excess = 0
        # What `peak` has told, until samples change: it is asked at each operator, of as many periods.
        self._peaks: dict[SegmentKey, int | None] = {}

    def __getitem__(self, key: SegmentKey) -> Sequence[Segment]:
        return self._kept[key]

    def __iter__(self) -> Iterator[SegmentKey]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)

    def present(self, key: SegmentKey) -> Sequence[Segment]:
        """Those that are what such a segment is now."""
        return () if key in self._outdated else self._kept.get(key, ())

    def peak(self, key: SegmentKey) -> int | None:
        """The most that was on the device beside model data in a period of such a segment; None if not known."""
        if key not in self._peaks:
            periods = [period for segment in self.present(key) for period in segment.periods]
            measured = [p.non_model_bytes + p.excess_bytes for p in periods if p.is_sampled]
            self._peaks[key] = max(measured, default=None)
        return self._peaks[key]

    def note_excess(self, nbytes: int) -> None:
        """So much is in use that nobody has asked for, more than a plan has room for."""
        self.excess = max(self.excess, nbytes)
        self._has_news = True

    def note_callers(self, key: SegmentKey, nbytes: int) -> bool:
        """So many bytes were beside model data after such a forward, in its caller's own part, which passed the budget.
        True if that is news, and plans are to be made anew: not for ever, where it grows on by little."""
        kept = self._kept.get(key)
        if kept is None:
            return False
        last = kept[-1].periods[-1]
        known = non_model_peak(kept, len(kept[-1].periods) - 1)
        if nbytes <= known:
            return False
        if _MUCH * (nbytes - known) < known:
            self._grown[key] += 1
            if self._grown[key].bit_count() > 1:
                return False
        self._told = max(self._told, nbytes - known)
        last.non_model_bytes = nbytes
        self._has_news = True
        self._peaks.clear()
        return True

    def suffice(self, keys: Sequence[SegmentKey]) -> bool:
        """An iteration of these can be planned."""
        return all(len(self.present(key)) >= self._warmup_steps for key in keys)

    def want(self, key: SegmentKey, times: int) -> bool:
        """More are wanted. ``times``: how often it has come in this iteration, each perhaps different: what the caller
        does after a forward may be. One with more elements than any is wanted as well: it may take more."""
        present = self.present(key)
        if len(present) < self._warmup_steps * min(max(1, times), _MOST_AT_ONCE):
            return True
        return key.elements > max([segment.key.elements for segment in present])

    def add(self, segment: Segment, *, again: bool = False) -> None:
        """It is over, and was complete. ``again``: it followed a plan, which has others of it."""
        _read_events(segment)
        self.excess = max(self.excess, *(period.excess_bytes for period in segment.periods))
        if segment.key in self._outdated:
            self._outdated.discard(segment.key)
            del self._kept[segment.key]
        kept = self._kept.setdefault(segment.key, [])
        if again and kept:
            kept.insert(0, segment)
            self._has_larger = True
        else:
            kept.append(segment)
        self._peaks.clear()
        if segment.has_gradients:
            self._with_gradients.add(segment.key)

    def note_gradients(self, key: SegmentKey) -> bool:
        """There are some as such a segment begins, which follows a plan. True if that does not know of them."""
        if key not in self._with_gradients:
            self._with_gradients.add(key)
            self._unplanned_gradients.add(key)
        self._without_gradients.pop(key, None)
        return key in self._unplanned_gradients

    def note_no_gradients(self, key: SegmentKey) -> None:
        """There are none as such a segment begins, which follows a plan: it may have been for a while that there were.
        Plans forget them after many in a row, and after twice as many the next time."""
        if key not in self._with_gradients:
            return
        self._without_gradients[key] += 1
        if self._without_gradients[key] >= self._until_without.get(key, _LONG):
            self._until_without[key] = 2 * self._without_gradients.pop(key)
            self._with_gradients.discard(key)
            self._unplanned_gradients.add(key)
            self._has_less = True

    def take_news(self) -> bool:
        """Something is known that was not when plans were made."""
        news, self._has_news = self._has_news, False
        return news

    def take_told(self) -> int:
        """By how many bytes what `note_callers` was told is more than what was known."""
        told, self._told = self._told, 0
        return told

    def take_unplanned_gradients(self) -> AbstractSet[SegmentKey]:
        """Segments that begin with gradients unlike their plans, or without: those with any are to be made anew."""
        unplanned, self._unplanned_gradients = self._unplanned_gradients, set()
        return unplanned

    def take_larger(self) -> bool:
        """Of what plans are made of there is a sample that may have taken more than all before."""
        larger, self._has_larger = self._has_larger, False
        return larger

    def take_less(self) -> bool:
        """Something that plans have kept room for does not come any more: more may live on the device."""
        less, self._has_less = self._has_less, False
        return less

    def begins_with_gradients(self, key: SegmentKey) -> bool:
        """There may be some when such a segment begins."""
        return key in self._with_gradients

    def add_again(self, segments: Sequence[Segment]) -> int:
        """Those of an iteration that was measured anew; by how many bytes what comes after a forward took more."""
        grown = 0
        self._peaks.clear()
        for segment in segments:
            kept = self._kept[segment.key]
            if segment in kept or len(segment.periods) != len(kept[-1].periods):
                continue
            _read_events(segment)
            if segment.key.phase is Phase.FORWARD:
                last = len(segment.periods) - 1
                grown = max(grown, segment.periods[last].non_model_bytes - non_model_peak(kept, last))
            kept.insert(0, segment)
        return grown

    def take_longer(self, segments: Sequence[Segment]) -> bool:
        """They are of an iteration with all that is known of such ones, and more: then they take its place, because a
        plan serves also who leaves out some of it. Else nothing changes."""
        # A key may come several times, as micro-batches do: the longest of them counts, and is to be the last.
        found: dict[SegmentKey, list[Segment]] = defaultdict(list)
        for segment in sorted(segments, key=lambda segment: len(segment.periods)):
            found[segment.key].append(segment)
        if not _are_longer([those[-1] for those in found.values()], [self._kept[key][-1] for key in found]):
            return False
        self._peaks.clear()
        for segment in segments:
            _read_events(segment)
        self._kept.update(found)
        return True

    def forget_spikes(self, segments: Sequence[Segment], least: int) -> bool:
        """These followed their plan, and are what comes again. What operators took more before, by at least so many
        bytes, they took once, as where a library tried which of its kernels is the fastest. True if any did.

        Nothing is forgotten where memory depends on values, nor of what is between a forward's operators: whoever looks
        at every hundredth iteration begins with the first. In a backward, hooks run within the periods: there it is
        forgotten only of parameters whose operator took more in the forward."""
        found: dict[SegmentKey, list[Segment]] = defaultdict(list)
        for segment in segments:
            found[segment.key].append(segment)
        tried = set[int]()
        has_any = False
        for key, now in found.items():  # in their order: forwards come before their backward
            before = self._kept[key]
            if key.phase is Phase.STEP or any(segment.by_values for segment in (*before, *now)):
                continue
            for known, operands, nbytes in _taken_later(before, now):
                is_much = known.non_model_bytes - nbytes >= max(least, known.non_model_bytes // _MUCH)
                if is_much and (key.phase is Phase.FORWARD or not tried.isdisjoint(operands)):
                    known.non_model_bytes, has_any = nbytes, True
                    tried.update(operands)
        if has_any:
            self._peaks.clear()
        return has_any

    def keep_longer(self, keys: Sequence[SegmentKey]) -> None:
        """These have been measured again: if what was known of them before is longer, that stays."""
        before = {key: self._before.pop(key, []) for key in keys}
        before = {key: kept for key, kept in before.items() if kept}
        if _are_longer([kept[-1] for kept in before.values()], [self._kept[key][-1] for key in before]):
            self._kept.update(before)
            self._peaks.clear()

    def forget(self, keys: Sequence[SegmentKey], *, for_good: bool) -> None:
        """They are no longer what they were: the next ones take their place. ``for_good``: even if they are shorter."""
        for key in keys:
            if key in self._kept:
                self._outdated.add(key)
                self._before[key] = [] if for_good else self._kept[key]
        self._with_gradients.difference_update(keys)
        self._peaks.clear()

    def keep_only(self, keys: AbstractSet[SegmentKey]) -> None:
        """The others have come once, and may never come again."""
        for key in self._kept.keys() - keys:
            del self._kept[key]
        for key in self._before.keys() - keys:
            del self._before[key]
        for key in self._grown.keys() - keys:
            del self._grown[key]
        self._outdated &= keys
        self._with_gradients &= keys
        for key in self._without_gradients.keys() - keys:
            del self._without_gradients[key]
        for key in self._until_without.keys() - keys:
            del self._until_without[key]
        self._peaks.clear()


def _are_longer(longer: Sequence[Segment], shorter: Sequence[Segment]) -> bool:
    """Each has the operators of the other in their order, and has saved as much; and some have more of them."""
    pairs = list(zip(longer, shorter, strict=True))
    return all(_is_within(b, a) for a, b in pairs) and any(len(b.periods) < len(a.periods) for a, b in pairs)


def _is_within(shorter: Segment, longer: Segment) -> bool:
    rest = iter([period.operands for period in longer.periods])
    has_operators = all(period.operands in rest for period in shorter.periods)
    return has_operators and _saved(shorter) <= _saved(longer)


def _saved(segment: Segment) -> int:
    return sum(len(period.saved) for period in segment.periods)


def _taken_later(
    before: Sequence[Segment], now: Sequence[Segment]
) -> Iterator[tuple[Period, tuple[int, ...], int]]:
    """Periods of ``before`` of which it is known what their operator takes ``now``, if they ran since: each with the
    parameters of its operator, and the non-model bytes that it would have taken with that."""
    for segment in before:
        same = [other for other in now if _is_alike(segment, other)]
        is_forward = segment.key.phase is Phase.FORWARD
        operands: tuple[int, ...] = ()
        for known, *others in zip(segment.periods, *(other.periods for other in same), strict=True):
            operands = known.operands or operands  # what it has saved may be read in a period of its own
            is_known = known.between_bytes >= 0 or not is_forward
            if not (is_known and others) or any(period.relieved for period in others):
                continue
            own = max(period.non_model_bytes - period.beside_bytes for period in others)
            most = known.beside_bytes + own + _ON_ITS_WAY * known.sent_bytes
            yield known, operands, max(most, known.between_bytes)


def _is_alike(segment: Segment, other: Segment) -> bool:
    """They have the same operators, as many elements, and both gradients to add to, or none."""
    return (
        segment.has_gradients == other.has_gradients
        and _elements(segment.key) == _elements(other.key)
        and [period.operands for period in segment.periods] == [period.operands for period in other.periods]
    )


def _elements(key: SegmentKey) -> list[int]:
    if isinstance(key.signature, BackwardSignature):
        return [forward.elements for forward in key.signature.forwards]
    return [key.elements]


def _read_events(segment: Segment) -> None:
    for period in segment.periods:
        period.read_events()
