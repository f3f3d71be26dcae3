"""Copies of parameters on the host, of who asks for them as of parameters on a device: ``p.detach().cpu()``.

Averages and logs write so, and get the same from a parameter that is on the device. So it is no look as
`hetero.stm.tensors.onlookers` means it. Nor has anybody written to the memory that ``detach`` gave them, if it had no
name: nothing can have been done with it in between. Owns what tells of that; invariant: in doubt, it was a look.
"""

import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch

from hetero.stm.tensors.exposure import is_temporary

if TYPE_CHECKING:
    from hetero.stm.tensors.managed import ManagedTensor

__all__ = ["note_copied", "note_detached"]


class _Here(threading.local):
    # Weakly, both: nobody is kept by having been looked at.
    detached: "tuple[weakref.ref[torch.Tensor], weakref.ref[ManagedTensor]] | None" = None


_here = _Here()


def note_detached(tensor: "ManagedTensor", alias: torch.Tensor) -> None:
    """``alias`` of home is what ``detach`` has given last on this thread, after `note_operator`."""
    _here.detached = (weakref.ref(alias), weakref.ref(tensor)) if alias.dim() else None


def note_copied(source: Any, copy: torch.Tensor, references: int) -> None:
    """``copy`` on the host is what somebody has asked for, of ``source`` there, to which its method has found so many
    ``references``."""
    tensor: ManagedTensor | None = getattr(source, "_hetero", None)
    if tensor is not None:  # the parameter itself
        if copy.requires_grad or not copy.dim():
            return
    elif (last := _here.detached) is not None and last[0]() is source and is_temporary(references):
        _here.detached, tensor = None, last[1]()
        if tensor is not None:
            tensor.clock.note_given_back()
    if tensor is not None and tensor.owner.settled is not None:
        tensor.owner.settled.onlookers.forget_look()
