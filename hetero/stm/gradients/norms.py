"""Norms of gradients, taken on the device as they leave.

Owns one number per parameter and order, and when it is true. Invariant: a norm that `get` returns is that of ``p.grad``
as it would be read now; whatever may change or replace the gradient forgets it first. Norms are taken from the
first time on that somebody asked for them: clipping, or `GradScaler`, which looks for what is not finite.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.utils._foreach_utils import _has_foreach_support

from hetero.autograd import outside_inference
from hetero.devices import Accelerator

__all__ = ["GradientNorms", "norms_of_group"]


@dataclass(slots=True)
class _Norms:
    values: torch.Tensor
    known: set[int] = field(default_factory=set)


class GradientNorms:
    """The norms of one manager's gradients, of the orders that were asked for."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._device = accelerator.device
        self._taken: dict[float, _Norms] = {}
        self._lacking: set[int] = set()  # of their gradients, none is taken: no plan has room for it

    def want(self, norm_type: float, dtype: torch.dtype, count: int) -> None:
        """From now on take norms of this order, of gradients of this type, for up to ``count`` parameters."""
        taken = self._taken.get(norm_type)
        if taken is None or taken.values.dtype != dtype:
            with outside_inference(), torch.no_grad():
                values = torch.empty(count, dtype=dtype, device=self._device)
            self._taken[norm_type] = _Norms(values)

    def take(self, index: int, gradient: torch.Tensor, cast: torch.dtype | None = None) -> None:
        """``gradient``, on the device, becomes ``p.grad``: as it is, or cast to another type. One without numbers, or
        that the cast makes smaller, is left to `get`: some norms of these torch refuses, to whoever asks for them. So
        is one that there is no room for."""
        if not gradient.numel() or not (cast is None or _widens(gradient, cast)) or index in self._lacking:
            return
        for order, taken in self._taken.items():
            if (cast or gradient.dtype) == taken.values.dtype:
                with torch.no_grad():
                    (norm,) = norms_of_group([gradient], order, cast=cast)
                    taken.values[index].copy_(norm)
                taken.known.add(index)

    def take_once(self, index: int, order: float, gradient: torch.Tensor) -> None:
        """For the next `get` alone: ``gradient`` is a copy of what somebody may write to."""
        with torch.no_grad():
            (norm,) = norms_of_group([gradient], order)
            self._taken[order].values[index].copy_(norm)

    def rehearse(self, index: int, gradient: torch.Tensor, cast: torch.dtype) -> None:
        """Allocate, for a while, what `take` would: an iteration is measured before anybody has asked for norms, or
        while ``gradient`` is added to others, whose norm is not that of what leaves. If there is no room, `take` does
        nothing for that parameter."""
        if not gradient.numel() or not _widens(gradient, cast):
            return
        try:
            with torch.no_grad():
                norms_of_group([gradient], 2.0, cast=cast)
            self._lacking.discard(index)
        except torch.OutOfMemoryError:
            self._accelerator.note_answered()
            self._lacking.add(index)

    def knows(self, index: int, norm_type: float) -> bool:
        """That of this gradient has been taken."""
        taken = self._taken.get(norm_type)
        return taken is not None and index in taken.known

    def get(
        self, indices: Sequence[int], norm_type: float, at_home: Mapping[int, torch.Tensor]
    ) -> torch.Tensor:
        """On the device, in this order, in a vector. Those of ``at_home``, gradients by index, are taken there; all
        others must be known, or have just been taken once."""
        taken = self._taken[norm_type]
        if at_home:
            with torch.no_grad():
                norms = torch.stack(norms_of_group(list(at_home.values()), norm_type)).to(self._device)
                taken.values[torch.tensor(list(at_home), device=self._device)] = norms
        return torch.stack([taken.values[index] for index in indices])

    def forget(self, index: int) -> None:
        """``p.grad`` may not be any more what left the device."""
        for taken in self._taken.values():
            taken.known.discard(index)

    def forget_all(self) -> None:
        """As `forget`, for every parameter."""
        for taken in self._taken.values():
            taken.known.clear()

    def stop(self) -> None:
        """Take none until somebody wants them again; nothing is left on the device."""
        self._taken.clear()


def norms_of_group(
    tensors: list[torch.Tensor], order: float, *, cast: torch.dtype | None = None, foreach: bool | None = None
) -> list[torch.Tensor]:
    """By the kernels that torch would use for a list of such tensors, all of one device and type. ``foreach``: as it is
    said to torch."""
    if foreach or (foreach is None and _has_foreach_support(tensors, tensors[0].device)):
        return list(torch._foreach_norm(tensors, order, dtype=cast))
    return [torch.linalg.vector_norm(tensor, order, dtype=cast) for tensor in tensors]


def _widens(gradient: torch.Tensor, cast: torch.dtype) -> bool:
    """Else torch takes no norm in that type of it, as it is."""
    return torch.promote_types(gradient.dtype, cast) is cast
