"""`GradScaler`, with gradients and steps at home.

Owns how its numbers get there. torch copies them with ``non_blocking=True``, which from CUDA to the host gives pinned
memory that is still being filled, and lets kernels of the host read them at once: with parameters on the device, as it
expects them, these copies go nowhere. Invariant: while a model is managed, kernels of the host read a scale, and
whether there was an overflow, only once they have arrived; and nothing arrives later over what they have written there.
"""

from typing import Any

import torch
from torch.amp import grad_scaler

__all__ = ["REPLACEMENTS", "bring_home"]

_Replicator: Any = grad_scaler._MultiDeviceReplicator
_get = _Replicator.get


def _get_arrived(self: Any, device: torch.device) -> torch.Tensor:
    if device.type == "cpu" and device not in self._per_device_tensors:
        self._per_device_tensors[device] = self.master.to(device=device, copy=True)
    result: torch.Tensor = _get(self, device)
    return result


def bring_home(optimizer: torch.optim.Optimizer) -> None:
    """What `GradScaler` has set on an optimizer that unscales by itself, for a step at home. It takes it off again."""
    for name in ("grad_scale", "found_inf"):
        value = getattr(optimizer, name, None)
        if isinstance(value, torch.Tensor) and value.device.type != "cpu":
            setattr(optimizer, name, value.cpu())


REPLACEMENTS: list[tuple[Any, str, Any]] = [(_Replicator, "get", _get_arrived)]
