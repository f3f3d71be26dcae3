"""Parameters that live on the device: with gradient and optimizer states, stepped there.

Owns which do, and how they come to and go from there; `hetero.stm.step.devicesteps` steps them. Which should is the
plan's choice (`hetero.eviction.device_homes`); they move at a step, and home at once when memory runs short. Invariant:
for the user nothing is elsewhere: home follows when somebody looks at it, ``p.grad`` and states likewise, and what
cannot be watched is stepped at home.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet

import torch

from hetero.devices import Accelerator, rounds_as_host
from hetero.errors import BudgetError, ManageError
from hetero.eviction import HomeCost
from hetero.stm.interception.parameter import is_managed
from hetero.stm.manager import StatefulTensorMgr
from hetero.stm.step.hostrate import HostRate
from hetero.stm.step.ownstep import step_bytes
from hetero.stm.tensors.exposure import state_is_private
from hetero.stm.tensors.fetch import plain
from hetero.stm.tensors.homes import set_memory, states_beside
from hetero.stm.tensors.hostcopies import note_at_home
from hetero.stm.tensors.managed import ManagedTensor
from hetero.stm.tensors.state import Tier
from hetero.stm.updates.kernels import same_layout, will_take_fused
from hetero.stm.updates.optimizers import Group, is_known, lacks_states, may_be_tried
from hetero.stm.updates.temporaries import is_measured, temporaries, to_undo

__all__ = ["DeviceHomes"]

# Steps in a row at which a parameter cannot be stepped on the device as planned, until it is planned at home, for a
# while.
_PATIENCE = 3


class DeviceHomes:
    """Those of one optimizer. ``allowed``: by the user; ``stepped``: indices of parameters whose states exist;
    ``note_states``: the books should look where these are."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        stm: StatefulTensorMgr,
        accelerator: Accelerator,
        host: HostRate,
        *,
        allowed: bool,
        stepped: AbstractSet[int],
        note_states: Callable[[], None],
    ) -> None:
        self._optimizer = optimizer
        self._note_states = note_states
        self._stm = stm
        self._accelerator = accelerator
        self._host = host
        self._allowed = allowed
        self._were_stepped = stepped
        self._here: dict[int, ManagedTensor] = {}
        self._refused: Counter[int] = Counter()
        self.have_moved = False
        # Weakly: identities keep `stm` where Python's collector cannot see it, and we reach the user's optimizer.
        me = weakref.ref(self)
        stm.residency.room.send_home = lambda nbytes: 0 if (here := me()) is None else here.send_home(nbytes)
        stm.plans.home_costs = lambda: {} if (here := me()) is None else here.costs()
        stm.home_choice.send_home = lambda indices: None if (here := me()) is None else here.leave(indices)
        stm.home_choice.forget_refusals = self._refused.clear

    @property
    def names(self) -> frozenset[str]:
        """Of the parameters that live on the device."""
        return frozenset(tensor.name for tensor in self._here.values())

    @property
    def stepped(self) -> set[int]:
        """Indices of the parameters whose states exist, if they need any: those that were stepped, unless somebody
        has since emptied the entry or turned on momentum."""
        return self._with_states(self.groups())

    def costs(self) -> dict[int, HomeCost]:
        """What each parameter would cost on the device; none before one round of updates has been timed."""
        groups = self.groups()
        stepped = self._with_states(groups)
        tensors = [
            tensor
            for tensor in self._stm.tensors
            if tensor.index in stepped
            and id(tensor.parameter) in groups  # it may have been taken out since
            and not tensor.paths.lead_home
            and self._refused[tensor.index] < _PATIENCE
        ]
        # What lives here already has been timed, or never will be.
        at_home = [tensor for tensor in tensors if tensor.index not in self._here]
        if not self._can_step() or not self._is_timed(at_home):
            return {}
        costs = {}
        for tensor in tensors:
            states = self._states(tensor, groups)
            nbytes = sum(self._accelerator.allocated_size(state.nbytes) for state in states)
            touched = tensor.parameter.numel() * tensor.parameter.element_size()
            costs[tensor.index] = HomeCost(
                nbytes=nbytes + tensor.living_nbytes + tensor.full_nbytes,
                gradient_nbytes=tensor.full_nbytes,
                step_nbytes=self.update_bytes(tensor, groups),
                step_seconds=self._host.seconds_for(touched),
            )
        return costs

    def take(self, candidates: Mapping[int, ManagedTensor]) -> dict[int, ManagedTensor]:
        """Move those of ``candidates`` to the device that the plan wants there, and all others home, but for those that
        a step of some leaves alone. Returns which live there now."""
        with self._stm.sharing.moving_homes():
            self._take(candidates)
        return dict(self._here)

    def _take(self, candidates: Mapping[int, ManagedTensor]) -> None:
        wanted, groups, idle = self._stm.device_homes(), self.groups(), set[int]()
        if not self._can_step():
            candidates = {}
        elif lacking := {index for index in wanted & candidates.keys() if self._lacks_states(index, groups)}:
            # What their step makes is made at home: neither we nor the plan have kept room for it.
            candidates = {index: tensor for index, tensor in candidates.items() if index not in lacking}
            self._stm.home_choice.choose_again()
        # Of a head that is not trained now, a layer that was left out. Optimizers that are not torch's may write to it;
        # and where not everything fits, what is used now has the room.
        if candidates and is_known(self._optimizer) and self._stm.home_choice.has_all:
            idle = {index for index in wanted if self._stm.tensors[index].parameter.grad is None}
        staying = wanted & (candidates.keys() | idle)
        for index in self._here.keys() - staying:
            self.send(self._here[index], groups)
        wants = [candidates[index] for index in sorted(wanted & candidates.keys())]
        for place, tensor in enumerate(wants):
            if not self._bring(tensor, groups):
                # Somebody has had their states at home, and there is no room for them any more.
                for other in wants[place:]:
                    if other.index in self._here and not self._is_here(other, groups):
                        self.send(other, groups)
                break
        if beside := self._bytes_of_others():
            self.make_room(beside)
        for index in wanted - idle:
            is_stepped = self._stm.tensors[index].parameter.requires_grad  # a frozen one may be again
            self._refused[index] = self._refused[index] + 1 if is_stepped and index not in self._here else 0
            if self._refused[index] == _PATIENCE:
                self._stm.home_choice.refuse()
        self.note_moves()  # at once: what the books do not know of counts as the operators' own

    def refuse(self, tensor: ManagedTensor) -> None:
        """Its step takes more memory than there is: it is planned at home for a while."""
        self._refused[tensor.index] = _PATIENCE
        self._stm.home_choice.refuse()

    def is_whole(self, *, trains: bool) -> bool:
        """All that are stepped live here, with all of their states. ``trains``: some will be; where none has been since
        the states were taken away, nobody can say what the next step makes."""
        stepped = self._were_stepped
        away = stepped - (self.stepped & self._here.keys())
        if not (self._can_step() and self.is_measured) or (trains and not stepped):
            return False
        return not any(self._stm.tensors[index].parameter.requires_grad for index in away)

    def missing_bytes(self) -> int:
        """Of the states that `complete` brings."""
        groups = self.groups()
        stepped = [self._stm.tensors[index] for index in self._were_stepped]
        states = (state for tensor in stepped for state in self._states(tensor, groups))
        return sum(
            self._accelerator.allocated_size(state.nbytes) for state in states if state.device.type == "cpu"
        )

    def complete(self, kept: frozenset[int]) -> bool:
        """Bring what is not stepped any more, or was looked at; False if any state is left at home: there is no room,
        or somebody holds one, besides us, who hold those with the ids ``kept``."""
        groups = self.groups()
        for index in self._were_stepped:
            tensor = self._stm.tensors[index]
            if self._is_here(tensor, groups):
                continue
            entry = dict.get(self._optimizer.state, tensor.parameter)
            is_private = entry is None or state_is_private(entry, kept)
            del entry  # or the next one of it would be counted twice
            if not (is_private and self._bring(tensor, groups)):
                return False
        states = (state for tensor in self._stm.tensors for state in self._states(tensor, groups))
        return all(state.device.type != "cpu" for state in states)

    def whole_bytes(self) -> int:
        """Of all states on the device, those included that have yet to be made."""
        groups = self.groups()
        stepped = self._with_states(groups)
        known, missing, most = 0, 0, 0.0
        for tensor in self._stm.tensors:
            if id(tensor.parameter) not in groups:
                continue
            states = self._states(tensor, groups)
            nbytes = sum(self._accelerator.allocated_size(state.nbytes) for state in states)
            if states:
                known += nbytes + self._accelerator.allocated_size(1)  # its number of steps
                most = max(most, nbytes / max(tensor.full_nbytes, 1))
            elif tensor.index not in stepped and tensor.parameter.requires_grad:
                missing += tensor.full_nbytes
        return known + int(missing * most)

    def adopt(self, indices: Iterable[int]) -> None:
        """They are on the device, with their states (`hetero.stm.settled`)."""
        for index in indices:
            tensor = self._stm.tensors[index]
            self._stm.residency.note_staying(tensor)
            self._here[index] = tensor

    def bring_states_home(
        self, kept: frozenset[int] | None, *, of: Iterable[torch.Tensor] | None = None
    ) -> None:
        """Somebody is about to look at them: an alias taken on the device would be stale once they have left it. The
        next step brings back those that nobody holds. ``kept``: only those that somebody holds already, besides us,
        who hold those with these ids. ``of``: of these parameters; None: of all."""
        with plain():
            groups = self.groups()
            looked_at = None if of is None else set(map(id, of))
            for tensor in self._here.values():
                if looked_at is not None and id(tensor.parameter) not in looked_at:
                    continue
                entry = dict.get(self._optimizer.state, tensor.parameter)
                held = kept is None or (entry is not None and not state_is_private(entry, kept))
                del entry  # or the next one of it would be counted twice
                if held:
                    self._send_states(tensor, groups)

    def keep_home(self, tensor: ManagedTensor) -> None:
        """Somebody has had its states and may have put them on the device. That is for us to say."""
        if tensor.owner is not self._stm or tensor.index in self._here:
            return
        with plain():
            for state in (dict.get(self._optimizer.state, tensor.parameter) or {}).values():
                if isinstance(state, torch.Tensor) and state.device == self._accelerator.device:
                    self.have_moved = True
                    set_memory(state, state.detach().cpu(), f"a state of {tensor.name}")
                if isinstance(state, torch.Tensor):  # perhaps another than before
                    note_at_home(state)

    def leave(self, indices: frozenset[int]) -> None:
        """These are not to live here any more."""
        with plain(), self._stm.sharing.moving_homes():
            groups = self.groups()
            for tensor in [tensor for index, tensor in self._here.items() if index in indices]:
                self.send(tensor, groups)
                self._stm.residency.evict(tensor)
            self.note_moves()

    def send_home(self, nbytes: int) -> int:
        """Memory runs short: free at least ``nbytes``, if there are as many; returns how many."""
        freed = 0
        with plain(), self._stm.sharing.moving_homes():
            groups = self.groups()
            for tensor in list(self._here.values()):
                if freed >= nbytes:
                    break
                before = self._accelerator.used_bytes()
                self.send(tensor, groups)
                self._stm.residency.evict(tensor)
                left = before - self._accelerator.used_bytes()
                self._stm.home_choice.lose(max(1, left))
                freed += left
            self.note_moves()
        return freed

    def make_room(self, nbytes: int) -> None:
        """For so many bytes; at the cost of what lives here, if it has to be."""
        if not self._stm.residency.room.make(nbytes):
            self.send_home(nbytes)

    def note_moves(self, *, always: bool = False) -> None:
        """The books follow states that have gone elsewhere, or, ``always``, may have become others."""
        if self.have_moved or always:
            self.have_moved = False
            self._note_states()

    @property
    def is_measured(self) -> bool:
        """What its steps take is known; else they are tried."""
        return is_measured(self._optimizer)

    def groups(self) -> dict[int, Group]:
        """The group of each parameter, by id."""
        return {
            id(parameter): group for group in self._optimizer.param_groups for parameter in group["params"]
        }

    def update_bytes(self, tensor: ManagedTensor, groups: dict[int, Group]) -> int:
        """What its update on the device allocates for a while."""
        if self.takes_fused(tensor, groups):
            return self._accelerator.allocated_size(1)  # the number of steps
        group = groups[id(tensor.parameter)]
        nbytes = temporaries(self._optimizer, group, tensor.home, tensor.full_nbytes)
        if self.is_measured:
            return nbytes
        return nbytes + to_undo(dict.get(self._optimizer.state, tensor.parameter), tensor.full_nbytes)

    def takes_fused(self, tensor: ManagedTensor, groups: dict[int, Group]) -> bool:
        """Its update on the device is by a fused kernel that we choose; without a gradient yet, for one laid out like
        home."""
        value = tensor.living if tensor.index in self._here else None
        value = tensor.home if value is None else value
        with plain():
            gradient = tensor.parameter.grad
            if gradient is not None and not same_layout(gradient, tensor.home):
                return False
            entry = dict.get(self._optimizer.state, tensor.parameter)
            return will_take_fused(self._optimizer, groups[id(tensor.parameter)], value, entry)

    def send(self, tensor: ManagedTensor, groups: dict[int, Group]) -> None:
        """It lives at home again, with its states."""
        self.have_moved = True
        self._stm.residency.move_home(tensor)
        self._stm.gradients.wait(tensor)
        self._send_states(tensor, groups)
        self._here.pop(tensor.index, None)

    # -- helpers --------------------------------------------------------------------------------------

    def _can_step(self) -> bool:
        # Which parameters are stepped there depends on measured speeds, and a real device rounds in its own way.
        reproducible = torch.are_deterministic_algorithms_enabled() and not rounds_as_host(self._stm.device)
        return self._allowed and not reproducible and (self.is_measured or may_be_tried(self._optimizer))

    def _with_states(self, groups: dict[int, Group]) -> set[int]:
        """`stepped`, by groups that are at hand."""
        return {index for index in self._were_stepped if not self._lacks_states(index, groups)}

    def _lacks_states(self, index: int, groups: dict[int, Group]) -> bool:
        parameter = self._stm.tensors[index].parameter
        group = groups.get(id(parameter))  # it may have been taken out since
        entry = dict.get(self._optimizer.state, parameter)
        if group is None or not self.is_measured:  # of others than torch's, some have none
            return False
        return lacks_states(self._optimizer, group, entry)

    def _bytes_of_others(self) -> int:
        """What torch's own step takes for a while, before ours, for what the optimizer has on the device beside what we
        manage: another manager's that has settled, most of all."""
        there = [
            p
            for group in self._optimizer.param_groups
            for p in group["params"]
            if not is_managed(p) and p.device == self._accelerator.device
        ]
        sizes = {id(p): self._accelerator.allocated_size(p.nbytes) for p in there}
        return step_bytes(self._optimizer, sizes) if sizes else 0

    def _is_timed(self, tensors: list[ManagedTensor]) -> bool:
        return self._host.has_timed(sum(tensor.home.nbytes for tensor in tensors))

    def _is_here(self, tensor: ManagedTensor, groups: dict[int, Group]) -> bool:
        """It can be stepped on the device as it is."""
        is_there = tensor.living is not None and tensor.ready is None and not tensor.is_stale
        states = self._states(tensor, groups)
        return tensor.stays and is_there and all(state.device.type != "cpu" for state in states)

    def _bring(self, tensor: ManagedTensor, groups: dict[int, Group]) -> bool:
        """False: there is no room."""
        if self._is_here(tensor, groups):
            return True
        states = [state for state in self._states(tensor, groups) if state.device.type == "cpu"]
        if tensor.stays and not states:
            return self._stay(tensor)
        nbytes = sum(self._accelerator.allocated_size(state.nbytes) for state in states)
        missing = tensor.living_nbytes - tensor.nbytes(Tier.DEVICE)
        if not self._stm.residency.room.make(nbytes + missing, keep=[tensor.index]) or not self._stay(tensor):
            return False
        self.have_moved = True
        self._here[tensor.index] = tensor
        for state in states:
            try:
                set_memory(state, state.detach().to(self._accelerator.device), f"a state of {tensor.name}")
                self._stm.collector.count_fetch(state.nbytes)
            except ManageError:  # somebody holds it
                self.send(tensor, groups)
                break
        return True

    def _stay(self, tensor: ManagedTensor) -> bool:
        try:
            self._stm.residency.stay(tensor)
        except BudgetError:
            return False
        return True

    def _send_states(self, tensor: ManagedTensor, groups: dict[int, Group]) -> None:
        for state in self._states(tensor, groups):
            if state.device.type != "cpu":
                self.have_moved = True
                set_memory(state, state.detach().cpu(), f"a state of {tensor.name}")
                self._stm.collector.count_eviction(0, state.nbytes)

    def _states(self, tensor: ManagedTensor, groups: dict[int, Group]) -> list[torch.Tensor]:
        return states_beside(self._optimizer, tensor.parameter, groups.get(id(tensor.parameter), {}))
