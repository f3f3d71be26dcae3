"""By which paths autograd's graphs reach a parameter: through fetch nodes of ours, at home, by themselves, or by way of
an implementation that it had when they were made (`hetero.stm.settled.exchange`).

A gradient that comes by one path may be handed on as it is; what comes by several, autograd adds up first.
"""

import weakref
from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["GraphPaths", "marked"]


class GraphPaths:
    """Of one parameter."""

    __slots__ = ("_fetch_nodes", "_former_graphs", "_home_graphs", "_is_trained_at_home")

    def __init__(self) -> None:
        self._fetch_nodes: list[weakref.ref[torch.autograd.graph.Node]] = []
        self._home_graphs: list[weakref.ref[object]] = []
        self._former_graphs: list[weakref.ref[object]] = []
        self._is_trained_at_home = False

    def add_fetch_node(self, node: torch.autograd.graph.Node) -> None:
        """A graph now reaches the parameter through ``node``."""
        self._fetch_nodes = [ref for ref in self._fetch_nodes if ref() is not None]
        self._fetch_nodes.append(weakref.ref(node))

    @property
    def lead_home(self) -> bool:
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
            self._is_trained_at_home = self.lead_home
            self._home_graphs = []

    @property
    def lead_by_former(self) -> bool:
        """A graph is there that ends in an implementation which the parameter has no more."""
        if not self._former_graphs:
            return False
        self._former_graphs = [ref for ref in self._former_graphs if ref() is not None]
        return bool(self._former_graphs)

    def note_former_graph(self, end: torch.autograd.graph.Node) -> None:
        """There is one, with that ``end``, and is gone when it is."""
        self._former_graphs.append(weakref.ref(_mark([end])))

    def is_single(self) -> bool:
        """The backward that runs reaches the parameter through one fetch node only, so nothing is added to what that
        hands over. Others that are alive belong to graphs that somebody keeps (a loss that is summed up)."""
        if self.lead_home:
            return False
        alive = [node for ref in self._fetch_nodes if (node := ref()) is not None]
        return len(alive) <= 1 or sum(map(torch._C._will_engine_execute_node, alive)) <= 1


class _Mark:
    """Lives as long as the nodes of a graph whose metadata hold it."""

    __slots__ = ("__weakref__",)


def marked(results: Sequence[torch.Tensor]) -> object | None:
    """Held by the nodes that made ``results``. None unless they are numbers, such as norms: views lead to a parameter's
    accumulator, for hooks; and behind a view that was written to, it is its base that keeps the graph."""
    nodes = []
    for value in results:
        node = value.grad_fn
        if node is None or value.dim() or value._is_view():
            return None
        nodes.append(node)
    return _mark(nodes)


def _mark(nodes: Sequence[torch.autograd.graph.Node]) -> object:
    mark = _Mark()
    for node in nodes:
        metadata: dict[Any, Any] = node.metadata  # type: ignore[assignment]
        metadata[_Mark] = mark
    return mark
