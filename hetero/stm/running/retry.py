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
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from hetero.devices.calling import call
from hetero.stm.running.byvalues import depends_on_values
from hetero.stm.tensors.fetch import plain
from hetero.stm.tensors.listwrites import count_writes, versions_of_list

__all__ = ["AwaitOthers", "Explain", "Numbers", "Others", "Relieve", "Retry", "Uncapped"]

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


AwaitOthers = Callable[[Callable[[], bool], float], bool]
"""Waits, as long as what it is given says that others run, and until that time of the clock (`time.monotonic`), for
memory of theirs to be free; whether some may be."""


class Others(Protocol):
    """What may be guarded on other threads, of whichever model."""

    def run(self) -> bool:
        """There is some, on a thread that does not wait for others itself."""

    def awaited(self) -> contextlib.AbstractContextManager[None]:
        """Within it, this thread waits for them. If all did, nobody would go on: the first that finds no other to run
        gives up, and what it has is free."""


# Seconds, in all, for which an operator that lacks room waits for other threads.
_PATIENCE = 1.0


class Retry(TorchDispatchMode):
    """While it is active, every operator is tried again after ``relieve()`` freed memory, or another thread did.

    ``note_answered``: called for each error after which one is. ``explain``, ``uncapped``, ``numbers``,
    ``await_others``: see `Explain`, `Uncapped`, `Numbers`, `AwaitOthers`. ``failures``: how many out-of-memory errors
    there have been. ``note_values``: called for each operator whose memory depends on values
    (`hetero.stm.running.byvalues`)."""

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
        await_others: AwaitOthers = lambda run, until: False,
    ) -> None:
        super().__init__()
        self.relieve = relieve
        self.explain = explain
        self.note_values = note_values
        self._note_answered = note_answered
        self._uncapped = uncapped
        self._failures = failures
        self._numbers = numbers
        self._await_others = await_others
        self.others: Others | None = None  # whoever puts this in place sets it
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
            operator = _Operator(func, args, kwargs, self._numbers)
            if operator.runs_once:
                self._make_room_for(operator)
            try:
                while True:
                    try:
                        return operator.run()
                    except RuntimeError as error:  # gone before the next try: its frames have tensors
                        if not self._is_shortage(error):
                            raise
                        self._answer(operator, error)
            finally:
                if operator.uncapped is not None:
                    operator.uncapped.close()

    def _make_room_for(self, operator: "_Operator") -> None:
        """For one that runs once. That may send parameters home."""
        ordinary = operator.ordinary_parameters()
        given = [leaf for leaf in operator.leaves() if isinstance(leaf, torch.Tensor)]
        self.make_room(_THEIR_OWN * sum(tensor.nbytes for tensor in given))
        operator.put_on_device(ordinary)

    def _answer(self, operator: "_Operator", error: RuntimeError) -> None:
        """So that ``operator`` may be tried again after ``error``; raises what is to be said where it may not."""
        # What was counted may be an earlier operator's, which did without: the second time it is not.
        is_sure = operator.has_failed or isinstance(error, torch.OutOfMemoryError)
        if not operator.may_run_again():
            raise self.explain(operator.name, error) from error
        ordinary = operator.ordinary_parameters()
        if self.relieve() == 0 and is_sure and not self._others_made_room(operator):
            if operator.uncapped is not None:
                raise self.explain(operator.name, error) from error
            operator.uncapped = contextlib.ExitStack()
            if not operator.uncapped.enter_context(self._uncapped(error)):
                raise self.explain(operator.name, error) from error
        operator.has_failed = True
        self._note_answered()
        operator.draw_again()
        operator.put_on_device(ordinary)

    def _others_made_room(self, operator: "_Operator") -> bool:
        if self.others is None or not self.others.run():
            return False
        if operator.waits_until is None:
            operator.waits_until = time.monotonic() + _PATIENCE
        with self.others.awaited():
            return self._await_others(self.others.run, operator.waits_until)

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
        self._await_others, self.others = lambda run, until: False, None

    def _is_shortage(self, error: RuntimeError) -> bool:
        """[Note: errors of libraries]"""
        before, self._seen_failures = self._seen_failures, self._failures()
        return isinstance(error, torch.OutOfMemoryError) or self._seen_failures > before


class _Operator:
    """``func`` with what it is given, once or several times.

    Attributes:
        runs_once: it writes before all that it needs is allocated.
        has_failed: for want of memory.
        uncapped: open while the allocator is not capped, because of this one; it has been asked for, if not None.
        waits_until: time of the clock up to which it waits for other threads; None: it has not begun to.
    """

    __slots__ = (
        "_args",
        "_as_given",
        "_copies",
        "_func",
        "_is_mutable",
        "_kwargs",
        "_listed",
        "draw_again",
        "has_failed",
        "runs_once",
        "uncapped",
        "waits_until",
    )

    def __init__(self, func: Any, args: Any, kwargs: Any, numbers: Numbers) -> None:
        self._func, self._args, self._kwargs = func, args, kwargs
        self.runs_once, self._is_mutable, draws = _traits(func)
        self._as_given = _Versions((args, kwargs)) if isinstance(func, HigherOrderOperator) else None
        self._listed = versions_of_list(args) if self._is_mutable else []
        self._copies: list[torch.Tensor] = []  # in the place of parameters that are at home by now
        self.draw_again = numbers(kwargs.get("generator")) if draws else _nothing
        self.has_failed = False
        self.uncapped: contextlib.ExitStack | None = None
        self.waits_until: float | None = None

    @property
    def name(self) -> str:
        """As torch prints it."""
        return str(self._func)

    def leaves(self) -> list[Any]:
        """All that it is given."""
        return tree_leaves((self._args, self._kwargs))

    def run(self) -> Any:
        """The result."""
        result = call(self._func, self._args, self._kwargs)
        if self._copies and self._is_mutable:  # autograd counts a write to what it was given
            torch.autograd.graph.increment_version(self._copies)
        if self._listed:
            count_writes(self._listed)
        return result

    def may_run_again(self) -> bool:
        """A try that has failed has changed nothing."""
        return not self.runs_once and (self._as_given is None or not self._as_given.may_have_changed())

    def ordinary_parameters(self) -> set[int]:
        """Ids of those that it is given and that nobody intercepts."""
        return {id(value) for value in self.leaves() if type(value) is nn.Parameter}

    def put_on_device(self, ordinary: set[int]) -> None:
        """Of those that were ``ordinary``, another model's, which had settled and has made way for it, some are at home
        now, and home is behind: the copies come in their place."""
        if ordinary:
            self._args, self._kwargs = tree_map_only(
                nn.Parameter,
                lambda parameter: self._copy_of(parameter) if id(parameter) in ordinary else parameter,
                (self._args, self._kwargs),
            )

    def _copy_of(self, parameter: nn.Parameter) -> Any:
        managed = getattr(parameter, "_hetero", None)
        if managed is None:
            return parameter
        self._copies.append(managed.data)
        return managed.data


class _Versions:
    """Of the tensors in ``given``."""

    def __init__(self, given: Any) -> None:
        tensors = [leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor)]
        self._are_counted = not any(tensor.is_inference() for tensor in tensors)
        self._known = [(tensor, tensor._version) for tensor in tensors] if self._are_counted else []

    def may_have_changed(self) -> bool:
        """Somebody has written to one since, or nobody knows."""
        return not self._are_counted or any(tensor._version != version for tensor, version in self._known)


def _nothing() -> None:
    pass
