"""What a settled forward of the model finds: whether the iteration to come fits as well.

Owns the measures that are compared: the inputs' signature, which must have been measured; the flags of frozen
parameters; whether momentum is still off; and three of the device's counters. It ends the state where the iteration to
come may need more than the budget has, or the one before did, and for good where memory has run out since the check
before: in backward, in the step, wherever nobody of ours is called.
"""

import operator
import weakref
from typing import Any

import torch
from torch import nn

from hetero.devices import Accelerator
from hetero.stm.manager import StatefulTensorMgr
from hetero.stm.plans.fits import ForwardKind, Growth, before_each_backward
from hetero.stm.settled.attempts import Attempts
from hetero.stm.updates.optimizers import without_momentum

__all__ = ["Check"]

_State = tuple[int, tuple["weakref.ref[torch.Tensor]", int] | None]

_requires_grad = operator.attrgetter("requires_grad")
_momentum = operator.itemgetter("momentum")


class Check:
    """Of one manager. `begin` when it settles, `end` when it leaves.

    Attributes:
        must_leave: at the next forward, whatever it finds.
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
        self.must_leave = False
        self._growth = Growth(peak=0, by_kind={})
        self._limit = 0
        self._seen_failures = self._seen_peak = 0
        self._last: ForwardKind | None = None  # kind of the last forward that ran settled
        # A trained parameter, which tells of steps and of gradients that are added up.
        self._probe: nn.Parameter | None = None
        # Kinds of training forwards since what the iteration takes from there on was last seen to be free, and what the
        # probe was then.
        self._since: list[ForwardKind] = []
        self._then: _State = (0, None)
        self._frozen: list[nn.Parameter] = []
        # Groups of the optimizer: there is no room for the states that the step makes once it is on.
        self._without_momentum: list[dict[str, Any]] = []

    def begin(self, kind: ForwardKind, growth: Growth, limit: int) -> None:
        """It has settled for a forward of such a kind. ``growth``: what iterations need beside model data; ``limit``:
        the bytes that all may take together, which is the budget less what was given to others, until `Manager.trim`.
        """
        self._growth, self._limit = growth, limit
        trained = [t.parameter for t in self._stm.tensors if t.parameter.requires_grad]
        self._probe = trained[-1] if trained else None
        self._frozen = [t.parameter for t in self._stm.tensors if not t.parameter.requires_grad]
        self._without_momentum = [] if self._optimizer is None else without_momentum(self._optimizer)
        self.must_leave = False
        self._last = kind
        if kind[0] and self._probe is not None:
            self._since, self._then = [kind], _state_of(self._probe)
        _, self._seen_peak, self._seen_failures = self._accelerator.pressure()

    def end(self) -> None:
        """No forward comes here any more."""
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
        growth = self._growth.by_kind.get(kind)
        makes_gradients = kind[0] and self._probe is not None and self._probe.grad is None
        admits = (
            growth is not None
            and used + (growth.without if makes_gradients else growth.with_gradients) <= self._limit
            and not self.must_leave
            and not any(map(_requires_grad, self._frozen))
        )
        self._last = kind
        if admits and kind[0] and self._probe is not None:
            self._since, self._then = [kind], _state_of(self._probe)
        return admits

    def foresees(self, kind: ForwardKind) -> bool:
        """Less is free than an iteration takes from such a forward on, because it is one of several in one, and what
        those before it have made is still there; that it all fits was seen at the first. To leave in between would be
        in vain, and gradients of the graphs that there are would be added up by themselves: other bits."""
        probe = self._probe
        if not (kind[0] and self._since) or probe is None or self._optimizer is None:
            return False
        if self.must_leave or any(map(_requires_grad, self._frozen)):
            return False
        # A step since then, or a backward that adds to gradients, would have moved them, but for kernels that do not.
        version, gradient = _state_of(probe)
        if version != self._then[0] or (gradient is not None and gradient != self._then[1]):
            return False
        if any(group.get("fused") for group in self._optimizer.param_groups):
            return False
        coming = [*self._since, kind]
        for plan in self._stm.plans:
            for known in before_each_backward(plan.keys):
                if any(known[begin : begin + len(coming)] == coming for begin in range(len(known))):
                    self._since = coming
                    return True
        return False

    # -- helpers --------------------------------------------------------------------------------------

    def _note_failures(self, failures: int) -> None:
        """The allocator's count of them is another than at the last check; less if somebody has reset it."""
        if failures > self._seen_failures:
            self.must_leave = True
            self._attempts.forbid()
        self._seen_failures = failures

    def _note_peak(self, peak: int) -> None:
        """It is another than at the last check; lower if somebody has reset it. Settled, it is ours alone to pass."""
        if peak > max(self._seen_peak, self._limit):
            self.must_leave = True
            self._attempts.note_passed()
            assert self._last is not None
            model_bytes = self._stm.ledger.device_bytes
            self._stm.plans.note_settled(self._last, peak - self._limit, model_bytes=model_bytes)
        self._seen_peak = peak


def _state_of(probe: nn.Parameter) -> _State:
    """Its version, and its gradient and the version of that."""
    gradient = probe.grad
    return probe._version, None if gradient is None else (weakref.ref(gradient), gradient._version)
