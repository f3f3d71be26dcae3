"""Models of one shape, whose parameters the loop may combine with each other.

Owns who they are. A follower (a target network, a teacher that is an average, a momentum encoder without the head) is
brought up to date with ``p.data.lerp_(q.data, 0.1)`` now and then, between plain tensors, of which nobody of ours is
told: they have to be on one device. So kin settle together, and leave together. As long as nobody has been given
anything of theirs, those that cannot settle, or not in the same moment, are waited for a few times only.

[Note: kin] Two managers of a device are, if each shape of the one's parameters is among the other's, as often, and the
one has three quarters of the other's at least. One that has never run, and whose parameters nobody has looked at, is
nobody's kin yet: models may be trained one after another. Those of one optimizer get it back one after another. And
what runs on another thread is left alone: nobody knows what that does at the moment.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

import torch

from hetero.stm.tensors.managed import ManagedTensor

__all__ = ["Shapes", "kin_of", "shapes_of"]

Shapes = Counter[torch.Size]


class _Member(Protocol):
    """``takes_part``: it has run, or somebody has looked at its parameters, and they may settle in this process."""

    device: torch.device
    optimizer: torch.optim.Optimizer | None

    @property
    def shapes(self) -> Shapes: ...

    @property
    def takes_part(self) -> bool: ...


_M = TypeVar("_M", bound=_Member)


def shapes_of(tensors: Sequence[ManagedTensor]) -> Shapes:
    """How many parameters there are of each shape."""
    return Counter(tensor.home.shape for tensor in tensors)


def kin_of(one: _M, everyone: Iterable[_M]) -> list[_M]:
    """Those of ``everyone`` that are kin of ``one``: [Note: kin]."""
    return [
        other
        for other in everyone
        if other is not one
        and other.device == one.device
        and other.takes_part
        and (other.optimizer is None or other.optimizer is not one.optimizer)
        and _are_alike(one.shapes, other.shapes)
    ]


def _are_alike(one: Shapes, other: Shapes) -> bool:
    fewer, more = sorted((one, other), key=Counter.total)
    return fewer <= more and 4 * fewer.total() >= 3 * more.total()
