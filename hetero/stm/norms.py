"""Norms of gradients, taken on the device as they leave.

Owns one number per parameter, and when it is true. Invariant: a norm that `get` returns is that of ``p.grad`` as it
would be read now; whatever may change or replace the gradient forgets it first. Norms are taken from the
first time on that somebody asked for them.
"""

from collections.abc import Sequence

import torch
from torch.utils._foreach_utils import _has_foreach_support

__all__ = ["GradientNorms"]


class GradientNorms:
    """The norms of one manager's gradients, of the kind that was asked for last."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._wanted: float | None = None
        self._values: torch.Tensor | None = None
        self._known: set[int] = set()

    def want(self, norm_type: float, dtype: torch.dtype, count: int) -> None:
        """From now on take norms of this order, of gradients of this type, for up to ``count`` parameters."""
        values = self._values
        if self._wanted != norm_type or values is None or values.dtype != dtype:
            self._known.clear()
            self._wanted = norm_type
            with torch.inference_mode(False), torch.no_grad():
                self._values = torch.empty(count, dtype=dtype, device=self._device)

    def take(self, index: int, gradient: torch.Tensor, cast: torch.dtype | None = None) -> None:
        """``gradient``, on the device, becomes ``p.grad``: as it is, or cast to another type."""
        values, order = self._values, self._wanted
        if values is None or order is None or (cast or gradient.dtype) != values.dtype:
            return
        with torch.no_grad():
            # The kernel that torch would use for a list of such gradients.
            if _has_foreach_support([gradient], gradient.device):
                (norm,) = torch._foreach_norm([gradient], order, dtype=cast)
            else:
                norm = torch.linalg.vector_norm(gradient, order, dtype=cast)
            values[index].copy_(norm)
        self._known.add(index)

    def get(self, indices: Sequence[int], norm_type: float) -> torch.Tensor | None:
        """Their norms on the device, in this order, in a vector; None if any is not known."""
        if self._values is None or norm_type != self._wanted or not self._known.issuperset(indices):
            return None
        return torch.stack([self._values[index] for index in indices])

    def forget(self, index: int) -> None:
        """``p.grad`` may not be any more what left the device."""
        self._known.discard(index)

    def forget_all(self) -> None:
        """As `forget`, for every parameter."""
        self._known.clear()

    def stop(self) -> None:
        """Take none until somebody wants them again; nothing is left on the device."""
        self._known.clear()
        self._wanted = self._values = None
