"""Managers that share a device: room that one lacks and another can do without, or the caller.

Owns who they are, and the question. Invariant: none waits for another, so that two which ask each other at once do not
wait for ever. What may leave is each one's own matter (`hetero.stm.sharing`).
"""

import contextlib
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch

from hetero.stm.living import Living

__all__ = [
    "HomeBytes",
    "Neighbour",
    "ask",
    "has_others",
    "join",
    "make_room",
    "managed_devices",
    "moving_homes",
    "note_relieved",
    "others",
]


class HomeBytes(NamedTuple):
    """Of parameters that live on the device, and of their optimizer states."""

    parameters: int
    states: int

    @property
    def total(self) -> int:
        """Of both."""
        return self.parameters + self.states


class Neighbour(Protocol):
    """A manager, as others on its device see it (`hetero.stm.sharing.Sharing`)."""

    device: torch.device

    @property
    def segments(self) -> int:
        """How many of its forwards, backwards and steps have begun that were intercepted."""

    def give(self, nbytes: int, *, urgent: bool, spares_settled: bool) -> int:
        """Let so many bytes leave, or as many as can; returns how many have. ``urgent``: more than idle copies; also
        all that one has that has settled, unless ``spares_settled``. None, if it is busy on another thread."""

    def home_bytes(self) -> HomeBytes:
        """Of its parameters and optimizer states, what lives on the device, until it chooses otherwise."""

    def copy_bytes(self) -> int:
        """Of its parameters, what is there and not in `home_bytes`."""

    def least_bytes(self) -> int:
        """Of the device, what its plans need at least, beside what lives there of its own."""

    def send_home(self, nbytes: int) -> None:
        """Let so many bytes of what lives there leave, or as many as can; none, if it is busy on another thread, or has
        settled."""

    def while_others_move(self) -> contextlib.AbstractContextManager[None]:
        """Around moves of what lives on the device of another: they are no part of what it measures."""

    def away_bytes(self) -> int:
        """Of its parameters, gradients and saved tensors, what is not on the device; 0 where it moves none."""

    @property
    def thread(self) -> int:
        """Of its model's last forward."""

    def is_amid(self) -> bool:
        """A forward of it that trains has run, and its backward is to come."""

    def note_together(self) -> None:
        """Another's iterations go on within its own, or its own within theirs, for the first time."""

    def note_relieved_by_others(self) -> None:
        """Another has made room for the operator that runs now, which may be one of this one's."""

    @property
    def is_closed(self) -> bool:
        """It manages nothing any more."""

    def make_room(self, nbytes: int) -> bool:
        """Let as much leave as keeps the budget with so many bytes more; False if that is not enough. Nothing, and
        True, if it is busy on another thread, or has no copies."""


_managers = Living[Neighbour]()


def join(manager: Neighbour) -> None:
    """From now on it may be asked."""
    _managers.add(manager)


def ask(asking: Neighbour, nbytes: int, *, urgent: bool, spares_settled: bool = False) -> int:
    """``asking`` lacks so many bytes of its device; ``urgent``: and has nothing left that can leave;
    ``spares_settled``: but it may do without. Returns how many others have given."""
    given = 0
    asked = others(asking)
    rounds = [False, True] if urgent else [False]
    for beyond_idle in rounds:
        for other in asked:
            if given < nbytes:
                given += other.give(nbytes - given, urgent=beyond_idle, spares_settled=spares_settled)
    return given


def has_others(asking: Neighbour) -> bool:
    """There is somebody to `ask`."""
    return bool(others(asking))


def note_relieved(relieving: Neighbour) -> None:
    """``relieving`` has made room in the middle of an operator; whose it is, others know."""
    for other in others(relieving):
        other.note_relieved_by_others()


@contextlib.contextmanager
def moving_homes(mover: Neighbour) -> Iterator[None]:
    """Around moves of what lives on the device of ``mover``, to there or home."""
    with contextlib.ExitStack() as stack:
        for other in others(mover):
            stack.enter_context(other.while_others_move())
        yield


def managed_devices() -> set[torch.device]:
    """Where anything is managed."""
    return {manager.device for manager in _managers if not manager.is_closed}


def make_room(device: torch.device, nbytes: int) -> bool:
    """The caller is about to take so many bytes of ``device``. False if they pass somebody's budget all the same."""
    has_room = True
    for manager in _managers:
        if manager.device.type == device.type and device.index in (None, manager.device.index):
            has_room = manager.make_room(nbytes) and has_room
    return has_room


def others(one: Neighbour) -> list[Neighbour]:
    """On its device."""
    return [other for other in _managers if other is not one and other.device == one.device]
