"""Which managers are settled, and whose parameters those are that nobody can tell from ordinary ones meanwhile.

Owns what the user's calls that are replaced for all models ask (`hetero.stm.patches`, `hetero.stm.conversions`).
"""

import weakref
from collections.abc import Iterable

import torch

from hetero.stm.interception.parameter import is_managed, managed_of
from hetero.stm.interception.scopes import in_scope
from hetero.stm.living import Living
from hetero.stm.tensors.managed import ManagedTensor
from hetero.stm.tensors.owner import SettledState

__all__ = [
    "before_change",
    "bring_home",
    "forget",
    "homes_at_rest",
    "note",
    "note_optimizer",
    "record_of",
    "settled_now",
    "settled_on",
    "storages_of",
]

# Weakly: whoever drops a settled model without closing drops all of it.
settled_now: Living[SettledState] = Living()
_by_id: "weakref.WeakValueDictionary[int, ManagedTensor]" = weakref.WeakValueDictionary()


def settled_on(device: torch.device) -> list[SettledState]:
    """Those of a device."""
    return [one for one in settled_now if one.device == device]


def note(tensor: ManagedTensor) -> None:
    """Its parameter is an ordinary one from now on."""
    _by_id[id(tensor.parameter)] = tensor


def forget(tensor: ManagedTensor) -> None:
    """Its parameter is none any more."""
    _by_id.pop(id(tensor.parameter), None)


def record_of(parameter: object) -> ManagedTensor | None:
    """The record behind a parameter that a manager has, settled or not."""
    return managed_of(parameter) if is_managed(parameter) else _by_id.get(id(parameter))


def homes_at_rest() -> set[int]:
    """Storages of homes whose parameters are ordinary ones meanwhile, whoever's: nobody has these but us."""
    return storages_of(list(_by_id.values()))


def storages_of(tensors: Iterable[ManagedTensor]) -> set[int]:
    """In which their homes lie."""
    return {tensor.home.untyped_storage()._cdata for tensor in tensors}


def before_change(optimizer: torch.optim.Optimizer) -> None:
    """It is about to get other states, or another group."""
    for settled in settled_now:
        if settled.optimizer is optimizer:
            settled.leave()


def bring_home(tensors: Iterable[ManagedTensor]) -> bool:
    """Their parameters are at home afterwards; as with torch, whoever has an alias is left behind. False within a
    forward, where they cannot go."""
    owners = {id(tensor.owner.settled) for tensor in tensors}
    for settled in [one for one in settled_now if id(one) in owners]:
        if in_scope() or settled.running:
            return False
        settled.leave(force=True)
    return True


def note_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Its last group is new, or it has other states."""
    for parameter in optimizer.param_groups[-1]["params"] if optimizer.param_groups else ():
        tensor = record_of(parameter)
        if tensor is not None and tensor.owner.settled is not None:
            tensor.owner.settled.note_optimizer(optimizer)
