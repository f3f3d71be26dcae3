"""One managed parameter: its home on the host and its copy on the device.

Owns the three tensors behind a parameter and what is known of their versions. Invariant: `data`, when there
is one, holds what `home` held at `loaded_clock`, plus the writes counted by its version since
`clean_version`. Starts no copy: that is `hetero.stm.copies.residency`.

[Note: identity] Autograd must see one node per parameter and graph, wherever and however often its bytes are fetched:
with a node per fetch, the gradients of a weight that is used three times would be added in another order than without
hetero, and differ in the last bit. So the device copy that operators receive, the *identity*, is one non-leaf tensor
(the output of `hetero.stm.tensors.fetch.Fetch`) whose storage is exchanged by ``identity.data =``: an empty
one when the copy is evicted, a new one when it is fetched again. That is safe only while nobody else holds the tensor
itself; whoever does (a tensor saved outside our hooks, a custom Function's ``ctx.w``) makes `is_held` true and the copy
stays. Whoever holds a view keeps the storage alive, and counts as well.
"""

import sys
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.weak import TensorWeakRef

from hetero.errors import ManageError
from hetero.stm.deferred import Update
from hetero.stm.tensors.exposure import ATTRIBUTE_AND_NAME, WRAPPER_USES
from hetero.stm.tensors.graphpaths import GraphPaths
from hetero.stm.tensors.homeclock import HomeClock
from hetero.stm.tensors.hostcopies import note_at_home
from hetero.stm.tensors.inference import make_inference, make_ordinary
from hetero.stm.tensors.owner import Owner
from hetero.stm.tensors.precision import LowTwin, Master
from hetero.stm.tensors.state import Kind, Ledger, StatefulTensor

__all__ = ["Cast", "Layout", "ManagedTensor", "modified_in_place", "refused_write"]

Layout = tuple[torch.Size, tuple[int, ...], int]
"""Size, stride and storage offset of a view."""


@dataclass(slots=True)
class Cast:
    """A parameter's cast within one autocast region: its empty shell between operators, or, where somebody else holds
    it with its bytes, a weak reference (`hetero.stm.interception.casts`)."""

    region: int
    value: torch.Tensor | TensorWeakRef
    turn: int  # of its node in backward, by autograd's numbers; unless `is_early`
    is_early: bool = True
    unrecorded_uses: int = 0  # without gradients


class ManagedTensor(StatefulTensor):
    """A parameter under management. Created by `hetero.stm.tensors.registry.Registry`."""

    __slots__ = (
        "__weakref__",
        "_loaded_version",
        "_view",
        "cast",
        "clean_version",
        "clock",
        "data",
        "device_nbytes",
        "fetched_at",
        "full_nbytes",
        "gradient_slot",
        "home",
        "identity",
        "index",
        "is_exposed",
        "is_inference",
        "last_use",
        "loaded_clock",
        "low",
        "master",
        "may_be_ahead",
        "owner",
        "parameter",
        "paths",
        "pending",
        "ready",
        "stays",
        "storage_key",
    )

    def __init__(
        self,
        ledger: Ledger,
        name: str,
        index: int,
        parameter: nn.Parameter,
        owner: Owner,
        device_nbytes: int,
        full_nbytes: int,
    ) -> None:
        super().__init__(ledger, Kind.PARAMETER, name)
        self.index = index
        self.parameter = parameter
        self.owner = owner
        # Of the device: what a copy takes, and what one in home's own type would.
        self.device_nbytes = device_nbytes
        self.full_nbytes = full_nbytes
        self.clock = HomeClock()
        self.paths = GraphPaths()
        self._loaded_version = 0
        # Of ``data``, as it was last saved for backward: most are saved the same way in each iteration.
        self._view: tuple[torch.Tensor, Layout | None, torch.Tensor, int] | None = None
        self.data: torch.Tensor | None = None
        self.identity: torch.Tensor | None = None
        self.cast: Cast | None = None
        self.ready: torch.Event | None = None
        # An optimizer's update that home still waits for; a device copy beside it is on order
        # (`hetero.stm.copies.orders`).
        self.pending: Update | None = None
        # It lives on the device (`hetero.stm.step.devicehomes`): the copy is never evicted, and home follows when
        # somebody looks there.
        self.stays = False
        # The copy may have been written without our seeing it: home follows when somebody looks there, or it leaves.
        self.may_be_ahead = False
        self.storage_key = 0
        self.clean_version = 0
        self.loaded_clock = 0
        self.last_use = 0
        self.fetched_at = 0
        # Home's address was given away: it may be read without our knowing.
        self.is_exposed = False
        self.gradient_slot: torch.UntypedStorage | None = None
        # What device copies are made from, if they are of another type than home (`hetero.stm.tensors.precision`).
        self.low: LowTwin | None = None
        self.master: Master | None = None  # beside such a copy, where it lives on the device
        # The parameter was given an inference tensor as its data (`hetero.stm.tensors.inference`).
        self.is_inference = False
        self.home: torch.Tensor
        self.bind_home()

    def bind_home(self) -> None:
        """Look at the parameter's present storage. Call without ``__torch_function__`` dispatch."""
        self.is_inference = self.parameter.is_inference()
        # A detached alias shares storage and version counter with the parameter, unless that is an inference tensor,
        # and is a plain tensor.
        make_ordinary(self.parameter)
        self.home = self.parameter.detach()
        if self.is_inference:
            make_inference(self.parameter)
        note_at_home(self.home)
        self.clock.bind(self.home)
        if self.low is not None:
            self.low.clock = None

    def follow_parameter(self) -> None:
        """``p.set_()``, which cannot be intercepted, gives the parameter other memory: then that is home."""
        with torch._C.DisableTorchFunctionSubclass():
            if self.parameter.data_ptr() != self.home.data_ptr():
                self.bind_home()

    def forget_home(self) -> None:
        """Management is over: hold nothing that keeps the parameter's memory."""
        self.cast = self.low = self.master = None
        self.identity = self.data = self.gradient_slot = self._view = None
        self.home = self.parameter.detach()[:0] if self.parameter.dim() else torch.empty(0, device="cpu")
        self.clock.bind(self.home)

    # -- versions -------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """The version autograd's check sees: in-place writes to the parameter, at home or on the device."""
        if not self.is_written:
            return self.home._version
        # Another thread that looks at home may be bringing it up to date, and both counters with it.
        with self.owner.lock:
            written = 0 if self.data is None else self.data._version - self.clean_version
            return self.home._version + written

    def note_unknown_writes(self) -> bool:
        """`HomeClock.note_unknown_writes`; before its copy is used."""
        clock = self.clock
        return clock.may_be_written_unseen and clock.note_unknown_writes(copy_is_newer=self.is_dirty)

    def is_private(self) -> bool:
        """Nobody else holds its memory, at home or on the device, so that a late write cannot be seen to be late."""
        # One that lives on the device is written there, in place: whoever holds the copy sees it.
        written_at_home = self.data is not None and self.pending is None and not self.stays
        return self.home_is_private() and not (written_at_home and self.is_held())

    def home_is_private(self) -> bool:
        """As `is_private`, of its memory at home."""
        return not self.is_exposed and self.clock.home_is_private()

    @property
    def origin(self) -> torch.Tensor:
        """What device copies are made from, once `refresh_low` has seen to it."""
        return self.home if self.low is None else self.low.tensor

    @property
    def low_is_stale(self) -> bool:
        """Home was written since its low-precision twin was made, or may have been by somebody who holds its memory."""
        low = self.low
        return low is not None and (low.clock != self.clock.now or not self.home_is_private())

    def refresh_low(self) -> None:
        """Bring the low-precision twin up to date. Copies that read it have been waited for."""
        if self.low is not None and self.low_is_stale:
            self.low.refresh(self.home, self.clock.now)

    @property
    def is_resident(self) -> bool:
        """There is a device copy (perhaps still on its way)."""
        return self.data is not None

    @property
    def is_stale(self) -> bool:
        """Home was written after the device copy was made. One on order follows the write that it waits for."""
        return self.data is not None and self.pending is None and self.clock.now != self.loaded_clock

    @property
    def is_written(self) -> bool:
        """The device copy was written."""
        return self.data is not None and self.data._version != self.clean_version

    @property
    def is_dirty(self) -> bool:
        """Home may be behind the device copy."""
        return self.is_written or (self.may_be_ahead and self.data is not None)

    @property
    def is_miswritten(self) -> bool:
        """Its copy in low precision was written by somebody besides us."""
        if self.low is None or not self.is_dirty:
            return False
        return self.master is None or (self.data is not None and self.data._version != self.master.version)

    @property
    def living(self) -> torch.Tensor | None:
        """Its values on the device, in home's own type: what is stepped there; None if they are not there."""
        if self.low is None:
            return self.data
        return None if self.master is None else self.master.values

    @property
    def living_nbytes(self) -> int:
        """Of the device, while it lives there: its values, and its copy where that is another tensor."""
        return self.full_nbytes + (0 if self.low is None else self.device_nbytes)

    @property
    def is_tried(self) -> bool:
        """Its update is being tried, or was, and may still be taken back (`hetero.stm.step.speculation`)."""
        return self.pending is not None and self.pending.tentative

    @property
    def is_ahead(self) -> bool:
        """It lives on the device, and has been written there since home was brought up to date."""
        return self.stays and self.is_dirty

    def note_stepped(self, version: int) -> None:
        """`living`, which was at ``version``, has been stepped."""
        assert self.data is not None
        if self.master is not None:
            self.master.refresh(self.data)
        elif self.data._version == version:  # fused kernels write without moving it
            self.clean_version -= 1
        self.identity = None  # older graphs reach the parameter by it

    # -- the device copy ------------------------------------------------------------------------------

    def take_identity(self, identity: torch.Tensor) -> None:
        """Operators receive ``identity``, which is the copy, from now on."""
        self.identity, self.data = identity, identity.detach()
        self._view = None  # of the former ``data``, which would count as somebody else's

    def attach(self, copy: torch.Tensor) -> None:
        """``copy`` is the device copy from now on."""
        self._view = None
        if self.identity is None:
            self.data = copy
        else:
            self.identity.data = copy
            self.data = self.identity.detach()
        self.storage_key = copy.untyped_storage()._cdata
        self.note_loaded()

    def note_loaded(self) -> None:
        """The copy has, or will have, home's present bytes."""
        self.clean_version = 0 if self.data is None else self.data._version
        self.may_be_ahead = False
        self.note_arrived()

    def note_arrived(self) -> None:
        """The copy holds what home holds now; its own version tells nothing of that."""
        self.loaded_clock = self.clock.now
        self._loaded_version = self.home._version

    def version_of_copy(self) -> int:
        """The copy's, had it seen the writes to home since it was made."""
        return (0 if self.data is None else self.data._version) + self.home._version - self._loaded_version

    def view_of(self, copy: torch.Tensor, layout: Layout | None) -> torch.Tensor:
        """``copy``, as `UseOwner.load_saved` returned it, seen as ``layout``, or as it is, for backward."""
        view = self._view
        if (
            view is not None
            and view[0] is copy
            and view[1] == layout
            # Whoever got it before may have made something else of it.
            and view[2].data_ptr() == view[3]
            and view[2].stride() == (copy.stride() if layout is None else layout[1])
            and not view[2].requires_grad
        ):
            return view[2]
        seen = copy.detach() if layout is None else copy.as_strided(*layout)
        if copy is self.data:
            self._view = (copy, layout, seen, seen.data_ptr())
        return seen

    def detach(self, placeholder: torch.Tensor) -> None:
        """Forget the device copy. Its memory is free unless somebody else holds it."""
        if self.identity is not None:
            if self._identity_is_ours():
                self.identity.data = placeholder
            else:
                self.identity = None
        self.data = self._view = self.master = None
        self.ready = None
        self.storage_key = 0

    def is_held(self) -> bool:
        """Somebody besides us holds the copy: evicting it would free nothing."""
        if self._view is not None:
            seen = self._view[2]
            uses: int = seen._use_count()  # type: ignore[attr-defined]
            if uses != 1 or sys.getrefcount(seen) > ATTRIBUTE_AND_NAME:
                self._view = None
            del seen
        ours = WRAPPER_USES + (1 if self.identity is None else 2) + (self._view is not None)
        return torch._C._storage_Use_Count(self.storage_key) > ours or not self._identity_is_ours()

    def _identity_is_ours(self) -> bool:
        identity = self.identity
        if identity is None:
            return True
        uses: int = identity._use_count()  # type: ignore[attr-defined]
        return uses == 1 and sys.getrefcount(identity) <= ATTRIBUTE_AND_NAME


def modified_in_place(tensor: torch.Tensor, version: int, expected: int) -> RuntimeError:
    """The error autograd raises without hooks."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{tensor.type()} {list(tensor.shape)}] is at version {version}; expected version {expected} instead."
    )


def refused_write(tensor: ManagedTensor) -> ManageError:
    """A low-precision copy was written: home would lose what that type cannot hold, in every element."""
    assert tensor.low is not None
    return ManageError(
        f"{tensor.name} was written in place within the model's forward, where it is {tensor.low.tensor.dtype} under "
        f"precision; its home is {tensor.home.dtype} and was left as it was: write it outside the forward, or manage "
        "the model without precision"
    )
