"""Reordering FX graphs so that they need less memory at once, and a ``torch.compile`` backend that does.

Owns what an FX graph is as a `Dataflow`: its storages, who touches them, and which operators may not pass one
another. Invariant: every operator still gets the same values and random numbers, so results are the same
bits. The ordering rules are `hetero.pool.reorder`'s.

[Note: what may not move] A writer stays between the uses of the storages it writes. Operators that draw
random numbers keep their order. Whatever is not a plain operator (higher-order ones, assertions, untraced
functions) is passed by nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from operator import getitem
from typing import Any

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._ops import OpOverload

from hetero.devices.operators import tensors_of
from hetero.pool.dataflow import Dataflow
from hetero.pool.reorder import Reordering, reorder

__all__ = ["dataflow_of", "reorder_backend", "reorder_graph"]

# Update their running statistics (arguments 3 and 4), though their schemas do not say so.
_WRITE_STATISTICS = frozenset(
    {"aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm"}
)


def reorder_backend(module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """``torch.compile(model, backend=hetero.trace.reorder_backend)``: aot_eager in a better order.

    AOTAutograd's forward and backward graphs are each reordered. What the caller of the forward holds
    (parameters, inputs) counts as held throughout; the backward gives back what was saved for it as soon as
    it has been used.
    """
    compiled = aot_autograd(
        fw_compiler=_compiler(inputs_kept=True),
        bw_compiler=_compiler(inputs_kept=False),
        partition_fn=min_cut_rematerialization_partition,  # these two as aot_eager has them
        keep_inference_input_mutations=True,
    )
    run: Callable[..., Any] = compiled(module, example_inputs)
    return run


def reorder_graph(module: fx.GraphModule, *, inputs_kept: bool = True) -> Reordering:
    """Reorder ``module``'s graph in place and recompile it, if that lowers the peak; what was found.

    ``inputs_kept``: inputs stay alive throughout, as in a forward whose caller holds them. Otherwise they die
    with their last use; the order is then also no worse should they not. Nodes need ``meta["val"]``, as
    AOTAutograd's and `torch.export`'s have.
    """
    nodes = _operators(module.graph)
    flow = dataflow_of(module.graph, inputs_kept=inputs_kept)
    also = None if inputs_kept else dataflow_of(module.graph, inputs_kept=True)
    found = reorder(flow, also=also)
    if found.peak_nbytes < found.given_nbytes:
        end = next(node for node in module.graph.nodes if node.op == "output")
        for v in found.order:
            end.prepend(nodes[v])
        module.graph.lint()
        module.recompile()
    return found


def dataflow_of(graph: fx.Graph, *, inputs_kept: bool = True) -> Dataflow:
    """The operators of ``graph`` in their order, and the storages they touch.

    Views touch their base's storage and make none. Storages of results and constants are kept.
    """
    storages = _Storages()
    kept: set[int] = set()
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            touched = storages.of(node)
            kept |= set(touched) if inputs_kept or node.op == "get_attr" else set()
    touches: list[tuple[int, ...]] = []
    after: list[tuple[int, ...]] = []
    maker: dict[int, int] = {}
    limits = _Limits()
    operators = _operators(graph)
    for v, node in enumerate(operators):
        read = dict.fromkeys(b for source in node.all_input_nodes for b in storages.of(source))
        known = len(storages.nbytes)
        touched = tuple(dict.fromkeys((*read, *storages.of(node))))
        maker |= {b: v for b in touched if b >= known}
        touches.append(touched)
        after.append(limits.enter(v, node, touched, storages))
    for source in next(node for node in graph.nodes if node.op == "output").all_input_nodes:
        kept |= set(storages.of(source))
    return Dataflow(
        touches=tuple(touches),
        nbytes=tuple(storages.nbytes),
        maker=tuple(maker.get(b) for b in range(len(storages.nbytes))),
        kept=frozenset(kept),
        after=_with_data(after, operators),
    )


class _Storages:
    """Numbers storages as they turn up in nodes' fake values."""

    def __init__(self) -> None:
        self.nbytes: list[int] = []
        self._numbers: dict[int, int] = {}
        self._held: list[torch.UntypedStorage] = []  # so that no address is reused
        self._of: dict[fx.Node, tuple[int, ...]] = {}

    def of(self, node: fx.Node) -> tuple[int, ...]:
        known = self._of.get(node)
        if known is None:
            value = node.meta.get("val", node.meta.get("example_value"))
            strided = (t for t in tensors_of(value) if t.layout is torch.strided)
            known = self._of[node] = tuple(dict.fromkeys(self._number(t) for t in strided))
        return known

    def _number(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        number = self._numbers.get(storage._cdata)
        if number is None:
            number = self._numbers[storage._cdata] = len(self.nbytes)
            self._held.append(storage)
            self.nbytes.append(_hint(storage.nbytes()))
        return number


class _Limits:
    """Which earlier operators each one may not pass; see [Note: what may not move]."""

    def __init__(self) -> None:
        self._barrier: int | None = None
        self._since: list[int] = []
        self._random: int | None = None
        self._writer: dict[int, int] = {}
        self._users: dict[int, list[int]] = {}

    def enter(self, v: int, node: fx.Node, touched: tuple[int, ...], storages: _Storages) -> tuple[int, ...]:
        before: set[int] = set() if self._barrier is None else {self._barrier}
        written: set[int] = set()
        if node.target is getitem:
            pass
        elif not isinstance(node.target, OpOverload) or _has_other_effects(node):
            before |= set(self._since)
            self._barrier, self._since = v, []
        else:
            written = {b for source in _written(node) for b in storages.of(source)}
            if torch.Tag.nondeterministic_seeded in node.target.tags:
                before |= set() if self._random is None else {self._random}
                self._random = v
        before |= {self._writer[b] for b in touched if b in self._writer}
        for b in written:
            before |= set(self._users.get(b, ()))
            self._writer[b] = v
        for b in touched:
            self._users.setdefault(b, []).append(v)
        self._since.append(v)
        return tuple(sorted(before - {v}))


def _with_data(after: list[tuple[int, ...]], operators: list[fx.Node]) -> tuple[tuple[int, ...], ...]:
    """Dependencies of values that are no tensors, and of views on the operator that made them, added."""
    number = {node: v for v, node in enumerate(operators)}
    return tuple(
        tuple(sorted({*before, *(number[source] for source in node.all_input_nodes if source in number)}))
        for before, node in zip(after, operators, strict=True)
    )


def _operators(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op not in ("placeholder", "get_attr", "output")]


def _written(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes whose values ``node`` writes, by its operator's schema."""
    assert isinstance(node.target, OpOverload)
    for position, argument in enumerate(node.target._schema.arguments):
        silent = position in (3, 4) and node.target._schema.name in _WRITE_STATISTICS
        if silent or (argument.alias_info is not None and argument.alias_info.is_write):
            value = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
            for source in value if isinstance(value, list | tuple) else [value]:
                if isinstance(source, fx.Node):
                    yield source


def _has_other_effects(node: fx.Node) -> bool:
    """Whether it does something that neither its schema nor its tags say, as assertions do."""
    assert isinstance(node.target, OpOverload)
    said = node.target._schema.is_mutable or torch.Tag.nondeterministic_seeded in node.target.tags
    return not said and node.is_impure()


def _hint(nbytes: int | torch.SymInt) -> int:
    if isinstance(nbytes, torch.SymInt):
        hint = nbytes.node.hint
        return int(hint) if hint is not None else 0
    return int(nbytes)


def _compiler(*, inputs_kept: bool) -> Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]:
    def compiler(module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        reorder_graph(module, inputs_kept=inputs_kept)
        # Boxed: the inputs come as a list that the graph empties, so that their last use frees them.
        module.graph.set_codegen(fx.graph._BoxedCodeGen())
        module.recompile()

        def run(arguments: list[Any]) -> Any:
            return module.forward(arguments)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    return compiler
