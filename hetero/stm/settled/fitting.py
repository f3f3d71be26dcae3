"""Whether everything fits on the device, and nobody would be left behind.

Owns the answer that `hetero.stm.settled.transition` asks for before it lets a manager rest. Invariant: what is answered
leaves everything as it was, but for copies that it fetches and updates that it finishes. How much was measured is
`hetero.stm.plans.fits`'s, who would notice `hetero.stm.tensors.onlookers`'.
"""

import operator
from collections.abc import Sequence

from hetero.devices import Accelerator
from hetero.errors import BudgetError
from hetero.msc import Phase
from hetero.stm.interception.signatures import autocasts, saves_elsewhere
from hetero.stm.manager import StatefulTensorMgr
from hetero.stm.plans.fits import Needs, read_needs
from hetero.stm.plans.plan import CyclePlan
from hetero.stm.settled.who import homes_at_rest, settled_on, storages_of
from hetero.stm.step.hoststep import HostStep
from hetero.stm.step.ownstep import step_bytes
from hetero.stm.tensors.exposure import gradient_is_private
from hetero.stm.tensors.managed import ManagedTensor
from hetero.stm.tensors.onlookers import Onlookers, has_other_optimizer

__all__ = ["Fitting"]


class Fitting:
    """Of one manager. ``budget``: of the device; ``step``: its optimizer's, if it has one."""

    def __init__(
        self, stm: StatefulTensorMgr, accelerator: Accelerator, budget: int, step: HostStep | None
    ) -> None:
        self._stm = stm
        self._accelerator = accelerator
        self._budget = budget
        self._step = step
        self.onlookers = Onlookers()
        self._too_much: list[CyclePlan] = []
        self._is_ours_alone: bool | None = None

    def needs(self) -> Needs | None:
        """What iterations need beside model data, if that is there. Plans of kinds that have not come for long are
        dropped if all but these fit: one large batch, or a refused one that the user has cut into halves."""
        book = self._stm.plans
        plans = list(book)
        coming = [plan for plan in plans if not book.has_gone(plan)]
        if len(coming) == len(self._too_much) and all(map(operator.is_, coming, self._too_much)):
            return None
        needs = self._needs_of(plans)
        if needs is None and len(coming) < len(plans) and (needs := self._needs_of(coming)) is not None:
            book.drop_gone()
            self._stm.home_choice.choose_again()  # they may have had no room for all
        if needs is None:
            self._too_much = coming
        return needs

    def _needs_of(self, plans: list[CyclePlan]) -> Needs | None:
        sizes = {id(t.parameter): t.full_nbytes for t in self._stm.tensors}
        parameters = sum(t.living_nbytes for t in self._stm.tensors)
        trained = self.trained()
        gradients = {t.index: t.full_nbytes for t in trained}
        model = parameters + self._stm.registry.buffer_bytes()
        temporary = 0
        if self._step is not None:
            model += self._step.device_homes.whole_bytes()
            homes, groups = self._step.device_homes, self._step.device_homes.groups()
            stepped = [t for t in trained if id(t.parameter) in groups]
            temporary = step_bytes(
                self._step.optimizer,
                {id(t.parameter): t.full_nbytes for t in stepped},
                fused={id(t.parameter) for t in stepped if homes.takes_fused(t, groups)},
            )
        needs = read_needs(
            plans,
            budget=self._budget,
            parameters=[t.full_nbytes for t in self._stm.tensors],
            gradients=gradients,
            step_bytes=temporary,
            saves_elsewhere=saves_elsewhere,
        )
        # A gradient that autograd cannot take over as it is, is there twice for a moment.
        model += max(sizes.values(), default=0)
        if any(t.cast is not None for t in self._stm.tensors) or any(
            autocasts(signature) for _, signature in needs.by_kind
        ):
            model += parameters // 2
        # What a plan keeps free beyond what is others' is for what it has not measured.
        if model + needs.peak > self._budget - max((plan.margin for plan in plans), default=0):
            return None
        return needs

    def trained(self) -> list[ManagedTensor]:
        """Parameters that are, or that were stepped and are frozen for a while: those of who judges a generator."""
        stepped = self._step.device_homes.stepped if self._step is not None else frozenset[int]()
        return [t for t in self._stm.tensors if t.parameter.requires_grad or t.index in stepped]

    def has_room(self, needs: Needs, *, beside: bool) -> bool:
        """Now, and nothing that is under way stands against it: as far as that needs no look at every reference.
        ``beside``: others of the device are settled, or are about to."""
        stm = self._stm
        is_trainable = any(t.parameter.requires_grad for t in stm.tensors)
        trains = is_trainable and any(k[0] for k in needs.by_kind)
        if self._step is not None:
            # An evaluation tells nothing of what gradients, states and activations take, and where a loss is made by
            # the model's parts, as by a method of its own, nobody of ours would see that training begins. Where all is
            # within a reentrant checkpoint, the forward of training looks like an evaluation.
            if is_trainable and not any(
                key.phase is not Phase.FORWARD for plan in stm.plans for key in plan.keys
            ):
                return False
            if not (self._step.can_pause() and self._step.device_homes.is_whole(trains=trains)):
                return False
        elif trains:
            return False  # whoever steps these expects gradients at home
        if any(t.paths.lead_home or t.low is not None or t.users for t in stm.tensors):
            return False
        missing = sum(t.device_nbytes for t in stm.tensors if not t.is_resident)
        gradients = [t for t in stm.tensors if t.parameter.grad is not None]
        missing += sum(t.device_nbytes for t in gradients if not stm.gradients.is_kept(t))
        missing += 0 if self._step is None else self._step.device_homes.missing_bytes()
        all_there = len(gradients) == sum(t.parameter.requires_grad for t in stm.tensors)
        if not all(other.has_room_for(missing) for other in settled_on(stm.device)):
            return False
        # What those have away that run while ours does comes back then, and nobody asks whether there is room for it.
        away = max(0, stm.sharing.away_from_others(active=True)) if needs.has_others_within else 0
        kinds = needs.of(beside=beside).values()
        grows = max((each.most(are_there=all_there) for each in kinds), default=0)
        return self._accelerator.used_bytes() + away + missing + grows <= self._budget - stm.plans.margin

    def is_ours_alone(self) -> bool:
        """No other optimizer has these parameters. Looked for once: who comes later says so."""
        if self._is_ours_alone is None:
            ours = None if self._step is None else self._step.optimizer
            self._is_ours_alone = not has_other_optimizer(ours, {id(t.parameter) for t in self._stm.tensors})
        return self._is_ours_alone

    def is_private(self, together: Sequence[ManagedTensor]) -> bool:
        """Nobody holds memory that would be left behind; and every copy is there, with what was queued in it.
        ``together``: what settles with ours. Raises what failed in the queue."""
        stm = self._stm
        stm.home_access.roll_back()
        stm.home_access.finish_updates()
        for tensor in stm.tensors:
            if not tensor.is_private():
                return False
            if tensor.parameter.grad is not None and not gradient_is_private(tensor.parameter):
                return False
            self.onlookers.have_gradients |= bool(tensor.parameter._backward_hooks)
        if self.onlookers.keep_something(stm.tensors, homes_at_rest() | storages_of(together)):
            return False
        stm.residency.follow_unknown_writes(stm.tensors)
        try:
            stm.residency.require(stm.tensors, limit=self._budget, operator=lambda: "settling")
        except BudgetError:
            return False
        return True
