"""Host memory's accounting against naive counts: slabs one by one, and blocks under a budget."""

import gc
import mmap
import warnings
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hetero.devices import HostArena, pinned
from hetero.stm import Kind, Ledger, StatefulTensor, Tier
from hetero.stm.activations.slots import HostSlots

PAGE = mmap.PAGESIZE
SHAPES = st.lists(st.integers(0, 16), max_size=3).map(tuple)
DTYPES = st.sampled_from((torch.uint8, torch.bfloat16, torch.float32, torch.complex128))


def rounded(nbytes: int, unit: int) -> int:
    whole = 0
    while whole < nbytes:
        whole += unit
    return whole


@dataclass(eq=False)
class Slab:
    """``held``: by whoever has memory of it, a number each."""

    nbytes: int
    is_locked: bool
    cut: int = 0
    held: set[int] = field(default_factory=set)


class Slabs(RuleBasedStateMachine):
    """Tensors come and go in any order, some outlived by views; page-locking works, is refused, or fails."""

    def __init__(self) -> None:
        super().__init__()
        self.locked: dict[int, int] = {}  # address to bytes, of what is registered
        self.locking = "works"
        self.register, pinned._register = pinned._register, self.fake_register
        self.arena = HostArena(SimpleNamespace(), pin=True)
        self.pins = True
        self.slabs: list[Slab] = []
        self.open: Slab | None = None
        self.expected = self.requested = self.numbers = 0
        self.live: dict[int, tuple[torch.Tensor, Slab | None, int]] = {}
        self.views: dict[int, torch.Tensor] = {}

    def teardown(self) -> None:
        self.live.clear()
        self.views.clear()
        del self.arena
        assert not self.locked
        pinned._register = self.register

    def fake_register(self, accelerator, address, nbytes):
        if self.locking == "fails":
            raise MemoryError
        if self.locking == "is refused":
            return None
        self.locked[address] = nbytes
        return lambda: self.locked.pop(address)

    @rule(nbytes=st.integers(0, 3 * PAGE))
    def expect(self, nbytes: int) -> None:
        self.arena.expect(nbytes)
        self.expected += nbytes

    @rule(how=st.sampled_from(("works", "works", "is refused", "fails")))
    def lock(self, how: str) -> None:
        self.locking = how

    @rule(shape=SHAPES, dtype=DTYPES, is_transposed=st.booleans())
    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, is_transposed: bool) -> None:
        like = torch.empty(shape, dtype=dtype, device="meta")
        like = like.permute(tuple(reversed(range(len(shape))))) if is_transposed else like
        nbytes = like.numel() * dtype.itemsize
        fits = self.open is not None and self.open.cut + nbytes <= self.open.nbytes
        fails = nbytes > 0 and not fits and self.pins and self.locking == "fails"
        lost = self.arena.lost_bytes(nbytes)
        try:
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                tensor = self.arena.empty_strided(tuple(like.shape), like.stride(), dtype)
        except MemoryError:
            assert fails
            return
        assert not fails
        assert (tensor.shape, tensor.stride(), tensor.dtype) == (like.shape, like.stride(), dtype)
        before = sum(slab.nbytes for slab in self.slabs)
        slab = self.expect_cut(nbytes, fits) if nbytes else None
        refused = nbytes > 0 and not fits and self.pins and self.locking == "is refused"
        self.pins = self.pins and not refused
        assert [w.category for w in said] == [RuntimeWarning] * refused  # once: it is not tried again
        if nbytes:
            assert slab is not None
            # With the slab that a new one replaces, though nobody holds it: for a moment both are there.
            assert lost == before + (0 if fits else slab.nbytes) - self.requested
        tensor.untyped_storage().fill_(self.numbers % 251)
        self.live[self.numbers] = tensor, slab, nbytes
        self.numbers += 1

    def expect_cut(self, nbytes: int, fits: bool) -> Slab:
        if not fits:
            size = rounded(max(nbytes, self.expected), PAGE)
            before, self.open = self.open, Slab(size, self.pins and self.locking == "works")
            self.slabs.append(self.open)
            if before is not None and not before.held:
                self.slabs.remove(before)
        assert self.open is not None
        self.open.cut += rounded(nbytes, 512)
        self.open.held.add(self.numbers)
        self.expected = max(0, self.expected - rounded(nbytes, 512))
        self.requested += nbytes
        return self.open

    @precondition(lambda self: self.live)
    @rule(data=st.data(), keeps_view=st.booleans())
    def drop(self, data: st.DataObject, keeps_view: bool) -> None:
        number = data.draw(st.sampled_from(sorted(self.live)))
        tensor, slab, nbytes = self.live.pop(number)
        self.arena.note_tensors_gone(nbytes)
        self.requested -= nbytes
        if slab is None:
            return
        if keeps_view:
            self.views[number] = tensor.view(-1) if tensor.is_contiguous() else tensor.detach()
        slab.held.discard(number)
        slab.held |= {-number - 1} if keeps_view else set()
        self.forget_if_unused(slab)

    @precondition(lambda self: self.views)
    @rule(data=st.data())
    def drop_view(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.views)))
        del self.views[number]
        slab = next(slab for slab in self.slabs if -number - 1 in slab.held)
        slab.held.discard(-number - 1)
        self.forget_if_unused(slab)

    def forget_if_unused(self, slab: Slab) -> None:
        if not slab.held and slab is not self.open:
            self.slabs.remove(slab)

    @invariant()
    def slabs_are_those_that_somebody_holds(self) -> None:
        assert self.arena.nbytes == sum(slab.nbytes for slab in self.slabs)
        assert sorted(self.locked.values()) == sorted(slab.nbytes for slab in self.slabs if slab.is_locked)

    @invariant()
    def nobody_has_written_into_anothers_memory(self) -> None:
        tensors = {number: tensor for number, (tensor, _, _) in self.live.items()} | self.views
        for number, tensor in tensors.items():
            storage = tensor.untyped_storage()
            assert storage.data_ptr() % 512 == 0
            assert (torch.empty(0, dtype=torch.uint8).set_(storage) == number % 251).all()


TestSlabs = Slabs.TestCase
TestSlabs.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)

BUDGET, HOMES = 24 * PAGE, 4 * PAGE


class Budgeted(RuleBasedStateMachine):
    """Blocks are taken, given back, kept for good and lent: slabs, homes and what is lent stay within the budget."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.arena = HostArena(SimpleNamespace(), pin=False)
        self.slots = HostSlots(self.arena, self.ledger, BUDGET, HOMES)
        self.slots.ask_back = self.ask_back
        self.lent = StatefulTensor(self.ledger, Kind.OPTIMIZER_STATE, "lent")
        self.taken: list[torch.Tensor] = []
        self.reserved: list[torch.Tensor] = []
        self.marks = 0

    def ask_back(self, nbytes: int) -> None:
        self.change_lent(-min(rounded(nbytes, PAGE), self.lent_bytes))

    @property
    def lent_bytes(self) -> int:
        return self.lent.nbytes(Tier.HOST)

    def change_lent(self, change: int, share: float = 1.0) -> None:
        if self.slots.lend(change, share=share):
            self.lent.place(Tier.HOST, self.lent_bytes + change)

    @rule(nbytes=st.integers(1, 6 * PAGE))
    def take(self, nbytes: int) -> None:
        could, before = self.slots.has_room(nbytes), self.lent_bytes
        block = self.slots.take(nbytes)
        if block is None:
            return
        assert could
        assert before >= self.lent_bytes
        self.mark(block, nbytes)
        self.taken.append(block)

    @rule(nbytes=st.integers(1, 3 * PAGE))
    def reserve(self, nbytes: int) -> None:
        block = self.slots.reserve(nbytes)
        if block is not None:
            self.mark(block, rounded(nbytes, 512))
            self.reserved.append(block)

    def mark(self, block: torch.Tensor, nbytes: int) -> None:
        assert block.numel() == nbytes
        self.marks += 1
        block.fill_(self.marks % 251)

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        self.slots.give_back(self.taken.pop(data.draw(st.integers(0, len(self.taken) - 1))))

    @rule(nbytes=st.integers(1, 8 * PAGE), share=st.sampled_from((0.5, 1.0)))
    def lend(self, nbytes: int, share: float) -> None:
        self.change_lent(nbytes, share)

    @precondition(lambda self: self.lent_bytes)
    @rule(data=st.data())
    def comes_back(self, data: st.DataObject) -> None:
        self.change_lent(-data.draw(st.integers(1, self.lent_bytes)))

    @invariant()
    def the_budget_holds(self) -> None:
        assert HOMES + self.arena.nbytes + self.lent_bytes <= BUDGET

    @invariant()
    def blocks_are_one_users_each(self) -> None:
        blocks = [*self.taken, *self.reserved]
        assert sum(rounded(b.untyped_storage().nbytes(), 512) for b in self.taken) <= self.slots.nbytes
        assert len({block.untyped_storage().data_ptr() for block in blocks}) == len(blocks)
        assert all((block == block[0]).all() for block in blocks)


TestBudgeted = Budgeted.TestCase
TestBudgeted.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_an_arena_that_is_dropped_leaves_its_tensors_their_memory() -> None:
    arena = HostArena(SimpleNamespace(), pin=False)
    tensor = arena.empty_strided((PAGE,), (1,), torch.uint8).fill_(7)
    del arena
    gc.collect()
    assert set(tensor.tolist()) == {7}
