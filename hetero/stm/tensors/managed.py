"""One managed parameter: its home on the host and its copy on the device.

Owns the three tensors behind a parameter and what is known of their versions. Invariant: `data`, when there
is one, holds what `home` held at `loaded_clock`, plus the writes counted by its version since
`clean_version`. Starts no copy: that is `hetero.stm.copies.residency`.

[Note: identity] Autograd must see one node per parameter and graph, wherever and however often its bytes are fetched:
with a node per fetch, the gradients of a weight that is used three times would be added in another order than without
hetero, and differ in the last bit. So the device copy that operators receive, the *identity*, is one non-leaf tensor
(the output of `hetero.stm.interception.intercept.Fetch`) whose storage is exchanged by ``identity.data =``: an empty
one when the copy is evicted, a new one when it is fetched again. That is safe only while nobody else holds the tensor
itself; whoever does (a tensor saved outside our hooks, a custom Function's ``ctx.w``) makes `is_held` true and the copy
stays. Whoever holds a view keeps the storage alive, and counts as well.
"""

import sys
import weakref
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.weak import TensorWeakRef

from hetero.devices import storage_of
from hetero.errors import ManageError
from hetero.stm.deferred import Update
from hetero.stm.tensors.exposure import memory_is_private
from hetero.stm.tensors.hostcopies import note_at_home
from hetero.stm.tensors.owner import Owner
from hetero.stm.tensors.precision import LowTwin, Master
from hetero.stm.tensors.state import Kind, Ledger, StatefulTensor

__all__ = ["WRAPPER_USES", "Cast", "Layout", "ManagedTensor", "refused_write"]

Layout = tuple[torch.Size, tuple[int, ...], int]
"""Size, stride and storage offset of a view."""


@dataclass(slots=True)
class Cast:
    """A parameter's cast within one autocast region: its empty shell between operators, or, where somebody else holds
    it with its bytes, a weak reference (`hetero.stm.interception.casts`)."""

    region: int
    value: torch.Tensor | TensorWeakRef


class _Probe:
    __slots__ = ("identity",)
    identity: torch.Tensor


def _reference_baselines() -> tuple[int, int]:
    probe = _Probe()
    probe.identity = torch.empty(1, device="cpu")
    key = probe.identity.untyped_storage()._cdata
    return sys.getrefcount(probe.identity), torch._C._storage_Use_Count(key) - 1


# Measured, because they differ between versions of Python and torch: what sys.getrefcount answers for a tensor that
# only an attribute holds, and how many uses of a storage come on top of the tensors' (its Python wrapper).
_ONLY_OURS, WRAPPER_USES = _reference_baselines()


class ManagedTensor(StatefulTensor):
    """A parameter under management. Created by `hetero.stm.manager.StatefulTensorMgr`."""

    __slots__ = (
        "__weakref__",
        "_alias",
        "_doubtful_writes",
        "_fetch_nodes",
        "_home_graphs",
        "_is_trained_at_home",
        "_loaded_version",
        "_source",
        "_unseen_writes",
        "_view",
        "_was_given_out",
        "cast",
        "clean_version",
        "data",
        "device_nbytes",
        "fetched_at",
        "full_nbytes",
        "gradient_slot",
        "home",
        "identity",
        "index",
        "is_exposed",
        "last_use",
        "loaded_clock",
        "low",
        "master",
        "may_be_ahead",
        "owner",
        "parameter",
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
        self._alias: torch.Tensor | None = None
        self._source: torch.Tensor | None = None
        self._unseen_writes = 0
        # Of these, what somebody may have done who was given home's memory: most often they only looked.
        self._doubtful_writes = 0
        # Somebody was given home's memory, and may have written there, since it was last asked who has it.
        self._was_given_out = False
        self._loaded_version = 0
        self._fetch_nodes: list[weakref.ref[torch.autograd.graph.Node]] = []
        # Of ``data``, as it was last saved for backward: most are saved the same way in each iteration.
        self._view: tuple[torch.Tensor, Layout | None, torch.Tensor, int] | None = None
        self.data: torch.Tensor | None = None
        self.identity: torch.Tensor | None = None
        self.cast: Cast | None = None
        self.ready: torch.Event | None = None
        # An optimizer's update that home still waits for; a device copy beside it is on order (`Residency`).
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
        self._home_graphs: list[weakref.ref[object]] = []
        self._is_trained_at_home = False
        # Home's address was given away: it may be read without our knowing.
        self.is_exposed = False
        self.gradient_slot: torch.UntypedStorage | None = None
        # What device copies are made from, if they are of another type than home (`hetero.stm.tensors.precision`).
        self.low: LowTwin | None = None
        self.master: Master | None = None  # beside such a copy, where it lives on the device
        self.home: torch.Tensor
        self.bind_home()

    def bind_home(self) -> None:
        """Look at the parameter's present storage. Call without ``__torch_function__`` dispatch."""
        # A detached alias shares storage and version counter with the parameter, and is a plain tensor.
        self.home = self.parameter.detach()
        note_at_home(self.home)
        self._alias = None
        self._source = None
        self._was_given_out = False
        if self.low is not None:
            self.low.clock = None

    def follow_parameter(self) -> None:
        """``p.set_()``, which cannot be intercepted, gives the parameter other memory: then that is home."""
        with torch._C.DisableTorchFunctionSubclass():
            if self.parameter.data_ptr() != self.home.data_ptr():
                self.bind_home()

    def watch(self, source: torch.Tensor) -> None:
        """Home is memory that ``source`` shares, under a version counter of its own (``p.data = flat[i:j]``)."""
        self._source = source

    def forget_home(self) -> None:
        """Management is over: hold nothing that keeps the parameter's memory."""
        self.cast = self.low = self.master = None
        self.identity = self.data = self._alias = self._source = self.gradient_slot = self._view = None
        self.home = self.parameter.detach()[:0] if self.parameter.dim() else torch.empty(0, device="cpu")

    # -- versions -------------------------------------------------------------------------------------

    @property
    def home_clock(self) -> int:
        """Moves whenever home is written, through the parameter or through its ``.data``."""
        clock = self.home._version + self._unseen_writes
        if self._alias is not None:
            clock += self._alias._version
        if self._source is not None:
            clock += self._source._version
        return clock

    @property
    def known_clock(self) -> int:
        """As `home_clock`, without what was never more than a doubt: it tells nothing of iterations to come."""
        return self.home_clock - self._doubtful_writes

    @property
    def version(self) -> int:
        """The version autograd's check sees: in-place writes to the parameter, at home or on the device."""
        written = 0 if self.data is None else self.data._version - self.clean_version
        return self.home._version + written

    def note_write(self) -> None:
        """Home was written by somebody who does not move version counters: fused optimizer kernels do not."""
        self._unseen_writes += 1

    def note_given_out(self) -> None:
        """Somebody has home's memory: what they write through ``.data`` of a view of it moves no counter that we see.
        `note_unknown_writes` is to follow before its copy is used again."""
        self._was_given_out = True

    def shares(self, tensor: torch.Tensor) -> bool:
        """``tensor`` lies in home's memory."""
        storage = storage_of(tensor)
        return storage is not None and storage._cdata == self.home.untyped_storage()._cdata

    @property
    def may_be_written_unseen(self) -> bool:
        """By somebody who has home's memory, or had it not long ago. If not, `note_unknown_writes` does nothing."""
        return self._was_given_out or self._source is not None

    def note_unknown_writes(self) -> bool:
        """Home counts as written if somebody may have done so unseen; whether it does. They are those who were given
        its memory since this was asked last, or still have it, and those who share the memory of
        ``p.data = x[i:j].data`` (``vector_to_parameters``)."""
        if not self.may_be_written_unseen:
            return False
        if self._source is None and self.is_dirty:
            return False  # whoever was given home found it up to date: only the copy is known to be newer
        ours = 1 + (self._alias is not None) + (self._source is not None)
        is_shared = not memory_is_private(self.home, ours)
        if not (self._was_given_out or is_shared):
            return False
        self._was_given_out = is_shared
        self._doubtful_writes += self._source is None
        self.note_write()
        return True

    def data_alias(self) -> torch.Tensor:
        """What ``p.data`` is: same memory, with a version counter of its own, which we can watch."""
        if self._alias is None:
            self._alias = self.home.data
        return self._alias.detach()

    def is_private(self) -> bool:
        """Nobody else holds its memory, at home or on the device, so that a late write cannot be seen to be late."""
        # One that lives on the device is written there, in place: whoever holds the copy sees it.
        written_at_home = self.data is not None and self.pending is None and not self.stays
        return self._home_is_private() and not (written_at_home and self.is_held())

    def _home_is_private(self) -> bool:
        if self.is_exposed or self._source is not None:
            return False
        return memory_is_private(self.home, 1 if self._alias is None else 2)

    @property
    def origin(self) -> torch.Tensor:
        """What device copies are made from, once `refresh_low` has seen to it."""
        return self.home if self.low is None else self.low.tensor

    @property
    def low_is_stale(self) -> bool:
        """Home was written since its low-precision twin was made, or may have been by somebody who holds its memory."""
        low = self.low
        return low is not None and (low.clock != self.home_clock or not self._home_is_private())

    def refresh_low(self) -> None:
        """Bring the low-precision twin up to date. Copies that read it have been waited for."""
        if self.low is not None and self.low_is_stale:
            self.low.refresh(self.home, self.home_clock)

    @property
    def is_resident(self) -> bool:
        """There is a device copy (perhaps still on its way)."""
        return self.data is not None

    @property
    def can_be_read(self) -> bool:
        """There is a device copy, it has arrived, and is as new as home."""
        if self.data is None or self.ready is not None or self.pending is not None:
            return False
        if self._alias is not None or self._source is not None:
            return self.home_clock == self.loaded_clock
        return self.home._version + self._unseen_writes == self.loaded_clock  # the same, and the common case

    @property
    def is_stale(self) -> bool:
        """Home was written after the device copy was made. One on order follows the write that it waits for."""
        return self.data is not None and self.pending is None and self.home_clock != self.loaded_clock

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

    def note_arrived(self) -> None:  # its version tells nothing of the arrival
        self.loaded_clock = self.home_clock
        self._loaded_version = self.home._version

    def version_of_copy(self) -> int:
        """The copy's, had it seen the writes to home since it was made."""
        return (0 if self.data is None else self.data._version) + self.home._version - self._loaded_version

    def view_of(self, copy: torch.Tensor, layout: Layout | None) -> torch.Tensor:
        """``copy``, as `Owner.load_saved` returned it, seen as ``layout``, or as it is, for backward."""
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
            # As in `_identity_is_ours`. Without a call, which would hold its argument while Dynamo looks at frames.
            uses: int = seen._use_count()  # type: ignore[attr-defined]
            if uses != 1 or sys.getrefcount(seen) > _ONLY_OURS + 1:
                self._view = None
            del seen
        ours = WRAPPER_USES + (1 if self.identity is None else 2) + (self._view is not None)
        return torch._C._storage_Use_Count(self.storage_key) > ours or not self._identity_is_ours()

    def _identity_is_ours(self) -> bool:
        identity = self.identity
        if identity is None:
            return True
        # One more than the baseline: the local name.
        uses: int = identity._use_count()  # type: ignore[attr-defined]
        return uses == 1 and sys.getrefcount(identity) <= _ONLY_OURS + 1

    # -- fetch nodes ----------------------------------------------------------------------------------

    def add_fetch_node(self, node: torch.autograd.graph.Node) -> None:
        """A graph now reaches the parameter through ``node``."""
        self._fetch_nodes = [ref for ref in self._fetch_nodes if ref() is not None]
        self._fetch_nodes.append(weakref.ref(node))

    @property
    def used_at_home(self) -> bool:
        """Autograd may reach the parameter by a path of its own, at home: by a graph that is there, or by another,
        since a backward has begun while one was. What was only looked at (a norm for a log) leaves nothing behind."""
        if self._is_trained_at_home or not self._home_graphs:  # written out: each gradient asks
            return self._is_trained_at_home
        return any(ref() is not None for ref in self._home_graphs)

    def note_home_graph(self, mark: object | None) -> None:
        """Such a graph has been made; it is gone when ``mark`` is. None: nothing tells when."""
        if mark is None:
            self._is_trained_at_home = True
        elif not self._is_trained_at_home:
            self._home_graphs = [ref for ref in self._home_graphs if ref() is not None]
            self._home_graphs.append(weakref.ref(mark))

    def note_backward(self) -> None:
        """One begins: if there is such a graph, there will be another in the next iteration."""
        if self._home_graphs:
            self._is_trained_at_home = self.used_at_home
            self._home_graphs = []

    def has_single_path(self) -> bool:
        """The backward that runs reaches the parameter through one fetch node only, so nothing is added to what that
        hands over. Others that are alive belong to graphs that somebody keeps (a loss that is summed up)."""
        if self.used_at_home:
            return False
        alive = [node for ref in self._fetch_nodes if (node := ref()) is not None]
        return len(alive) <= 1 or sum(map(torch._C._will_engine_execute_node, alive)) <= 1


def refused_write(tensor: ManagedTensor) -> ManageError:
    """A low-precision copy was written: home would lose what that type cannot hold, in every element."""
    assert tensor.low is not None
    return ManageError(
        f"{tensor.name} was written in place within the model's forward, where it is {tensor.low.tensor.dtype} under "
        f"precision; its home is {tensor.home.dtype} and was left as it was: write it outside the forward, or manage "
        "the model without precision"
    )
