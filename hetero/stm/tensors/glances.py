"""Copies of parameters on the host, of who asks for them as of parameters on a device: ``p.detach().cpu()``.

Averages and logs write so, and get the same from a parameter that is on the device: it is no look as
`hetero.stm.tensors.onlookers` means it; and where what ``detach`` gave had no name, so that nothing else can have been
done with it, nobody can have written to home through it (`hetero.stm.tensors.homeclock`). Owns what tells of that;
invariant: in doubt, it was a look, and there was a write.
"""

import weakref
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from hetero.stm.tensors.managed import ManagedTensor

__all__ = ["note_copied", "note_detached"]

# By id, of what ``detach`` has given at home, as long as it lives, until a copy is asked for. Weakly, both: nobody is
# kept by having been looked at.
_detached: dict[int, tuple["weakref.ref[torch.Tensor]", "weakref.ref[ManagedTensor]"]] = {}


def note_detached(tensor: "ManagedTensor", alias: torch.Tensor) -> None:
    """``alias`` of home is what ``detach`` has given, after `hetero.stm.tensors.onlookers.note_operator`."""
    if alias.dim():
        key = id(alias)
        _detached[key] = weakref.ref(alias, lambda _: _detached.pop(key, None)), weakref.ref(tensor)


def note_copied(source: Any, copy: torch.Tensor, *, is_passing: bool) -> None:
    """``copy`` on the host is what somebody has asked for, of ``source`` there; of a parameter, one was made of it at
    home. ``is_passing``: nobody holds ``source`` but the call that makes the copy."""
    tensor: ManagedTensor | None = getattr(source, "_hetero", None)
    if tensor is not None:  # the parameter itself
        if copy.requires_grad or not copy.dim():
            return
    elif (found := _detached.get(id(source))) is not None and found[0]() is source:
        del _detached[id(source)]
        tensor = found[1]()
        if tensor is not None and is_passing:
            tensor.owner.home_access.take_back(tensor)
    if tensor is not None and tensor.owner.settled is not None:
        tensor.owner.settled.onlookers.note_copy()
