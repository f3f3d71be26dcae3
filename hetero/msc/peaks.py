"""Peak counters, used without taking them away from the user.

Owns every reset of the device's peak counter. A period's peak can only be read by resetting the counter at the
period's start, and no backend lets anyone set it. So when sampling ends, the peak the user would have seen is
reached again, by allocating up to it for a moment.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch.utils._python_dispatch import _disable_current_modes

from hetero.devices import Accelerator

__all__ = ["PeakKeeper", "unseen"]

# Small enough to be found among cached blocks, large enough that a few hundred of them reach any peak.
_FILL_BYTES = 64 << 20
# CUDA's allocator hands out blocks that are so much larger than what was asked for, if that is more than this.
_MOST_EXCESS = 1 << 20


class PeakKeeper:
    """Per-period peaks of one device, and the highest of all since it was made."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._at_start = accelerator.peak_bytes()
        self._user_peak = self._at_start
        self._highest = accelerator.used_bytes()
        self._looked = 0
        self._is_over = False

    @property
    def highest(self) -> int:
        """Peak since this was made, as far as the counter tells: while the user's own earlier peak was higher
        and nothing was sampled, only what sampling saw and what was in use whenever this was asked."""
        if not self._is_over:
            peak = self._accelerator.peak_bytes()
            now = peak if peak > self._at_start else self._accelerator.used_bytes()
            self._highest = max(self._highest, now)
        return self._highest

    def close(self) -> None:
        """`highest` stays what it is: what others do on the device later is nothing of ours."""
        self._highest, self._is_over = self.highest, True

    def passed(self, nbytes: int) -> int:
        """By how much the counter has passed ``nbytes``, if it has risen since this was asked before; else 0."""
        before, self._looked = self._looked, self._accelerator.peak_bytes()
        return max(0, self._looked - nbytes) if self._looked > before else 0

    def begin(self) -> None:
        """Sampling begins."""
        self._user_peak = self._accelerator.peak_bytes()
        if self._user_peak > self._at_start:
            self._highest = max(self._highest, self._user_peak)
        self._accelerator.reset_peak()

    def next_period(self) -> int:
        """The peak of the period that ends now; the next one begins."""
        peak = self._accelerator.peak_bytes()
        self._highest = max(self._highest, peak)
        self._user_peak = max(self._user_peak, peak)
        self._accelerator.reset_peak()
        return peak

    def end(self) -> None:
        """Sampling is over: the counter shows the user's peak again."""
        peak = self._accelerator.peak_bytes()
        self._highest = max(self._highest, peak)
        self._user_peak = max(self._user_peak, peak)  # since `begin`: what was before it, they may have reset
        with (
            _disable_current_modes()
        ):  # what frees memory for the user's operators has nothing to free for this
            _reach(self._accelerator, self._user_peak)
        self._looked = self._accelerator.peak_bytes()


@contextlib.contextmanager
def unseen(accelerator: Accelerator) -> Iterator[None]:
    """What runs within it, and leaves nothing allocated, does not show in the peak counter."""
    peak = accelerator.peak_bytes()
    try:
        yield
    finally:
        if accelerator.peak_bytes() > peak:
            accelerator.reset_peak()
            _reach(accelerator, peak)


def _reach(accelerator: Accelerator, peak: int) -> None:
    fill: list[torch.Tensor] = []
    try:
        while (short := peak - accelerator.used_bytes()) > 0:
            if accelerator.peak_bytes() >= peak:
                break
            # Never beyond: the counter would tell of a peak that nobody reached, which may pass a budget.
            nbytes = min(short - _MOST_EXCESS, _FILL_BYTES) if short > _MOST_EXCESS else short
            fill.append(torch.empty(nbytes, dtype=torch.uint8, device=accelerator.device))
    except torch.OutOfMemoryError:
        # Another process took the memory meanwhile, or there is a cap: the counter then shows a little less.
        accelerator.note_answered()
