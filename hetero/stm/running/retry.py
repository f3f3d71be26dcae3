"""An operator that has run out of memory, tried again.

Owns what is repeated and what is not. Operators allocate before they write, so running one again after a failed
allocation repeats nothing; for the few that do not, several times the room of their operands is made before, and they
run once. Which they are was found by failing each allocation of PyTorch's operator database. Random numbers are
another matter: CUDA's attention with dropout draws before it allocates, so an operator that draws gets the same numbers
when it is tried again.

[Note: errors of libraries]
cuDNN tries engines until the memory that one wants can be had, and catches the allocator's error itself. Where all want
too much, it says that there is no engine for this computation, in an ordinary `RuntimeError`. That it was memory is
told by the allocator's count of its errors.

[Note: higher-order operators]
`torch.cond`, a loop or a scan comes as one operator, and what it runs does not come at all. So it is tried again as a
whole, unless it has written to what it was given; where versions do not tell, in inference mode, it runs once.
"""

import contextlib
import functools
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from hetero.devices.calling import call
from hetero.stm.running.byvalues import depends_on_values
from hetero.stm.tensors.fetch import plain
from hetero.stm.tensors.listwrites import count_writes, versions_of_list

__all__ = ["Explain", "Numbers", "Relieve", "Retry", "Uncapped"]

# In place: what they divide by, or, of a list, the casts of a later operand, is allocated when something is written.
_WRITE_EARLY = re.compile(r"aten\.(scatter_reduce_|index_reduce_|_foreach_\w+_)\.\w+")
_DRAWS = torch.Tag.nondeterministic_seeded
_THEIR_OWN = 4  # bytes for each byte of their operands: a count of float64, or casts to it, are twice as many


@functools.cache
def _traits(func: Any) -> tuple[bool, bool, bool]:
    """Whether it writes before all is allocated, whether it writes to what it is given, and whether it draws. In one
    look: an operator's hash is computed in Python, and every operator comes here."""
    if isinstance(func, HigherOrderOperator):  # [Note: higher-order operators]
        return False, False, True
    return _WRITE_EARLY.fullmatch(str(func)) is not None, func._schema.is_mutable, _DRAWS in func.tags


Relieve = Callable[..., int]
"""Frees device memory, and returns how many bytes: 0 if nothing is left that could be freed, or, given a number of
bytes, if as many are free."""

Explain = Callable[[str, RuntimeError], Exception]
"""What to raise for an operator of that name, and the allocator's error, when nothing is left to be freed."""

Numbers = Callable[[torch.Generator | None], Callable[[], object]]
"""Notes where the random numbers of the device, or of a generator, are; what it returns goes back there."""

Uncapped = Callable[[RuntimeError], contextlib.AbstractContextManager[bool]]
"""Within it the allocator is not capped, if it has refused what the budget allows; whether it was."""


class Retry(TorchDispatchMode):
    """While it is active, every operator is tried again after ``relieve()`` freed memory.

    ``note_answered``: called for each error after which one is. ``explain``, ``uncapped``, ``numbers``: see `Explain`,
    `Uncapped`, `Numbers`. ``failures``: how many out-of-memory errors there have been. ``note_values``: called for each
    operator whose memory depends on values (`hetero.stm.running.byvalues`)."""

    supports_higher_order_operators = True

    def __init__(
        self,
        relieve: Relieve,
        *,
        note_answered: Callable[[], None] = lambda: None,
        explain: Explain = lambda operator, error: error,
        uncapped: Uncapped = lambda error: contextlib.nullcontext(False),
        failures: Callable[[], int] = lambda: 0,
        note_values: Callable[[], None] = lambda: None,
        numbers: Numbers = lambda generator: lambda: None,
    ) -> None:
        super().__init__()
        self.relieve = relieve
        self.explain = explain
        self.note_values = note_values
        self._note_answered = note_answered
        self._uncapped = uncapped
        self._failures = failures
        self._numbers = numbers
        self._seen_failures = 0
        self.is_over = False  # it may still be among a thread's modes, and does nothing

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Else what is compiled would run eagerly, which is not the same arithmetic."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.is_over:
            return call(func, args, kwargs)
        # Below autograd a managed parameter is only memory at home: it must not be intercepted again.
        with plain():
            if depends_on_values(func, args):
                self.note_values()
            is_sure = False
            # Of the few that need one: every operator comes here.
            uncapped: contextlib.ExitStack | None = None
            copies: list[torch.Tensor] = []
            runs_once, is_mutable, draws = _traits(func)
            as_given = _Versions((args, kwargs)) if isinstance(func, HigherOrderOperator) else None
            listed = versions_of_list(args) if is_mutable else []
            draw_again = self._numbers(kwargs.get("generator")) if draws else None
            if runs_once:
                ordinary = _ordinary_parameters((args, kwargs))
                given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
                own = sum(tensor.nbytes for tensor in given)
                self.make_room(_THEIR_OWN * own)
                args, kwargs = _on_device_still(ordinary, (args, kwargs), copies)
            try:
                while True:
                    try:
                        result = call(func, args, kwargs)
                        if copies and is_mutable:  # autograd counts a write to what it was given
                            torch.autograd.graph.increment_version(copies)
                        if listed:
                            count_writes(listed)
                        return result
                    except RuntimeError as error:
                        if not self._is_shortage(error):
                            raise
                        # What was counted may be an earlier operator's, which did without: the second time it is not.
                        is_sure = is_sure or isinstance(error, torch.OutOfMemoryError)
                        if runs_once or (as_given is not None and as_given.may_have_changed()):
                            raise self.explain(str(func), error) from error
                        ordinary = _ordinary_parameters((args, kwargs))
                        if self.relieve() == 0 and is_sure:
                            if uncapped is not None:
                                raise self.explain(str(func), error) from error
                            uncapped = contextlib.ExitStack()
                            if not uncapped.enter_context(self._uncapped(error)):
                                raise self.explain(str(func), error) from error
                        is_sure = True
                        self._note_answered()
                        if draw_again is not None:
                            draw_again()
                        args, kwargs = _on_device_still(ordinary, (args, kwargs), copies)
            finally:
                if uncapped is not None:
                    uncapped.close()

    def make_room(self, nbytes: int) -> None:
        """So many bytes, or all there is, for what cannot be tried again."""
        while self.relieve(nbytes):
            pass

    def begin(self) -> None:
        """It is about to be put in place: errors from now on count."""
        self._seen_failures = self._failures()

    def end(self) -> None:
        """From now on it does nothing, and keeps nobody."""
        self.is_over = True
        self.relieve, self.explain = lambda unless_free=None: 0, lambda operator, error: error
        self._note_answered, self._failures = lambda: None, lambda: 0
        self._numbers = lambda generator: lambda: None

    def _is_shortage(self, error: RuntimeError) -> bool:
        """[Note: errors of libraries]"""
        before, self._seen_failures = self._seen_failures, self._failures()
        return isinstance(error, torch.OutOfMemoryError) or self._seen_failures > before


class _Versions:
    """Of the tensors in ``given``."""

    def __init__(self, given: Any) -> None:
        tensors = [leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor)]
        self._are_counted = not any(tensor.is_inference() for tensor in tensors)
        self._known = [(tensor, tensor._version) for tensor in tensors] if self._are_counted else []

    def may_have_changed(self) -> bool:
        """Somebody has written to one since, or nobody knows."""
        return not self._are_counted or any(tensor._version != version for tensor, version in self._known)


def _ordinary_parameters(given: Any) -> set[int]:
    """Ids of those in ``given`` that nobody intercepts."""
    return {id(value) for value in tree_leaves(given) if type(value) is nn.Parameter}


def _on_device_still(ordinary: set[int], given: Any, copies: list[torch.Tensor]) -> Any:
    """``given`` to an operator that is tried again. Those that were ``ordinary`` parameters of another model, which had
    settled and has made way for it, are at home now, and home is behind: the copies in their place, which are added to
    ``copies``."""

    def copy_of(parameter: nn.Parameter) -> Any:
        managed = getattr(parameter, "_hetero", None) if id(parameter) in ordinary else None
        if managed is None:
            return parameter
        copies.append(managed.data)
        return managed.data

    return tree_map_only(nn.Parameter, copy_of, given) if ordinary else given
