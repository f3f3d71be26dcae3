"""A graph of operators and the buffers they touch: what an order of the operators costs in memory.

Owns `Dataflow` and the load of an order. Invariant: a `Dataflow` that exists is consistent (every buffer that
is not an input has one maker, whoever touches it comes after the maker), so orders need checking, graphs do
not. It looks for no order: `hetero.pool.reorder` does.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from hetero.errors import PlanError
from hetero.pool.problem import IntArray

__all__ = ["Dataflow", "order_load", "order_peak"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataflow:
    """``len(touches)`` operators, numbered in the given order, and ``len(nbytes)`` buffers.

    ``touches[v]``: buffers that operator ``v`` reads, writes or makes, once each. ``maker[b]``: the operator
    that makes buffer ``b``, or None for an input, which is there from the start. ``kept``: buffers that stay
    after their last use, as results and what the caller holds do. ``after[v]``: operators that must come
    before ``v`` for other reasons than that they make what it touches (effects on memory, random numbers).
    ``preds`` and ``succs`` are all dependencies, ``users`` the operators that touch each buffer.

    Raises `PlanError` for a graph whose given order is not possible, or an unknown number.
    """

    touches: tuple[tuple[int, ...], ...]
    nbytes: tuple[int, ...]
    maker: tuple[int | None, ...]
    kept: frozenset[int] = frozenset()
    after: tuple[tuple[int, ...], ...] = ()
    preds: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)
    succs: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)
    users: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        count = len(self.touches)
        if len(self.maker) != len(self.nbytes) or min(self.nbytes, default=0) < 0:
            raise PlanError(f"{len(self.nbytes)} sizes and {len(self.maker)} makers, or a negative size")
        if not all(0 <= b < len(self.nbytes) for b in (*self.kept, *(b for t in self.touches for b in t))):
            raise PlanError(f"a buffer is touched or kept that is not among the {len(self.nbytes)}")
        users: list[list[int]] = [[] for _ in self.nbytes]
        preds: list[set[int]] = [set(self.after[v]) if self.after else set() for v in range(count)]
        for v, touched in enumerate(self.touches):
            for b in touched:
                users[b].append(v)
                made_by = self.maker[b]
                if made_by is not None and made_by != v:
                    preds[v].add(made_by)
        succs: list[list[int]] = [[] for _ in range(count)]
        for v, before in enumerate(preds):
            if not all(0 <= u < v for u in before):
                raise PlanError(f"operator {v} needs {max(before)}, which does not come before it")
            for u in before:
                succs[u].append(v)
        for b, made_by in enumerate(self.maker):
            if made_by is not None and (not users[b] or users[b][0] != made_by):
                raise PlanError(f"buffer {b} is made by operator {made_by}, which does not touch it first")
        object.__setattr__(self, "preds", tuple(tuple(sorted(before)) for before in preds))
        object.__setattr__(self, "succs", tuple(tuple(later) for later in succs))
        object.__setattr__(self, "users", tuple(tuple(each) for each in users))

    def __len__(self) -> int:
        return len(self.touches)

    def made_nbytes(self, v: int) -> int:
        """Bytes that operator ``v`` allocates."""
        return sum(self.nbytes[b] for b in self.touches[v] if self.maker[b] == v)


def order_load(flow: Dataflow, order: Sequence[int]) -> IntArray:
    """Live bytes while each operator of ``order`` runs: what it makes is there, what it uses still is."""
    position = np.empty(len(flow), dtype=np.int64)
    position[list(order)] = np.arange(len(flow))
    change = np.zeros(len(flow) + 1, dtype=np.int64)
    for b, users in enumerate(flow.users):
        made_by = flow.maker[b]
        change[0 if made_by is None else position[made_by]] += flow.nbytes[b]
        if b not in flow.kept and users:
            change[max(position[u] for u in users) + 1] -= flow.nbytes[b]
    return np.cumsum(change[:-1])


def order_peak(flow: Dataflow, order: Sequence[int]) -> int:
    """The most bytes alive at once."""
    return int(order_load(flow, order).max(initial=0))
