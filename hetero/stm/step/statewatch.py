"""Learning of whoever looks at ``optimizer.state``.

Owns whether one optimizer's states are watched, and what a look asks for. Invariant: whoever looks finds every update
done that was announced, and states at home; and where states, or their entries, may have become others, none of them
are known any more.
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hetero.stm.interception.parameter import is_managed, managed_of
from hetero.stm.manager import StatefulTensorMgr
from hetero.stm.step.capture import Capture
from hetero.stm.step.devicehomes import DeviceHomes
from hetero.stm.step.watched import WatchedState
from hetero.stm.tensors.exposure import ATTRIBUTE_AND_NAME

__all__ = ["StateWatch"]


class StateWatch:
    """Of one optimizer. ``stepped``: indices of the parameters whose states exist, emptied where these may be others;
    ``is_on``: the optimizer's steps are ours; ``is_within``: torch's own step runs, which may look."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        manager: StatefulTensorMgr,
        capture: Capture,
        device_homes: DeviceHomes,
        *,
        stepped: set[int],
        is_on: Callable[[], bool],
        is_within: Callable[[], bool],
    ) -> None:
        self._optimizer = optimizer
        self._stm = manager
        self._capture = capture
        self._device_homes = device_homes
        self._stepped = stepped
        self._is_on = is_on
        self._is_within = is_within
        # Somebody may have put other states, or their entries, in the place of those that we know.
        self._has_looked = True

    def watch(self) -> bool:
        """See to it that we learn of whoever looks from now on; False if we cannot."""
        optimizer = self._optimizer
        state = optimizer.state
        if sys.getrefcount(state) != ATTRIBUTE_AND_NAME:
            return False
        if isinstance(state, WatchedState):
            watcher = state.watcher
            if watcher is self:
                return True
            if isinstance(watcher, StateWatch) and watcher._is_on():
                return False  # another manager's, which has parameters of this optimizer as well
            state = state.plain()  # left from a manager that is closed
        if type(state) is not defaultdict:
            return False
        optimizer.state = WatchedState(state, self._before, self._after)
        self._stepped.clear()
        self._has_looked = True
        return True

    def can_give_back(self) -> bool:
        """The optimizer can have its own dict again: nobody else holds the one that it has, or watches it."""
        state = self._optimizer.state
        if isinstance(state, WatchedState) and state.watcher is not self:
            return False
        return sys.getrefcount(state) == ATTRIBUTE_AND_NAME

    def give_back(self) -> None:
        """Put the optimizer's own dict back, unless somebody holds ours."""
        state = self._optimizer.state
        if isinstance(state, WatchedState) and sys.getrefcount(state) == ATTRIBUTE_AND_NAME:
            self._optimizer.state = state.plain()

    def keep_home(self) -> None:
        """If anybody has looked since the last time, states are at home until the plan takes them to the device."""
        if self._has_looked or not isinstance(self._optimizer.state, WatchedState):
            self._has_looked = False
            for tensor in self._capture.managed():
                self._device_homes.keep_home(tensor)

    def _before(self, writes: bool, parameters: Sequence[Any] | None) -> None:
        with self._stm.lock:
            if self._capture.is_under_way or self._is_within() or not self._is_on():
                return  # the step itself
            self._stm.home_access.roll_back()
            self._stm.home_access.finish_updates()
            self._capture.commit()
            self._device_homes.bring_states_home(None, of=parameters)
            self._device_homes.note_moves()
            self._has_looked = True
            if parameters is None or parameters:  # not only at names
                settled = self._stm.settled
                if settled is not None:
                    settled.onlookers.note_look()
            if writes:
                self._stepped.clear()

    def _after(self, parameter: Any) -> None:
        """Loops that move all states to the device (after resuming, say) need no more memory there than one's take."""
        with self._stm.lock:
            if not self._is_within() and self._is_on() and is_managed(parameter):
                self._device_homes.keep_home(managed_of(parameter))
