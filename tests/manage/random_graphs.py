"""Random networks, and random loops that train them: failures, evaluations and batch sizes included."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint
from twins import adamw, plain

WIDTH = 32


@dataclass(frozen=True)
class Node:
    kind: str
    weight: int  # which of the weights; the same number twice is a shared weight
    reach: int  # how far back a residual reaches


@dataclass(frozen=True)
class Graph:
    nodes: tuple[Node, ...]
    weights: int
    frozen: frozenset[int]


class Interrupted(Exception):
    pass


class RaiseInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        raise Interrupted


class Nested(nn.Module):
    """Weights one level down, as an attribute of a list of lists."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.norm = nn.LayerNorm(WIDTH)


class Net(nn.Module):
    """Interprets a `Graph`."""

    def __init__(self, graph: Graph):
        super().__init__()
        self.graph = graph
        self.groups = nn.ModuleList([nn.ModuleList([Nested()]) for _ in range(graph.weights)])
        for index in graph.frozen:
            self.groups[index].requires_grad_(False)
        self.tick = 0
        self.fail_at: tuple[str, int] | None = None

    def forward(self, x):
        history = [x]
        for index, node in enumerate(self.graph.nodes):
            if self.fail_at == ("forward", index):
                raise Interrupted
            x = self.run(node, x, history)
            if self.fail_at == ("backward", index):
                x = RaiseInBackward.apply(x)
            history.append(x)
        return x

    def run(self, node, x, history):
        unit = self.groups[node.weight][0]
        match node.kind:
            case "linear":
                return unit.linear(x)
            case "in place":
                return F.relu_(unit.linear(x).add_(0.1))
            case "views":
                halves = unit.linear.weight.t().chunk(2, dim=1)
                return torch.cat([x @ half for half in halves], dim=1)
            case "scale":
                return x * unit.scale + unit.linear.bias
            case "norm":
                return unit.norm(x)
            case "residual":
                return x + history[-1 - min(node.reach, len(history) - 1)]
            case "branch":
                return unit.linear(x) if (self.tick + node.reach) % 2 else torch.tanh(x)
            case "dropout":
                return F.dropout(unit.linear(x), 0.3, self.training)
            case "checkpoint":
                if not x.requires_grad:  # the reentrant kind needs an input with a gradient
                    return unit.norm(x)
                return checkpoint(
                    lambda y: unit.norm(torch.tanh(unit.linear(y))), x, use_reentrant=bool(node.reach % 2)
                )
            case "weight only":
                return x @ (unit.linear.weight / unit.linear.weight.norm())
        raise AssertionError(node.kind)


KINDS = (
    *("linear", "in place", "views", "scale", "norm", "residual", "branch", "dropout", "checkpoint"),
    "weight only",
)


@st.composite
def graphs(draw):
    weights = draw(st.integers(2, 5))
    count = draw(st.integers(2, 8))
    nodes = [
        Node(draw(st.sampled_from(KINDS)), draw(st.integers(0, weights - 1)), draw(st.integers(0, 3)))
        for _ in range(count)
    ]
    nodes[0] = Node("linear", nodes[0].weight, 0)
    frozen = draw(st.frozensets(st.integers(0, weights - 1), max_size=weights - 1))
    return Graph(tuple(nodes), weights, frozen)


@dataclass(frozen=True)
class Step:
    rows: int
    micro_batches: int
    evaluates: bool
    fails: tuple[str, int] | None


@st.composite
def loops(draw):
    return [
        Step(
            draw(st.sampled_from([4, 4, 4, 9])),
            draw(st.sampled_from([1, 1, 2])),
            draw(st.booleans()),
            draw(
                st.none() | st.none() | st.tuples(st.sampled_from(["forward", "backward"]), st.integers(0, 7))
            ),
        )
        for _ in range(draw(st.integers(2, 5)))
    ]


def run(model, optimizer, loop, target):
    seen = []
    for tick, step in enumerate(loop):
        model.tick = tick
        for _ in range(step.micro_batches):
            x = torch.randn(step.rows, WIDTH).to(target)
            model.fail_at = step.fails
            try:
                loss = model(x).square().mean()
                if loss.requires_grad:
                    loss.backward()
                seen.append(loss.item())
            except Interrupted:
                seen.append("interrupted")
                # How far a failed backward got is undefined: autograd accumulates on the host by another thread.
                model.zero_grad()
        model.fail_at = None
        seen.append([p.grad for p in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
        if step.evaluates:
            with torch.no_grad():
                seen.append(model.eval()(torch.ones(step.rows, WIDTH).to(target)).clone())
            model.train()
        seen = plain(seen)
    return seen


def twin(graph, target=None):
    torch.manual_seed(0)
    model = Net(graph) if target is None else Net(graph).to(target)
    trained = [p for p in model.parameters() if p.requires_grad]
    torch.manual_seed(1)
    return model, adamw(model) if trained else None
