"""What a settled forward of the model finds: whether the iteration to come fits as well.

Owns the measures that are compared: the inputs' signature, which must have been measured; the flags of frozen
parameters; whether momentum is still off; and three of the device's counters. It ends the state where the iteration to
come may need more than the budget has, or the one before did, and for good where memory has run out since the check
before: in backward, in the step, wherever nobody of ours is called.
"""

import operator
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from hetero.devices import Accelerator
from hetero.stm.interception.signatures import is_no_larger, without_training
from hetero.stm.manager import StatefulTensorMgr
from hetero.stm.plans.fits import ForwardKind, KindGrowth, Needs, before_each_backward
from hetero.stm.settled.attempts import Attempts
from hetero.stm.settled.who import settled_on
from hetero.stm.tensors.managed import ManagedTensor
from hetero.stm.updates.optimizers import without_momentum

__all__ = ["Check"]

_State = tuple[int, int | None, tuple["weakref.ref[torch.Tensor]", int | None] | None]

_requires_grad = operator.attrgetter("requires_grad")
_momentum = operator.itemgetter("momentum")


class Check:
    """Of one manager. `begin` when it settles, `end` when it leaves.

    Attributes:
        must_leave: at the next forward, whatever it finds.
        peak: of the device's memory, where that was more than there is, since it settled; else 0.
        has_warned: the user has been told of that.
    """

    def __init__(
        self,
        stm: StatefulTensorMgr,
        accelerator: Accelerator,
        optimizer: torch.optim.Optimizer | None,
        attempts: Attempts,
    ) -> None:
        self._stm = stm
        self._accelerator = accelerator
        self._optimizer = optimizer
        self._attempts = attempts
        self.must_leave = self.has_warned = False
        self.peak = 0
        self._measured = Needs(peak=0, by_kind={}, by_kind_beside={}, has_others_within=False)
        self._by_kind = self._measured.by_kind  # or beside others
        self._is_beside = False  # others are settled as well
        # How many segments had begun when it left in the middle of an iteration; None: it did not.
        self._left_at: int | None = None
        # What the iteration that is under way began with: its kind, bytes in use, and whether it makes gradients.
        self._begun: tuple[ForwardKind, int, bool] | None = None
        self._unlike: set[ForwardKind] = set()  # what had more than others of their kind
        self._limit = 0
        self._seen_failures = self._seen_peak = 0
        self._last: ForwardKind | None = None  # kind of the last forward that ran settled
        # A trained parameter, which tells of steps and of gradients that are added up.
        self._probe: nn.Parameter | None = None
        # Kinds of training forwards since what the iteration takes from there on was last seen to be free, and what the
        # probe was then.
        self._since: list[ForwardKind] = []
        self._then: _State = (0, None, None)
        self._frozen: list[nn.Parameter] = []
        # Groups of the optimizer: there is no room for the states that the step makes once it is on.
        self._without_momentum: list[dict[str, Any]] = []

    def begin(
        self, kind: ForwardKind | None, needs: Needs, limit: int, *, trained: Sequence[ManagedTensor]
    ) -> None:
        """It has settled, for a forward of such a kind or, None, beside others. ``needs``: what iterations need beside
        model data; ``limit``: the bytes that all may take together, which is the budget less what was given to others,
        until `Manager.trim`; ``trained``: parameters whose gradients and states are among these.
        """
        self._measured = replace(
            needs, by_kind=dict(needs.by_kind), by_kind_beside=dict(needs.by_kind_beside)
        )
        self._by_kind, self._limit = self._measured.of(beside=False), limit
        self._probe = trained[-1].parameter if trained else None
        known = {t.index for t in trained}
        self._frozen = [t.parameter for t in self._stm.tensors if t.index not in known]
        self._without_momentum = [] if self._optimizer is None else without_momentum(self._optimizer)
        self.must_leave = self.has_warned = False
        self.peak = 0
        self._last, self._since = kind, []
        if kind is not None and kind[0] and self._probe is not None:
            self._since, self._then = [kind], self._state_of(self._probe)
        used, self._seen_peak, self._seen_failures = self._accelerator.pressure()
        self._begun = None if kind is None else (kind, used, True)

    def end(self, *, left_amid: bool) -> None:
        """No forward comes here any more. ``left_amid``: `is_under_way` before it left."""
        self._left_at = self._stm.collector.segments if left_amid else None
        self._frozen, self._probe, self._since, self._without_momentum = [], None, [], []

    def admits(self, kind: ForwardKind) -> bool:
        """Such a forward is about to begin: whether what it begins fits beside what there is."""
        # Written out, because it is all that runs of ours: of a training step, this and what calls it.
        used, peak, failures = self._accelerator.pressure()
        if failures != self._seen_failures:
            self._note_failures(failures)
        if peak != self._seen_peak and (peak > self._limit or self._seen_peak > self._limit):
            self._note_peak(peak)
        if any(map(_momentum, self._without_momentum)):
            self.must_leave = True
        growth = self._by_kind.get(kind) or self._learned(kind)
        makes_gradients = kind[0] and self._probe is not None and self._probe.grad is None
        admits = (
            growth is not None
            and used + (growth.without if makes_gradients else growth.with_gradients) <= self._limit
            and not self.must_leave
            and not any(map(_requires_grad, self._frozen))
        )
        if admits and self._is_beside and kind[0]:
            assert growth is not None
            if not self._fits_beside(growth.most(are_there=not makes_gradients)):
                self._attempts.note_beside()
                admits = False
        self._last = kind
        if admits and (kind[0] or not self.is_under_way()):
            self._begun = kind, used, makes_gradients
        if admits and kind[0] and self._probe is not None:
            self._since, self._then = [kind], self._state_of(self._probe)
        return admits

    def is_under_way(self) -> bool:
        """A forward that trains has run, and nothing tells that its iteration is over: neither a step since then, nor a
        backward that adds to gradients, which would have moved them."""
        probe = self._probe
        if probe is None or not self._since:
            return False
        version, steps, gradient = self._state_of(probe)
        if (version, steps) != self._then[:2] or (gradient is not None and gradient != self._then[2]):
            return False
        # Fused kernels move no version, but count their steps, except SGD's. There, the graphs of the forwards before
        # have to be alive, at least; a loss that the user keeps has a graph as well, and may be taken for one of them.
        groups = () if self._optimizer is None else self._optimizer.param_groups
        is_told = steps is not None or not any(group.get("fused") for group in groups)
        return is_told or probe._use_count() > 1  # type: ignore[attr-defined]

    def is_amid_unseen(self) -> bool:
        """Nobody intercepts the iteration that is under way."""
        if self._stm.standing.is_settled:
            return self.is_under_way()
        return self._left_at == self._stm.collector.segments

    def foresees(self, kind: ForwardKind) -> bool:
        """Less is free than an iteration takes from such a forward on, because it is one of several in one, and what
        those before it have made is still there; that it all fits was seen at the first. To leave in between would be
        in vain, and gradients of the graphs that there are would be added up by themselves: other bits."""
        if not kind[0] or self._optimizer is None or not self.is_under_way():
            return False
        if self.must_leave or any(map(_requires_grad, self._frozen)):
            return False
        coming = [*self._since, kind]
        for plan in self._stm.plans:
            for known in before_each_backward(plan.keys):
                if any(_are_covered(coming, known[begin:]) for begin in range(len(known))):
                    self._since = coming
                    return True
        return False

    def has_room_for(self, nbytes: int) -> bool:
        """The iteration that is under way, or was the last one, fits with so many bytes of another manager's, which is
        to settle too. Before the first one, that is found as it begins."""
        needs = self._needs()
        return needs is None or sum(needs) + nbytes <= self._limit

    def under_way(self) -> tuple[int, int] | None:
        """Of the iteration that is: bytes in use on the device when it began, and how many more it takes at most. None
        if there is none, or if it was measured with what others did within it."""
        return None if self._measured.has_others_within or not self.is_under_way() else self._needs()

    def note_others(self, *, are_settled: bool) -> None:
        """Other managers of the device are settled, and make no room, or none is."""
        self._is_beside = are_settled
        self._by_kind = self._measured.of(beside=are_settled)

    # -- helpers --------------------------------------------------------------------------------------

    def _needs(self) -> tuple[int, int] | None:
        """Bytes in use when what is under way, or was last, began, and how many more it takes at most."""
        if self._begun is None:
            return None
        kind, used, makes_gradients = self._begun
        by_kind = self._measured.by_kind_beside
        # Not learned: it may be another thread that asks.
        growth = by_kind.get(kind) or self._of_larger(kind, by_kind)
        return used, self._limit if growth is None else growth.most(are_there=not makes_gradients)

    def _fits_beside(self, nbytes: int) -> bool:
        """So many fit for the forward that begins beside what other settled models have still to take of theirs, which
        one backward may go through as well; where that was measured, it is in ``nbytes``."""
        if self._measured.has_others_within:
            return True
        others = [one for one in settled_on(self._stm.device) if one is not self._stm.standing.settled]
        begun = [needs for one in others if (needs := one.under_way()) is not None]
        # All of theirs and of ours is on the device already, so that the first has seen it.
        used = min((used for used, _ in begun), default=0)
        return used + sum(more for _, more in begun) + nbytes <= self._limit

    def _state_of(self, probe: nn.Parameter) -> _State:
        """Its version, that of its count of steps, if there is one, and its gradient with the version of that; nobody
        counts the writes to what is made in inference mode."""
        entry = None if self._optimizer is None else dict.get(self._optimizer.state, probe)
        steps = None if entry is None else entry.get("step")
        gradient = probe.grad
        return (
            probe._version,
            steps._version if isinstance(steps, torch.Tensor) and not steps.is_inference() else None,
            None
            if gradient is None
            else (weakref.ref(gradient), None if gradient.is_inference() else gradient._version),
        )

    def _learned(self, kind: ForwardKind) -> KindGrowth | None:
        """As `_of_larger`, and known from then on."""
        most = self._of_larger(kind, self._by_kind)
        if most is not None:
            self._by_kind[kind] = most
        return most

    def _of_larger(self, kind: ForwardKind, by_kind: dict[ForwardKind, KindGrowth]) -> KindGrowth | None:
        """Of a forward that was never measured: at most what larger ones take, the last batch of an epoch; or those
        that train, an evaluation."""
        if kind in self._unlike:
            return None
        larger = [growth for known, growth in list(by_kind.items()) if _is_covered(kind, known)]
        if not larger:
            return None
        return KindGrowth(
            with_gradients=max(growth.with_gradients for growth in larger),
            without=max(growth.without for growth in larger),
        )

    def _note_failures(self, failures: int) -> None:
        """The allocator's count of them is another than at the last check; less if somebody has reset it."""
        if failures > self._seen_failures:
            self.must_leave = True
            self._attempts.forbid()
        self._seen_failures = failures

    def _note_peak(self, peak: int) -> None:
        """It is another than at the last check; lower if somebody has reset it. Settled, it is ours alone to pass."""
        # Where none of ours has run since we settled beside others, it is theirs.
        if self._last is not None and peak > max(self._seen_peak, self._limit):
            self.must_leave, self.peak = True, peak
            self._attempts.note_passed()
            self._unlike.add(self._last)
            model_bytes = self._stm.ledger.device_bytes
            self._stm.plans.note_settled(self._last, peak - self._limit, model_bytes=model_bytes)
        self._seen_peak = peak


def _are_covered(coming: Sequence[ForwardKind], known: Sequence[ForwardKind]) -> bool:
    """The ``known`` ones begin so, each at least as large."""
    return len(coming) <= len(known) and all(
        kind == other or _is_covered(kind, other) for kind, other in zip(coming, known, strict=False)
    )


def _is_covered(kind: ForwardKind, known: ForwardKind) -> bool:
    """Such a forward needs no more than a ``known`` one: its inputs are the same, but for sizes, none of which is
    larger, and so is the model's mode; where it records no gradients and the known one does, that may be another."""
    trains, signature = kind
    known_trains, known_signature = known
    if not (isinstance(signature, tuple) and isinstance(known_signature, tuple)):
        return False
    if not trains and known_trains:
        signature, known_signature = without_training(signature), without_training(known_signature)
    elif trains != known_trains:
        return False
    return is_no_larger(signature, known_signature)
