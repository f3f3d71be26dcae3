"""The ledger: every storage that operators touch, seen from below autograd.

Owns the record of storages (birth, death, size) and of operators while it is entered as a dispatch mode.
Invariant: a storage is in `_live` exactly while its C++ object lives: a weak reference on the Python storage,
which torch keeps alive as long as the C++ one, closes its life. It does not decide what a step is: `cut`
takes any window of operators.

[Note: views] Operators that only make views run no kernel and touch no byte: they are not recorded and take
no time.
[Note: begins and ends] Operator i begins at time i. What is freed between its begin and that of i + 1 ends at i + 1: it
was still there while i allocated its output.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from hetero.devices import calling, storage_of
from hetero.devices.operators import ALLOCATE_ONLY, NO_KERNEL, tensors_of
from hetero.errors import PlanError
from hetero.trace.scopes import Scopes
from hetero.trace.steptrace import Kind, Operator, Phase, StepTrace, Storage

__all__ = ["Ledger", "RecordedOperator"]

# Operators that write their first argument without looking at what it held.
_OVERWRITES = frozenset(
    {"zero_", "fill_", "copy_", "normal_", "uniform_", "random_", "bernoulli_"}
    | {"_foreach_zero_", "_foreach_copy_"}
)
# Questions about shapes and flags: no kernel, whatever they are asked of.
_METADATA = frozenset(
    {"_fused_sdp_choice", "is_pinned", "is_same_size", "sym_size", "sym_stride", "sym_numel"}
)


@dataclass(slots=True)
class _Life:
    """A storage as it is being recorded; ``end`` is None while it lives."""

    nbytes: int
    begin: int
    end: int | None
    kind: Kind | None
    name: str
    device: str
    allocated: bool  # by the operator at ``begin``, and not seen there for the first time


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedOperator:
    """An operator in the endless stream; reads and writes are indices of lives in the ledger."""

    name: str
    phase: Phase
    module: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    signature: int
    updates_parameter: bool
    flops: int


_LIFT = torch.ops.aten.lift_fresh.default  # of torch.tensor(...), on the tensor that it has made


class Ledger(TorchDispatchMode):
    """A dispatch mode that records operators and storages; use inside ``with ledger:``.

    ``substitute`` is given every input tensor and may return another in its place (used to make foreign
    tensors fake), but for what ``torch.tensor(...)`` has just made; ``call`` runs an operator; ``on_operator`` is
    called after each recorded operator.
    """

    supports_higher_order_operators = True  # to say which it cannot record

    def __init__(
        self,
        *,
        substitute: Callable[[torch.Tensor], torch.Tensor] | None = None,
        call: Callable[[OpOverload, tuple[Any, ...], dict[str, Any]], Any] | None = None,
        on_operator: Callable[[RecordedOperator], None] | None = None,
    ) -> None:
        super().__init__()
        self.scopes = Scopes(self.label)
        self.operators: list[RecordedOperator] = []
        self.running = ""
        self.recording = True
        self._substitute = substitute
        self._call = call or calling.call
        self._on_operator = on_operator
        self._lives: list[_Life] = []
        self._live: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}
        self._now = 0
        self._writes_of: dict[OpOverload, _Signature] = {}

    @property
    def now(self) -> int:
        """The time: the number of operators recorded so far."""
        return self._now

    def label(self, tensor: torch.Tensor, kind: Kind, name: str) -> None:
        """Say what ``tensor``'s storage holds; the first label stays. An unknown one is there from now on."""
        index = self._index(tensor)
        if index is not None and self._lives[index].kind is None:
            self._lives[index].kind = kind
            self._lives[index].name = name

    def __torch_dispatch__(
        self,
        func: OpOverload | HigherOrderOperator,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            if not self.recording:
                return func(*args, **kwargs)
            raise PlanError(
                f"the step runs {func}, whose own functions a trace does not see: write the branch or loop in Python "
                "for it (hetero.manage measures such a step as it is)"
            )
        if not self.recording or func.namespace in NO_KERNEL or func._opname in _METADATA:
            return calling.call(func, args, kwargs)
        self.running = str(func)
        if self._substitute is not None and func is not _LIFT:
            args = tuple(self._replace(a) for a in args)
            kwargs = {key: self._replace(value) for key, value in kwargs.items()}
        if func.is_view:
            return self._run_view(func, args, kwargs)
        return self._run(func, args, kwargs)

    def cut(self, begin: int, end: int, *, source: str) -> StepTrace:
        """The operators ``[begin, end)`` as a step of their own, lives clipped to it.

        Its device is the accelerator that holds most bytes at its peak, else the CPU.
        """
        if end <= begin:
            raise PlanError("the step ran no operator that touches a tensor: nothing to trace")
        window = self.operators[begin:end]
        backward = next((begin + i for i, o in enumerate(window) if o.phase == "backward"), None)
        chosen = [i for i, life in enumerate(self._lives) if _intersects(life, begin, end)]
        first_touch: dict[int, int] = {}
        for i in (i for o in window for i in (*o.reads, *o.writes)):
            first_touch.setdefault(i, len(first_touch))
        chosen.sort(key=lambda i: (max(self._lives[i].begin, begin), first_touch.get(i, len(first_touch)), i))
        number = {old: new for new, old in enumerate(chosen)}
        storages = tuple(self._storage(number[i], self._lives[i], begin, end, backward) for i in chosen)
        operators = tuple(
            Operator(
                name=o.name,
                phase=o.phase,
                module=o.module,
                reads=tuple(number[i] for i in o.reads if i in number),
                writes=tuple(number[i] for i in o.writes if i in number),
                flops=o.flops,
            )
            for o in window
        )
        return StepTrace(
            operators=operators,
            storages=storages,
            span=end - begin,
            device=_main_device(storages),
            source=source,
        )

    def _run_view(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = self._call(func, args, kwargs)
        if self.scopes.phase(differentiable=_differentiable(args)) == "forward":
            self.scopes.module()  # a view has an autograd node too, whose backward is not a view
        if func is _LIFT:  # memory that no operator allocated
            for tensor in tensors_of(out):
                self._index(tensor)
        return out

    def _run(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        signature = self._signature(func)
        phase = self.scopes.phase(differentiable=_differentiable(args))
        module = self.scopes.module()
        reads, writes = self._touched(signature, args, kwargs)
        before = self._now
        self._now = before + 1
        try:
            out = self._call(func, args, kwargs)
        except BaseException:
            self._now = before
            raise
        if signature.mutates:
            writes = self._after_resize(signature, args, kwargs, writes)
        fresh = self._outputs(out, before)
        if not fresh and not writes and out is not None and _all_alias(out, reads, self._live):
            self._now = before  # it made views only, though its schema does not say so
            return out
        if fresh and not signature.allocates_only:
            writes = tuple(dict.fromkeys((*writes, *fresh)))
        self._append(signature.name, phase, module, reads, writes, _flops(func, args, kwargs, out))
        return out

    def _append(
        self,
        name: str,
        phase: Phase,
        module: str,
        reads: tuple[int, ...],
        writes: tuple[int, ...],
        flops: int,
    ) -> None:
        lives = self._lives
        sizes = (tuple(lives[i].nbytes for i in reads), tuple(lives[i].nbytes for i in writes))
        operator = RecordedOperator(
            name=name,
            phase=phase,
            module=module,
            reads=reads,
            writes=writes,
            signature=hash((name, phase, sizes)),
            updates_parameter=phase != "backward" and any(lives[i].kind == "parameter" for i in writes),
            flops=flops,
        )
        self.operators.append(operator)
        if self._on_operator is not None:
            self._on_operator(operator)

    def _touched(
        self, signature: "_Signature", args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        reads: dict[int, None] = {}
        writes: dict[int, None] = {}
        for position, value in (*enumerate(args), *kwargs.items()):
            written = position in signature.written
            for tensor in tensors_of(value):
                index = self._index(tensor)
                if index is None:
                    continue
                if written:
                    writes[index] = None
                if not written or not signature.overwrites:
                    reads[index] = None
        return tuple(reads), tuple(writes)

    def _after_resize(
        self, signature: "_Signature", args: tuple[Any, ...], kwargs: dict[str, Any], writes: tuple[int, ...]
    ) -> tuple[int, ...]:
        """Writes again, with the new lives of storages that the operator has resized or put in place."""
        now = dict.fromkeys(writes)
        for position, value in (*enumerate(args), *kwargs.items()):
            if position in signature.written:
                for tensor in tensors_of(value):
                    index = self._index(tensor, born=self._now - 1)
                    if index is not None:
                        now[index] = None
        return tuple(i for i in now if self._lives[i].end is None)

    def _outputs(self, out: Any, born: int) -> tuple[int, ...]:
        known = len(self._lives)
        indices = [self._index(tensor, born=born) for tensor in tensors_of(out)]
        return tuple(dict.fromkeys(i for i in indices if i is not None and i >= known))

    def _index(self, tensor: torch.Tensor, *, born: int | None = None) -> int | None:
        """The life of ``tensor``'s storage; None if that has no bytes. ``born``: allocated then, if new."""
        storage = storage_of(tensor)
        if storage is None:
            return None
        key = storage._cdata
        nbytes = storage.nbytes()
        known = self._live.get(key)
        if known is not None:
            if self._lives[known[0]].nbytes == nbytes:
                return known[0]
            self._close(key)  # resized: to the allocator, another block
        if not nbytes:
            return None
        index = len(self._lives)
        begin = self._now if born is None else born
        self._lives.append(_Life(int(nbytes), begin, None, None, "", _device_of(tensor), born is not None))
        self._live[key] = (index, weakref.ref(storage, partial(self._freed, key, index)))
        return index

    def _freed(self, key: int, index: int, reference: object) -> None:
        known = self._live.get(key)
        if known is not None and known[0] == index:  # otherwise the address is another storage's by now
            self._close(key)

    def _close(self, key: int) -> None:
        index, _ = self._live.pop(key)
        self._lives[index].end = self._now

    def _replace(self, value: Any) -> Any:
        assert self._substitute is not None
        if isinstance(value, torch.Tensor):
            return self._substitute(value)
        if isinstance(value, list | tuple) and any(isinstance(v, torch.Tensor) for v in value):
            return type(value)(self._replace(v) for v in value)
        return value

    def _signature(self, func: OpOverload) -> "_Signature":
        signature = self._writes_of.get(func)
        if signature is None:
            signature = self._writes_of[func] = _Signature.of(func)
        return signature

    def _storage(self, number: int, life: _Life, begin: int, end: int, backward: int | None) -> Storage:
        born = max(life.begin, begin)
        dies = end if life.end is None else min(life.end, end)
        kind, name = life.kind, life.name
        if kind is None:
            inside = life.allocated and life.begin >= begin
            across = backward is not None and born < backward < dies
            kind = ("activation" if across else "temporary") if inside else "input"
            maker = self.operators[life.begin] if inside else None
            name = f"{maker.module or maker.phase}: {maker.name}" if maker is not None else "input"
        return Storage(
            id=number,
            begin=born - begin,
            end=dies - begin,
            nbytes=life.nbytes,
            kind=kind,
            name=name,
            device=life.device,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Signature:
    """What an operator's schema says: which arguments it writes, by position and by name."""

    name: str
    written: frozenset[int | str]
    overwrites: bool
    allocates_only: bool

    @property
    def mutates(self) -> bool:
        return bool(self.written)

    @staticmethod
    def of(func: OpOverload) -> "_Signature":
        written: set[int | str] = set()
        only_out = True
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written |= {position, argument.name}
                only_out = only_out and argument.is_out
        bare = func._schema.name.split("::")[-1]
        return _Signature(
            name=f"{func.namespace}.{bare}",
            written=frozenset(written),
            overwrites=bool(written) and (only_out or bare in _OVERWRITES),
            allocates_only=bare.startswith(ALLOCATE_ONLY),
        )


def _flops(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """Torch's count of multiplications and additions; 0 for operators that it does not count."""
    count = flop_registry.get(func.overloadpacket)
    return 0 if count is None else int(count(*args, **kwargs, out_val=out))


def _device_of(tensor: torch.Tensor) -> str:
    return str(tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device)


def _differentiable(args: tuple[Any, ...]) -> bool:
    return any(tensor.requires_grad for value in args for tensor in tensors_of(value))


def _all_alias(
    out: Any, reads: tuple[int, ...], live: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]]
) -> bool:
    """Whether every tensor in ``out`` lies in a storage that was read (and there is at least one)."""
    seen = False
    for tensor in tensors_of(out):
        storage = storage_of(tensor)
        known = live.get(storage._cdata) if storage is not None else None
        if known is None or known[0] not in reads:
            return False
        seen = True
    return seen


def _intersects(life: _Life, begin: int, end: int) -> bool:
    return life.begin < end and (life.end is None or life.end > max(begin, life.begin))


def _main_device(storages: tuple[Storage, ...]) -> str:
    totals: dict[str, int] = {}
    for storage in storages:
        totals[storage.device] = totals.get(storage.device, 0) + storage.nbytes
    accelerators = {device: total for device, total in totals.items() if device != "cpu"}
    candidates = accelerators or totals
    return max(candidates, key=lambda device: candidates[device]) if candidates else "cpu"
