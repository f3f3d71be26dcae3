"""Transformer-like traces for the eviction planner, and a table of how close each policy comes to the bounds.

python benchmarks/eviction_traces.py            # bytes / LP bound, predicted step / max(compute, transfer)
python benchmarks/eviction_traces.py --speed    # planning time at 100,000 accesses
"""

import argparse
import time
from dataclasses import dataclass

from hetero.eviction import Links, Moment, Trace, check, lower_bound, plan, simulate

__all__ = ["Shape", "trace_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A decoder with a tied embedding; bytes are bf16 device copies.

    ``training``: ``"full"`` (every weight is stepped at home and invalidated), ``"half"`` (the lower half of the
    layers is frozen), ``"lora"`` (base frozen, small adapters stepped), ``"device"`` (Adam runs on the device: states
    of six times the weight's bytes are managed too; weights and states are written there, nothing is invalidated).
    """

    layers: int = 32
    hidden: int = 4096
    feed_forward: int = 11008
    vocabulary: int = 32000
    tokens: int = 8192
    micro_batches: int = 1
    training: str = "full"
    fused: bool = False  # one moment per layer half instead of one per weight
    activation_swing: float = 0.3  # share of the capacity that activations take away at their peak
    flops: float = 300e12


_SMALL = ("norm1", "norm2", "adapter_in", "adapter_out")


def trace_of(shape: Shape, share: float) -> Trace:
    """A cyclic iteration in which model data may hold ``share`` of all managed bytes, less activations."""
    weights, layers = _weights(shape)
    sizes = [size for _, size in weights]
    embedding = 0
    forward: list[tuple[int, ...]] = [(embedding,)]
    for layer in layers:
        forward += [tuple(layer[:6]), tuple(layer[6:])] if shape.fused else [(x,) for x in layer]
    forward.append((embedding,))
    backward = forward[::-1]
    passes = [*((op, 2.0) for op in forward), *((op, 4.0) for op in backward)] * shape.micro_batches
    states = _states(shape, sizes)
    total = sum(sizes)
    per_pass = len(forward)
    moments = []
    for index, (operands, work) in enumerate(passes):
        at = index % (2 * per_pass)
        phase = (at if at < per_pass else 2 * per_pass - 1 - at) / max(per_pass - 1, 1)
        tokens = shape.tokens / shape.micro_batches
        moments.append(
            Moment(
                operands=operands,
                seconds=work * tokens * sum(sizes[x] / 2 for x in operands) / shape.flops + 5e-6,
                capacity=round(share * total * (1.0 - shape.activation_swing * phase)),
                invalidates=_stepped(shape, weights) if index == 0 else (),
            )
        )
    for weight, state in states.items():
        pair = (weight, state)
        moments.append(
            Moment(
                operands=pair, seconds=7 * sizes[weight] / 3e12, capacity=round(share * total), dirties=pair
            )
        )
    return Trace(sizes=tuple(sizes), moments=tuple(moments))


def _weights(shape: Shape) -> tuple[list[tuple[str, int]], list[list[int]]]:
    """(name, bytes) of each tensor, and the ids of each layer in forward order."""
    h, f = shape.hidden, shape.feed_forward
    parts = {"norm1": h, "q": h * h, "k": h * h // 4, "v": h * h // 4, "o": h * h}
    parts |= {"norm2": h, "gate": h * f, "up": h * f, "down": h * f}
    if shape.training == "lora":
        parts |= {"adapter_in": 16 * h, "adapter_out": 16 * h}
    weights = [("embedding", 2 * shape.vocabulary * h)]
    layers = []
    for index in range(shape.layers):
        layers.append(list(range(len(weights), len(weights) + len(parts))))
        weights += [(f"{index}.{part}", 2 * size) for part, size in parts.items()]
    return weights, layers


def _stepped(shape: Shape, weights: list[tuple[str, int]]) -> tuple[int, ...]:
    """Ids of the weights whose copies the step makes worthless."""
    if shape.training == "device":
        return ()
    if shape.training == "lora":
        return tuple(x for x, (name, _) in enumerate(weights) if "adapter" in name)
    frozen = shape.layers // 2 if shape.training == "half" else 0
    return tuple(
        x
        for x, (name, _) in enumerate(weights)
        if name == "embedding" and not frozen or name != "embedding" and int(name.split(".")[0]) >= frozen
    )


def _states(shape: Shape, sizes: list[int]) -> dict[int, int]:
    """Appends the optimizer states' sizes; weight id -> state id, in the order of the step."""
    if shape.training != "device":
        return {}
    first = len(sizes)
    sizes += [6 * size for size in sizes]
    return {weight: first + weight for weight in range(first)}
