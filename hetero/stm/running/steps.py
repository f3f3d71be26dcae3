"""Which step of the managed optimizer runs, and by whose method.

Owns the difference between a step of ours and a kept one: by a method that somebody had before `hetero.manage`, which
is torch's alone, at home. The iteration ends with it all the same.
"""

import torch

from hetero.stm.running.segments import Segments
from hetero.stm.standing import Standing

__all__ = ["Steps"]


class Steps:
    """Of one manager.

    Attributes:
        running: the optimizer of ours whose step runs.
        are_kept: the last one came by a method from before.
    """

    def __init__(self, segments: Segments, standing: Standing) -> None:
        self._segments = segments
        self._standing = standing
        self.running: torch.optim.Optimizer | None = None
        self.are_kept = False

    def is_running(self, optimizer: torch.optim.Optimizer) -> bool:
        """``optimizer`` is ours, and its step runs."""
        return self.running is optimizer

    def begin_kept(self, optimizer: torch.optim.Optimizer) -> None:
        """A step of ``optimizer`` begins. Nobody tells if it fails: then the next segment ends it, incomplete."""
        settled = self._standing.settled
        if settled is None or settled.optimizer is not optimizer:
            return
        self.are_kept = self.running is not optimizer
        if self.are_kept:
            settled.forbid()  # gradients and states are expected at home
            if not self._segments.is_in_step:
                self._segments.begin_step()

    def end_kept(self, optimizer: torch.optim.Optimizer) -> None:
        """It has ended, and what it has written has been noted."""
        settled = self._standing.settled
        is_ours = settled is not None and settled.optimizer is optimizer
        if is_ours and self.are_kept and self._segments.is_in_step:
            self._segments.end_step(complete=True)
