"""Peak counters, used without taking them away from the user.

Owns every reset of the device's peak counter. A period's peak can only be read by resetting the counter at the
period's start, and no backend lets anyone set it. So while anybody measures, the peak of each who looks is kept here,
the user's among them: when they look themselves, or nobody measures any more, theirs is reached again, by allocating up
to it for a moment.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator

import torch
from torch.utils._python_dispatch import _disable_current_modes

from hetero.devices import MOST_EXCESS, Accelerator

__all__ = ["PeakKeeper", "unseen"]

# Small enough to be found among cached blocks, large enough that a few hundred of them reach any peak.
_FILL_BYTES = 64 << 20

_USER = object()


class PeakKeeper:
    """Per-period peaks of one device, and the highest of all since it was made. ``limit``: of the device; `close` if
    there is one.

    Attributes:
        latest: no more was there between the last two times that `passed` was asked.
    """

    def __init__(self, accelerator: Accelerator, limit: int | None = None) -> None:
        self._accelerator = accelerator
        self._counter = _counter_of(accelerator)
        self._limit = limit
        self._at_start = self._counter.users_peak()
        self._highest = accelerator.used_bytes()
        self._looked = self.latest = 0
        # The user's peak is above the limit, and the counter would not tell of a lower one that is as well.
        self._is_watching = False
        self._is_over = False

    @property
    def highest(self) -> int:
        """Peak since this was made, as far as the counter tells: while the user's own earlier peak was higher
        and nothing was sampled, only what sampling saw and what was in use whenever this was asked."""
        if not self._is_over:
            peak = self._counter.users_peak()
            now = peak if peak > self._at_start else self._accelerator.used_bytes()
            self._highest = max(self._highest, now)
        return self._highest

    def passed(self, nbytes: int) -> int:
        """By how much ``nbytes`` have been passed since this was asked before, as far as the counter tells; else 0."""
        if self._is_watching:
            self.latest = self.next_period()
            return max(0, self.latest - nbytes)
        before, self._looked = self._looked, self._counter.users_peak()
        self.latest = self._looked
        return max(0, self._looked - nbytes) if self._looked > before else 0

    def begin(self) -> None:
        """Sampling begins."""
        self._is_watching = False
        peak = self._counter.users_peak()
        if peak > self._at_start:
            self._highest = max(self._highest, peak)
        self._counter.begin(self)

    def take_turn(self) -> None:
        """What runs from now on is theirs, until another's turn comes, or the caller's."""
        self._counter.take_turn(self)

    def end_turn(self) -> None:
        """What runs from now on is the caller's."""
        self._counter.end_turn()

    @property
    def has_turn(self) -> bool:
        """While sampling: what runs now is theirs, or the caller's."""
        return self._counter.counts_for(self)

    def excess(self) -> int:
        """Of the peak of the period that runs, what nobody has asked for."""
        return self._accelerator.peak_excess_bytes()

    def next_period(self) -> int:
        """The peak of the period that ends now; the next one begins."""
        peak = self._counter.next_period(self)
        self._highest = max(self._highest, peak)
        return peak

    def end(self) -> None:
        """Sampling is over."""
        self.next_period()
        self._looked = self._counter.users_peak()
        self._is_watching = self._limit is not None and self._looked > self._limit
        self._counter.end(self, watches=self._is_watching)

    def close(self) -> None:
        """Nothing is measured any more, and `highest` stays what it is: what others do on the device later is not
        ours."""
        self._highest, self._is_over = self.highest, True
        if self._is_watching:
            self._is_watching = False
            self._counter.end(self)


@contextlib.contextmanager
def unseen(accelerator: Accelerator) -> Iterator[None]:
    """What runs within it, and leaves nothing allocated, does not show in the peak counter."""
    counter = _counter_of(accelerator)
    peak = accelerator.peak_bytes()
    try:
        yield
    finally:
        counter.go_back(peak)


class _Counter:
    """Of one device. ``_peaks``: of each who measures or watches now, and of the user, since they last asked; without
    what the counter shows. Empty while there is nobody: then it is the user's. Of those who measure, it is the one
    whose turn came last (``_measuring``): what others have while they run, they can be asked for. What the caller has,
    nobody can be: it counts for all of them."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._peaks: dict[object, int] = {}
        self._measuring: list[object] = []
        self._is_callers = False
        self._lock = threading.RLock()
        self._is_shown = False
        self._let_go: Callable[[], None] = lambda: None

    def users_peak(self) -> int:
        """What the counter would show if nobody measured."""
        with self._lock:
            return max(self._peaks.get(_USER, 0), self._accelerator.peak_bytes())

    def begin(self, who: object) -> None:
        """``who`` measures from now on."""
        with self._lock:
            if not self._peaks:
                self._peaks[_USER] = 0
                self._let_go = self._accelerator.watch_looks(self._shown)
            self._start_anew()
            self._peaks[who] = 0
            self._measuring.append(who)
            self._is_callers = False

    def take_turn(self, who: object) -> None:
        """``who`` runs now, and whoever has begun to measure since then does not: one backward may come through one
        model, another, and the first again."""
        with self._lock:
            if self._measuring[-1] is not who or self._is_callers:
                self._start_anew()
                self._measuring.remove(who)
                self._measuring.append(who)
                self._is_callers = False

    def end_turn(self) -> None:
        """The caller runs now."""
        with self._lock:
            if self._measuring and not self._is_callers:
                self._start_anew()
                self._is_callers = True

    def counts_for(self, who: object) -> bool:
        """What runs now is theirs to measure."""
        return self._is_callers or who not in self._measuring[:-1]

    def next_period(self, who: object) -> int:
        """The peak since they last asked; 0 if they have ended, which another's thread cannot know."""
        with self._lock:
            if who not in self._peaks:
                return 0
            self._start_anew()
            peak, self._peaks[who] = self._peaks[who], 0
            return peak

    def end(self, who: object, *, watches: bool = False) -> None:
        """They do not measure any more; ``watches``: and see all that there is."""
        with self._lock:
            self._start_anew()
            if who in self._measuring:
                self._measuring.remove(who)
            if not watches:
                del self._peaks[who]
            if self._peaks.keys() == {_USER}:
                self._let_go()
                self._reach(self._peaks.pop(_USER))

    def go_back(self, peak: int) -> None:
        """The counter is to show what it has shown before, as if nothing had been allocated since."""
        with self._lock:
            if self._accelerator.peak_bytes() > peak:
                self._accelerator.reset_peak()
                self._reach(peak)

    @contextlib.contextmanager
    def _shown(self) -> Iterator[None]:
        """Around a look of the user's, who may also set the counter back."""
        with self._lock:
            if self._is_shown or not self._peaks:
                yield
                return
            self._is_shown = True
            try:
                with self._accelerator.apart():
                    self._start_anew()
                    self._reach(self._peaks[_USER])
                    try:
                        yield
                    finally:
                        self._peaks[_USER] = self._accelerator.peak_bytes()
            finally:
                self._is_shown = False

    def _start_anew(self) -> None:
        """What the counter shows is that of all whom it concerns."""
        peak = self._accelerator.peak_bytes()
        for who, before in self._peaks.items():
            if self.counts_for(who):
                self._peaks[who] = max(before, peak)
        self._accelerator.reset_peak()

    def _reach(self, peak: int) -> None:
        accelerator = self._accelerator
        if accelerator.peak_bytes() >= peak:
            return
        fill: list[torch.Tensor] = []
        # Under no cap of ours: at the budget, it would hide that this has been passed. And what frees memory for the
        # user's operators has nothing to free for this.
        with _disable_current_modes(), accelerator.uncapped():
            try:
                while (short := peak - accelerator.used_bytes()) > 0:
                    # Never beyond: the counter would tell of a peak that nobody reached, which may pass a budget.
                    nbytes = min(short - MOST_EXCESS, _FILL_BYTES) if short > MOST_EXCESS else short
                    fill.append(torch.empty(nbytes, dtype=torch.uint8, device=accelerator.device))
                    if accelerator.peak_bytes() >= peak:
                        break
            except torch.OutOfMemoryError:
                # Another process took the memory meanwhile: the counter then shows a little less.
                accelerator.note_answered()
            fill.clear()  # before there is a cap again


_counters: dict[torch.device, _Counter] = {}


def _counter_of(accelerator: Accelerator) -> _Counter:
    return _counters.setdefault(accelerator.device, _Counter(accelerator))
