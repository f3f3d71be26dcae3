"""What a managed tensor may ask of its manager.

Owns the protocols by which what lies below `hetero.stm.manager` reaches it. They say what is to be true afterwards;
how, is said where they are implemented.
"""

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

if TYPE_CHECKING:
    from hetero.stm.tensors.managed import ManagedTensor
    from hetero.stm.tensors.onlookers import Onlookers

__all__ = ["GradientOwner", "HomeOwner", "Owner", "Relief", "SettledState", "StepOwner", "UseOwner"]


class SettledState(Protocol):
    """Whether everything fits, and nothing is intercepted (`hetero.stm.settled.state.Settled`).

    ``device``: where; ``onlookers``: who would notice that; ``optimizer``: the managed one; ``running``: threads of the
    model's forwards.
    """

    device: torch.device
    is_on: bool
    running: list[int]
    onlookers: "Onlookers"
    optimizer: torch.optim.Optimizer | None

    def has_room_for(self, nbytes: int) -> bool:
        """The iteration that is under way fits with so many bytes of another manager's beside it."""

    def under_way(self) -> tuple[int, int] | None:
        """Of the iteration that is, where others may come in its middle: bytes in use on the device when it began, and
        how many more it takes at most."""

    def is_amid_unseen(self) -> bool:
        """Nobody intercepts the iteration that is under way: it is settled, or was when that began."""

    def note_others(self, *, are_settled: bool) -> None:
        """Other managers of the device are settled, or none is."""

    def version(self, tensor: "ManagedTensor") -> int:
        """Of a parameter, for graphs from before."""

    def note_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """It has parameters of ours."""

    def forbid(self) -> None:
        """Never settle."""

    def leave(self, *, force: bool = False, amid: bool = False) -> bool:
        """Intercept again; False if that cannot be now."""

    def make_way(self) -> bool:
        """Intercept again, now and for good, for a manager that lacks room; False if that cannot be now."""


class HomeOwner(Protocol):
    """What the user and torch may do with homes (`hetero.stm.homeaccess.HomeAccess`)."""

    def wait(self, tensor: "ManagedTensor") -> None:
        """Return once home is what the last ``optimizer.step()`` made of it."""

    def wait_all(self) -> None:
        """As `wait`, for every parameter."""

    def before_write(self, tensor: "ManagedTensor") -> None:
        """It is about to be written: no copy may still be reading it."""

    def give_out(self, tensor: "ManagedTensor") -> None:
        """Somebody is about to get its memory, and may write there unseen."""

    def note_given_back(self, tensor: "ManagedTensor") -> None:
        """Who was given its memory last has only read it, and is about to let go of it."""

    def follow_unknown_writes(self, tensor: "ManagedTensor") -> None:
        """Its copy is about to be used: it is to show what may have been written unseen."""

    def after_write(self, tensor: "ManagedTensor") -> None:
        """It has been: a copy that somebody else holds follows."""

    def write_back(self, tensor: "ManagedTensor") -> None:
        """Bring home up to date with writes to the copy."""

    def rebind(self, tensor: "ManagedTensor", data: torch.Tensor, *, is_inference: bool) -> None:
        """``data`` is home from now on."""


class StepOwner(Protocol):
    """What steps of optimizers mean (`hetero.stm.running.steps.Steps`)."""

    def is_running(self, optimizer: torch.optim.Optimizer) -> bool:
        """``optimizer`` is the one that is managed, and its step runs: it knows by itself what to wait for."""

    def begin_kept(self, optimizer: torch.optim.Optimizer) -> None:
        """A step of ``optimizer`` begins: if it is the one that is managed, by a method from before that, the iteration
        ends with it all the same."""

    def end_kept(self, optimizer: torch.optim.Optimizer) -> None:
        """It has ended, and what it has written has been noted."""


class GradientOwner(Protocol):
    """What the user may do with ``p.grad`` (`hetero.stm.gradients.access.GradientAccess`)."""

    def wait(self, tensor: "ManagedTensor") -> None:
        """Return once it can be read."""

    def replace(self, tensor: "ManagedTensor", gradient: object) -> None:
        """It is about to be ``gradient``."""

    def drop(self, tensor: "ManagedTensor") -> None:
        """``p.grad = None``, without waiting for who still needs it."""

    def zero(self, tensor: "ManagedTensor") -> bool:
        """``p.grad.zero_()``, now or before anybody sees it. False: nothing has been done."""

    def norms(self, tensors: "list[ManagedTensor]", norm_type: float) -> torch.Tensor:
        """Norms of their gradients, on the device, in a vector."""

    def scale(self, tensors: "list[ManagedTensor]", factor: torch.Tensor) -> None:
        """Multiply their gradients, now or before anybody sees them."""

    def clamp(self, tensors: "list[ManagedTensor]", most: float) -> None:
        """Bring all numbers of their gradients between ``-most`` and ``most``, likewise."""


class Relief(Protocol):
    """Who is asked when the device has no memory left (`hetero.stm.running.relief.Relief`)."""

    def relieve(self, unless_free: int | None = None) -> int:
        """Free what can be freed after an out-of-memory error; or before one, ``unless_free`` bytes are free. Returns
        the bytes freed."""

    def relieve_after(self, error: BaseException) -> int:
        """As `relieve`, of what was there before the attempt that failed with ``error``."""

    def require(self, nbytes: int, name: str) -> None:
        """So many are free, for a copy of ``name`` that is the caller's. Raises `BudgetError` if they cannot be."""

    def random_numbers(self) -> Callable[[], object]:
        """Notes where those of the device are; what it returns goes back there."""

    def note_answered(self) -> None:
        """What failed for want of memory is tried again after `relieve`."""

    def refused(self, operator: str, error: RuntimeError) -> Exception:
        """What to say of an operator that has failed with the allocator's ``error``, and is not tried again."""


class UseOwner(Protocol):
    """What operators and backward do with parameters (`hetero.stm.uses.Uses`)."""

    def begin_outside(self) -> None:
        """Autograd records an operator outside of the model's forward: unless one has begun, this begins one."""

    def begin_operator(self, operands: list["ManagedTensor"], name: object) -> None:
        """The pre-op sampling moment; operands are resident and in COMPUTE afterwards."""

    def end_operator(self, operands: list["ManagedTensor"]) -> None:
        """It is done with them."""

    def note_unguarded(self) -> None:
        """An operator is about to come that cannot be tried again when it runs out of memory."""

    def copy_for(self, tensor: "ManagedTensor") -> torch.Tensor:
        """What the operator receives instead of the parameter."""

    def hand_over(
        self, tensor: "ManagedTensor", gradient: torch.Tensor, *, is_shared: bool
    ) -> torch.Tensor | None:
        """The gradient is complete on the device; what autograd takes for it at home, if anything. ``is_shared``:
        somebody else holds it as well, and may write to it."""

    def load_saved(self, tensor: "ManagedTensor", version: int) -> torch.Tensor:
        """Backward is about to read a saved copy."""


class Owner(Protocol):
    """The manager behind a tensor, as interception sees it (`hetero.stm.manager.StatefulTensorMgr`)."""

    device: torch.device

    @property
    def settled(self) -> SettledState | None:
        """Who knows whether everything fits, once somebody looks after that."""

    @property
    def lock(self) -> contextlib.AbstractContextManager[bool]:
        """Of the manager's bookkeeping, for its own thread again and again."""

    @property
    def home_access(self) -> HomeOwner:
        """Who is asked before anybody reads or writes a home."""

    @property
    def uses(self) -> UseOwner:
        """Who is told of operators, and asked by backward."""

    @property
    def steps(self) -> StepOwner:
        """Who is told of steps."""

    @property
    def gradient_access(self) -> GradientOwner:
        """Who is asked before anybody touches ``p.grad``."""

    @property
    def relief(self) -> Relief:
        """Who is asked when the device has no memory left."""

    def note_part(self, part: nn.Module) -> None:
        """A module of the model has been called by itself."""

    def check_process(self) -> None:
        """Raises in a forked child, which can neither reach the device nor write homes."""
