"""Comparing two runs tensor by tensor, bit for bit.

Owns what "identical" means here: equal shape, dtype and bytes. No tolerance.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hetero.cli.training import Outcome

__all__ = ["Difference", "compare"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One compared tensor. ``fault`` is empty where both runs agree, else says how they do not."""

    kind: str
    name: str
    fault: str


def compare(managed: Outcome, unmanaged: Outcome) -> list[Difference]:
    """Every loss, parameter, gradient, buffer and optimizer state of either run, faulty or not."""
    return [
        *(
            Difference(kind="loss", name=f"step {number}", fault=_fault(ours, theirs))
            for number, (ours, theirs) in enumerate(zip(managed.losses, unmanaged.losses, strict=True))
        ),
        *_tensors(managed, unmanaged),
    ]


def _tensors(managed: Outcome, unmanaged: Outcome) -> Iterator[Difference]:
    for key in dict.fromkeys([*unmanaged.tensors, *managed.tensors]):
        kind, name = key
        if key not in managed.tensors:
            fault = "only unmanaged"
        elif key not in unmanaged.tensors:
            fault = "only managed"
        else:
            fault = _fault(managed.tensors[key], unmanaged.tensors[key])
        yield Difference(kind=kind, name=name, fault=fault)


def _fault(ours: Any, theirs: Any) -> str:
    if not isinstance(ours, Tensor) or not isinstance(theirs, Tensor):
        return (
            "" if type(ours) is type(theirs) and bool(ours == theirs) else f"{ours!r}, unmanaged {theirs!r}"
        )
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return f"{tuple(ours.shape)} {ours.dtype}, unmanaged {tuple(theirs.shape)} {theirs.dtype}".replace(
            "torch.", ""
        )
    different = (_bits(ours) != _bits(theirs)).any(-1)
    if not different.any():
        return ""
    wide = torch.complex128 if ours.is_complex() else torch.float64
    apart = (ours.to(wide) - theirs.to(wide)).abs().flatten()[different].max().item()
    return f"{int(different.sum())} of {different.numel()} differ, by {apart:.3g} at most"


def _bits(tensor: Tensor) -> Tensor:
    """Of shape (elements, bytes of one): so that -0.0 is not 0.0, and a NaN is itself."""
    return tensor.contiguous().flatten().view(torch.uint8).view(tensor.numel(), tensor.element_size())
