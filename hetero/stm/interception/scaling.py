"""`GradScaler`, with gradients and steps at home.

Owns what it does to gradients, and how its numbers get there. Where they can be (`hetero.stm.interception.foldable`),
gradients are looked at on the device as they leave: if the largest of its numbers is finite, all are. They are
multiplied when somebody looks at them, or when their update is run. All others torch's own function reads at home.

torch copies its numbers with ``non_blocking=True``, which from CUDA to the host gives pinned memory that is still being
filled, and lets kernels of the host read them at once: with parameters on the device, as it expects them, these copies
go nowhere. Invariant: while a model is managed, kernels of the host read a scale, and whether there was an overflow,
only once they have arrived; and nothing arrives later over what they have written there.
"""

from typing import Any

import torch
from torch.amp import grad_scaler

from hetero.stm.interception.foldable import foldable

__all__ = ["REPLACEMENTS", "bring_home"]

_Replicator: Any = grad_scaler._MultiDeviceReplicator
_get = _Replicator.get
_Scaler: Any = grad_scaler.GradScaler
_unscale_grads = _Scaler._unscale_grads_


def _get_arrived(self: Any, device: torch.device) -> torch.Tensor:
    if device.type == "cpu" and device not in self._per_device_tensors:
        self._per_device_tensors[device] = self.master.to(device=device, copy=True)
    result: torch.Tensor = _get(self, device)
    return result


def _unscale(
    self: Any,
    optimizer: torch.optim.Optimizer,
    inv_scale: torch.Tensor,
    found_inf: torch.Tensor,
    allow_fp16: bool,
) -> dict[torch.device, torch.Tensor]:
    tensors = foldable(parameter for group in optimizer.param_groups for parameter in group["params"])
    if not tensors:
        found: dict[torch.device, torch.Tensor] = _unscale_grads(
            self, optimizer, inv_scale, found_inf, allow_fp16
        )
        return found
    access = tensors[0].owner.gradient_access
    with_numbers = [tensor for tensor in tensors if tensor.home.numel()]
    if with_numbers:
        with torch.no_grad():
            found_inf.copy_(access.norms(with_numbers, float("inf")).isfinite().all().logical_not())
    access.scale(tensors, inv_scale)
    return {found_inf.device: found_inf}


def bring_home(optimizer: torch.optim.Optimizer) -> None:
    """What `GradScaler` has set on an optimizer that unscales by itself, for a step at home. It takes it off again."""
    for name in ("grad_scale", "found_inf"):
        value = getattr(optimizer, name, None)
        if isinstance(value, torch.Tensor) and value.device.type != "cpu":
            setattr(optimizer, name, value.cpu())


REPLACEMENTS: list[tuple[Any, str, Any]] = [
    (_Replicator, "get", _get_arrived),
    (_Scaler, "_unscale_grads_", _unscale),
]
