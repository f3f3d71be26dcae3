"""Copies of parameters on the host, of who asks for them as of parameters on a device: ``p.detach().cpu()``.

Averages and logs write so, and get the same from a parameter that is on the device: it is no look as
`hetero.stm.tensors.onlookers` means it; and where the two calls follow one another, as there, nobody can have written
to home through what ``detach`` gave (`hetero.stm.tensors.homeclock`). Owns what tells of that; invariant: in doubt, it
was a look, and there was a write.

[Note: one expression]
What a call returns is what the next one is called on if the code between them does nothing but load other arguments:
no name is given, and no third call can have had it. So it is the code that is asked, of the function that made both
calls. Reference counts would not tell: a function of the user's may have had it, and have returned it since.
"""

import dis
import functools
import sys
import types
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from hetero.stm.tensors.managed import ManagedTensor

__all__ = ["note_copied", "note_detached"]


class _Detached(NamedTuple):
    """What ``detach`` has given of a parameter at home, and which instruction of which code has called it. Weakly:
    nobody is kept by having been looked at."""

    alias: "weakref.ref[torch.Tensor]"
    tensor: "weakref.ref[ManagedTensor]"
    code: types.CodeType
    instruction: int


# By the alias's id, as long as it lives, until a copy is asked for.
_detached: dict[int, _Detached] = {}
_OURS = __name__.partition(".")[0]
# Beside what loads: of some versions of Python.
_BETWEEN_CALLS = frozenset({"CACHE", "EXTENDED_ARG", "KW_NAMES", "NOP", "PRECALL", "PUSH_NULL"})


def note_detached(tensor: "ManagedTensor", alias: torch.Tensor) -> None:
    """``alias`` of home is what ``detach`` has given, after `hetero.stm.tensors.onlookers.note_operator`."""
    if alias.dim():
        key, frame = id(alias), sys._getframe(1)
        while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] == _OURS:
            frame = frame.f_back
        reference = weakref.ref(alias, lambda _: _detached.pop(key, None))
        _detached[key] = _Detached(reference, weakref.ref(tensor), frame.f_code, frame.f_lasti)


def note_copied(source: Any, copy: torch.Tensor, asker: types.FrameType) -> None:
    """``copy`` on the host is what ``asker`` has asked for, of ``source`` there; of a parameter, one was made of it at
    home."""
    tensor: ManagedTensor | None = getattr(source, "_hetero", None)
    if tensor is not None:  # the parameter itself
        if copy.requires_grad or not copy.dim():
            return
    elif (found := _detached.get(id(source))) is not None and found.alias() is source:
        del _detached[id(source)]
        tensor = found.tensor()
        is_next = found.code is asker.f_code and _are_one_expression(*found[2:], asker.f_lasti)
        if tensor is not None and is_next:
            tensor.owner.home_access.note_given_back(tensor)
    if tensor is not None and tensor.owner.settled is not None:
        tensor.owner.settled.onlookers.note_copy()


@functools.lru_cache(maxsize=256)
def _are_one_expression(code: types.CodeType, first: int, second: int) -> bool:
    """[Note: one expression], of two calls, by places in ``code`` that lie in their instructions."""
    names = [each.opname for each in dis.get_instructions(code) if first < each.offset <= second]
    between = names[:-1]  # the last is the second call
    return bool(names) and all(name.startswith("LOAD_") or name in _BETWEEN_CALLS for name in between)
