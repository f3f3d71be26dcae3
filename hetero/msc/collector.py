"""The collector: divides an iteration into segments and periods, and measures them.

Owns when counters are read and events recorded, and to which period and segment what happens belongs
(`hetero.msc.segments`).
"""

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Protocol

import torch

from hetero.devices import Accelerator, host_memory_used
from hetero.msc.peaks import PeakKeeper
from hetero.msc.periods import Gradient, HandedOver, Period, SegmentKey, Wait
from hetero.msc.segments import Copy, Segment

__all__ = ["MemStatsCollector", "ModelBytes"]


class ModelBytes(Protocol):
    """What the collector needs of the ledger."""

    @property
    def device_bytes(self) -> int:
        """Of model data there."""

    @property
    def host_bytes(self) -> int:
        """Likewise, homes included."""

    @property
    def activation_bytes(self) -> tuple[int, int]:
        """Of the two above, saved tensors: on the device and on the host."""


class Others(Protocol):
    """Other managers of the device (`hetero.stm.sharing.Sharing`)."""

    def segments_of_others(self) -> int:
        """How many have begun, so far."""

    def away_or_living(self) -> int:
        """As `Period.others_away_bytes`, now."""

    def home_bytes_of_others(self) -> int:
        """As `Period.others_home_bytes`, now."""

    def copy_bytes_of_others(self) -> int:
        """As `Period.others_copy_bytes`, now."""


class _NoOthers:
    def segments_of_others(self) -> int:
        return 0

    def away_or_living(self) -> int:
        return 0

    def home_bytes_of_others(self) -> int:
        return 0

    def copy_bytes_of_others(self) -> int:
        return 0


class MemStatsCollector:
    """Measures periods. One per manager; fed by `hetero.stm`."""

    def __init__(
        self, accelerator: Accelerator, model_bytes: ModelBytes, device_budget: int | None = None
    ) -> None:
        self._accelerator = accelerator
        self._model_bytes = model_bytes
        self.peaks = PeakKeeper(accelerator, device_budget)
        self._segment: Segment | None = None
        self._period = Period(operands=())
        self._relieving = False
        # Of the current segment: its memory is being measured, and the times of its periods. Plain attributes, because
        # every operator looks at them.
        self.is_sampling = False
        self.is_clocked = False
        # The last gradient of the period that is measured: index, bytes, what there was beside it, and had been made.
        self._handed_over: tuple[int, int, int, int | None] | None = None
        # Model data on the device since the period began, or was relieved, and what others have living there.
        self._model_base = self._others_base = 0
        self._is_between = False  # the period's operator is over
        self._homes_changing: list[int] = []  # threads within `homes_changing`, as often as they are
        self.others: Others = _NoOthers()  # set by the manager
        self._others_begun = 0  # segments, at the period's beginning
        self.segments = 0  # of ours, so far
        self.total = Period(operands=())  # sums over the manager's life
        self.largest_growth = 0

    def begin_segment(self, key: SegmentKey, *, sample: bool, time: bool = False) -> Segment:
        """What follows belongs to a new segment. Its first period has no operands."""
        assert self._segment is None, "the segment before has not been ended"
        self._segment = Segment(key, sample, timed=time and not sample)
        self.segments += 1
        self.is_sampling, self.is_clocked = sample, sample or time
        if sample:
            self.peaks.begin()
        elif time:
            self._segment.opened = self._event()
        else:
            # Nobody asks for the single periods of an iteration that is not measured: one for all of them.
            self._segment.periods.append(self._period)
        return self._segment

    def end_segment(self) -> None:
        """The current segment, if any, is over."""
        segment = self._segment
        if segment is None:
            return
        self._close_period()
        self._segment = None
        self.is_sampling = self.is_clocked = False
        self._period = Period(operands=())
        if segment.sampled:
            self.peaks.end()
        elif segment.timed:
            segment.closed = self._event()

    def moment(
        self,
        name: object,
        operands: tuple[int, ...],
        held: tuple[int, ...] = (),
        held_saved: tuple[tuple[int, int], ...] = (),
    ) -> None:
        """A sampling moment: before the operator, before any layout change.

        ``held``, ``held_saved``: what cannot leave during this period although the operator does not name it.
        """
        segment = self._segment
        if segment is None or not (segment.sampled or segment.timed):
            return
        self._close_period()
        if segment.sampled:
            self.peaks.take_turn()
        self._period = Period(operands=operands, held=held, name=name, held_saved=held_saved)
        segment.periods.append(self._period)
        if segment.timed:
            self._period.reached = self._event()

    def operands_ready(self) -> None:
        """Layout changes for the current operator are done; it runs next."""
        segment = self._segment
        if segment is not None and segment.sampled:
            period = self._period
            # What has just left is no peak of what follows, nor more than the last period's. What blocks have more than
            # was asked for is another matter: it may be so again for others that are there then.
            period.excess_bytes = max(period.excess_bytes, self.peaks.excess())
            self.peaks.next_period()
            self._is_between = False
            period.model_bytes = self._model_base = self._model_bytes.device_bytes
            period.host_model_bytes = self._model_bytes.host_bytes
            period.activation_bytes, on_host = self._model_bytes.activation_bytes
            period.host_model_bytes -= on_host
            period.begin = self._event()
            period.used_bytes = self._accelerator.used_bytes()
            period.asked_bytes, _ = self._accelerator.asked_bytes()
            period.others_away_bytes = self.others.away_or_living()
            period.others_home_bytes = self._others_base = self.others.home_bytes_of_others()
            period.others_copy_bytes = self.others.copy_bytes_of_others()
            self._others_begun = self.others.segments_of_others()
        elif segment is not None and segment.timed:
            self._period.begin = self._event()

    def operator_over(self) -> None:
        """The current operator has run: what comes until the next one is between the two."""
        if self.is_sampling and self._period.begin is not None:
            self._read_peak(self._period)
            self._is_between = True

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Around what makes compute wait, or the host for compute's sake; while `is_clocked`."""
        period = self._period
        before = self._event()
        yield
        period.waits.append(Wait(before, self._event(), period.begin is not None))

    def waiting_for_host(self) -> contextlib.AbstractContextManager[None]:
        """As `waiting`, for a parameter's update; nothing while not `is_clocked`."""
        return self.waiting() if self.is_clocked else contextlib.nullcontext()

    def note_gradient(self, index: int, nbytes: int, *, own_nbytes: int) -> None:
        """A parameter's gradient is complete on the device and about to go home; ``own_nbytes`` of its memory are
        nobody else's."""
        if self.is_clocked:
            period = self._period
            period.gradients.append(Gradient(index, nbytes, self._event(), len(period.waits)))
            if self.is_sampling and period.begin is not None:
                self._close_handed_over()
                others = self.others.home_bytes_of_others()
                beside = self._accelerator.asked_bytes()[0] - self._model_base - others - own_nbytes
                self._handed_over = index, own_nbytes, beside, self._accelerator.made_bytes()

    def note_kept(self, nbytes: int) -> None:
        """A gradient of ``nbytes``, which is there, is model data from now on; negative: it was, and has gone."""
        if self.is_sampling and self._period.begin is not None:
            self._read_peak(self._period)
            self._model_base += nbytes

    def note_queued(self, indices: tuple[int, ...]) -> None:
        """The updates of these parameters are done later, in this order."""
        if self._segment is not None:
            self._segment.queued = indices

    def note_copy(self, nbytes: int, begin: torch.Event, end: torch.Event, *, is_upload: bool) -> None:
        """A transfer was queued between these events, while `is_clocked`."""
        segment = self._segment
        if segment is not None and segment.timed:
            segment.copies.append(Copy(is_upload, nbytes, begin, end))

    @contextlib.contextmanager
    def evicting(self, *, for_operator: bool) -> Iterator[None]:
        """Around evictions in the middle of a period: non-model data are counted against what was there then.

        ``for_operator``: one that ran out of memory, and is tried again.
        """
        period = self._period
        self._relieving = for_operator
        period.relieved = period.relieved or for_operator
        if self.is_sampling and period.begin is not None:
            self._read_peak(period)
        try:
            yield
        finally:
            self._relieving = False
        self._begin_anew()

    def count_fetch(self, nbytes: int) -> None:
        """A copy to the device was started."""
        self._note_issued()
        self._period.fetched_bytes += nbytes
        self.total.fetched_bytes += nbytes

    def count_eviction(self, nbytes: int, written_back: int) -> None:
        """A device copy of ``nbytes`` was dropped; ``written_back`` bytes went to the host."""
        self._period.evicted_bytes += nbytes
        self._period.written_bytes += written_back
        self.total.evicted_bytes += nbytes
        self.total.written_bytes += written_back

    def count_activation_out(self, nbytes: int) -> None:
        """A saved tensor left the device."""
        self._note_issued()
        self._period.activation_out_bytes += nbytes
        self.total.activation_out_bytes += nbytes

    def count_activation_in(self, nbytes: int) -> None:
        """It comes back."""
        self._note_issued()
        self._period.activation_in_bytes += nbytes
        self.total.activation_in_bytes += nbytes

    def count_spared(self, nbytes: int) -> None:
        """It was to come back, and had not left yet."""
        self._period.spared_bytes += nbytes

    def note_shed(self, key: tuple[int, int]) -> None:
        """A record left to make room."""
        if self._relieving and self.is_sampling and any(saved == key for saved, _ in self._period.saved):
            self._period.lost_own = True

    def note_given(self) -> None:
        """Others on the device have made room, with what they may have there again."""
        if not self.is_sampling:
            return
        if self._relieving:
            self._period.lost_own = True
        else:
            self._period.others_gave = True

    def note_relieved_by_others(self) -> None:
        """Another manager, whose guard is around this one's operators as well, has made room for the one that runs
        now: of its own, for all that is known, which it may have there again."""
        if self.is_sampling and self._period.begin is not None and self.peaks.has_turn:
            self._read_peak(self._period)
            self._begin_after_others()
            self._period.relieved = self._period.lost_own = True

    @contextlib.contextmanager
    def homes_changing(self) -> Iterator[None]:
        """Around moves of what lives on the device, of ours or of others, and steps of ours: what these take is no
        non-model data. Plans have it by itself."""
        if self.is_sampling and self._period.begin is not None:
            self._read_peak(self._period)
        thread = threading.get_ident()
        self._homes_changing.append(thread)
        try:
            yield
        finally:
            self._homes_changing.remove(thread)
            self._begin_anew()

    def note_saved(self, key: tuple[int, int], nbytes: int) -> None:
        """Forward saved a record (`hetero.stm.activations.offload`)."""
        if self.is_sampling:
            self._period.saved.append((key, nbytes))

    def note_used(self, key: tuple[int, int]) -> None:
        """Backward reads it."""
        if self.is_sampling:
            self._period.used.append(key)

    def note_dropped(self, key: tuple[int, int]) -> None:
        """No graph needs it any more."""
        if self.is_sampling:
            self._period.dropped.append(key)

    def count_stall(self, seconds: float) -> None:
        """Compute waited for a copy."""
        self._period.stall_seconds += seconds
        self.total.stall_seconds += seconds

    def count_stale(self, index: int) -> None:
        """A device copy turned out to be older than its home."""
        self._period.invalidates.append(index)

    def count_unplanned(self, fetches: int) -> None:
        """Fetches that no plan foresaw."""
        self._period.unplanned_fetches += fetches
        self.total.unplanned_fetches += fetches

    def headroom(self, budget: int) -> int:
        """Bytes model data may take if the coming period grows as the largest one did so far.

        For periods that nobody has measured yet. Reads the device's counter.
        """
        return budget - self.non_model_bytes() - self.largest_growth

    def non_model_bytes(self) -> int:
        """Device memory that is no model data, now. Reads the device's counter."""
        return self._accelerator.used_bytes() - self._model_bytes.device_bytes

    def asked_non_model_bytes(self) -> tuple[int, int]:
        """Of `non_model_bytes`, what was asked for, and what is more."""
        asked, excess = self._accelerator.asked_bytes()
        return asked - self._model_bytes.device_bytes, excess

    def _close_period(self) -> None:
        period = self._period
        if not self.is_sampling or period.begin is None:
            return
        period.end = self._event()
        self._close_handed_over()
        self._read_peak(period)
        if self.others.segments_of_others() != self._others_begun:
            period.others_away_after = self.others.away_or_living()
        period.host_bytes = host_memory_used()
        self.largest_growth = max(self.largest_growth, period.peak_bytes - period.used_bytes)

    def _close_handed_over(self) -> None:
        if self._handed_over is None:
            return
        index, nbytes, beside, made_then = self._handed_over
        self._handed_over = None
        made_now = self._accelerator.made_bytes()
        made = None if made_then is None or made_now is None else made_now - made_then
        # Not known where nobody counts; `Period.non_model_with` takes the period's peak then.
        beside = sys.maxsize if made is None or made < 0 else beside + made
        self._period.handed_over.append(HandedOver(index, nbytes, beside))

    def _note_issued(self) -> None:
        """A transfer, at the moment that has been reached: not one within the operator, whose time it is."""
        if self._period.begin is None:
            self._period.issued += 1

    def _begin_anew(self) -> None:
        """Something has left the device, or has come to live there: what there was before is no peak of what follows,
        and what lives there now is no non-model data."""
        self._begin_after_others()
        # The period's own records are no model data before it ends: as many as there are now would be forgotten.
        self._model_base = self._model_bytes.device_bytes - self._own_bytes()

    def _begin_after_others(self) -> None:
        """As `_begin_anew`, of others alone."""
        if self.is_sampling and self._period.begin is not None:
            self.peaks.next_period()
            self._others_base = self.others.home_bytes_of_others()

    def _own_bytes(self) -> int:
        """Of the records that the period has saved so far. One that was shed counts as well: then it is guarded."""
        period = self._period
        return sum(nbytes for key, nbytes in period.saved if key not in period.dropped)

    def _read_peak(self, period: Period) -> None:
        if threading.get_ident() in self._homes_changing:
            return
        excess = self.peaks.excess()
        peak = self.peaks.next_period()
        period.peak_bytes = max(period.peak_bytes, peak)
        period.excess_bytes = max(period.excess_bytes, excess)
        # A buffer that the model has replaced counts although it is gone; so does what has come to live there of others
        # since then, nobody knows when.
        others = min(self._others_base, self.others.home_bytes_of_others())
        non_model_bytes = max(0, peak - excess - self._model_base - others)
        period.non_model_bytes = max(period.non_model_bytes, non_model_bytes)
        if self._is_between:
            period.between_bytes = max(period.between_bytes, non_model_bytes)

    def _event(self) -> torch.Event:
        event = torch.Event(device=self._accelerator.device, enable_timing=True)
        event.record(self._accelerator.compute_stream())
        return event
