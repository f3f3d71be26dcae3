"""Numbers of steps on the device, of parameters that live there.

Owns the copies that fused kernels want beside a parameter; the numbers themselves live at home. To copy each would be a
transfer of four bytes that waits for all that the device has to do. Most often they are equal, so whole blocks of one
number are filled there instead.
"""

import torch

from hetero.devices import ALLOCATION_GRANULARITY

__all__ = ["StepCounts"]

# A single number takes as much of the device.
_IN_BLOCK = ALLOCATION_GRANULARITY // torch.float32.itemsize


class StepCounts:
    """Copies for one call of ``optimizer.step()``."""

    def __init__(self) -> None:
        # Only the last block is kept here: whoever has the copies has room for a block to each.
        self._block: torch.Tensor | None = None
        self._key: tuple[torch.device, float] | None = None
        self._taken = 0

    def copy(self, step: torch.Tensor, device: torch.device) -> torch.Tensor:
        """``step``, one float32 on the host, on ``device``, where nobody else has this copy."""
        key = device, step.item()
        if self._block is None or key != self._key or self._taken == _IN_BLOCK:
            self._block = None
            self._block = torch.full((_IN_BLOCK,), key[1], dtype=torch.float32, device=device)
            self._key, self._taken = key, 0
        self._taken += 1
        return self._block[self._taken - 1].view(step.shape)
