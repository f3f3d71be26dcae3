"""Numbers of steps on the device, of parameters that live there.

Owns the copies that fused kernels want beside a parameter; the numbers themselves live at home. To copy each would be a
transfer of four bytes that waits for all that the device has to do. They are few different ones, so whole blocks of
each are filled there instead.
"""

import torch

from hetero.devices.accelerator import ALLOCATION_GRANULARITY

__all__ = ["StepCounts"]

# A single number takes as much of the device.
_IN_BLOCK = ALLOCATION_GRANULARITY // torch.float32.itemsize


class StepCounts:
    """Copies for one call of ``optimizer.step()``."""

    def __init__(self) -> None:
        # By device and value: a block, and how many of it are taken.
        self._blocks: dict[tuple[torch.device, float], tuple[torch.Tensor, int]] = {}

    def copy(self, step: torch.Tensor, device: torch.device) -> torch.Tensor:
        """``step``, one float32 on the host, on ``device``, where nobody else has this copy."""
        key = device, step.item()
        block, taken = self._blocks.get(key, (None, _IN_BLOCK))
        if block is None or taken == _IN_BLOCK:
            block, taken = torch.full((_IN_BLOCK,), key[1], dtype=torch.float32, device=device), 0
        self._blocks[key] = block, taken + 1
        return block[taken].view(step.shape)
