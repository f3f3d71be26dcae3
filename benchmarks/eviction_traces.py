"""Transformer-like traces for the eviction planner, and a table of how close each policy comes to the bounds.

python benchmarks/eviction_traces.py            # bytes / LP bound, predicted step / lower bounds
python benchmarks/eviction_traces.py --speed    # processor time to plan 100,000 accesses
"""

import argparse
import time
from dataclasses import dataclass, replace

from hetero.eviction import Links, Moment, Trace, check, lower_bound, lower_bound_seconds, plan, simulate

__all__ = ["SHAPES", "SHARES", "Shape", "trace_of", "with_activations"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A decoder with a tied embedding; bytes are bf16 device copies.

    ``training``: ``"full"`` (every weight is stepped at home and invalidated), ``"half"`` (the embedding and
    the lower half of the layers are frozen), ``"lora"`` (base frozen, small adapters stepped), ``"device"``
    (Adam runs on the device: states of six times the weight's bytes are managed too; weights and states are
    written there, nothing is invalidated).
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


def with_activations(shape: Shape, share: float) -> Trace:
    """The same decoder with what a layer saves for backward: model data may hold ``share`` of all weights and saved
    tensors. Every saved tensor has a moment of its own when it is made and when it is needed, as in training."""
    weights, layers = _weights(shape)
    sizes = [size for _, size in weights]
    h, f, tokens = shape.hidden, shape.feed_forward, shape.tokens
    # Inputs of both norms, of the projections, q, k, v, attention's output, the gate's and the other branch's outputs
    # and their product.
    widths = (h, h, h, h // 4, h // 4, h, h, h, f, f, f)
    forward: list[tuple[tuple[int, ...], float, bool]] = [((0,), 0.0, False)]
    for layer in layers:
        for place, weight in enumerate(layer):
            forward.append(((weight,), 2.0 * tokens * sizes[weight] / 2 / shape.flops, False))
            for width in widths[place : place + 1] if place < len(layer) - 1 else widths[place:]:
                forward.append(((len(sizes),), 0.0, True))
                sizes.append(2 * tokens * width)
    head = 2.0 * tokens * sizes[0] / 2 / shape.flops
    forward.append(((0,), head, False))
    capacity = round(share * sum(sizes))
    steps = [*forward, *((operands, 2.0 * seconds, saved) for operands, seconds, saved in forward[::-1])]
    moments = []
    gone: tuple[int, ...] = ()
    for index, (operands, seconds, saved) in enumerate(steps):
        made = saved and index < len(forward)
        moments.append(
            Moment(
                operands=operands,
                seconds=seconds + 5e-6,
                capacity=capacity,
                produces=operands if made else (),
                dirties=operands if made else (),
                invalidates=gone if index else tuple(range(len(weights))),
            )
        )
        gone = operands if saved and not made else ()
    moments[0] = replace(moments[0], invalidates=(*moments[0].invalidates, *gone))
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
        if (not frozen if name == "embedding" else int(name.split(".")[0]) >= frozen)
    )


def _states(shape: Shape, sizes: list[int]) -> dict[int, int]:
    """Appends the optimizer states' sizes; weight id -> state id, in the order of the step."""
    if shape.training != "device":
        return {}
    first = len(sizes)
    sizes += [6 * size for size in sizes]
    return {weight: first + weight for weight in range(first)}


SHAPES = {
    "full": Shape(),
    "half frozen": Shape(training="half"),
    "lora": Shape(training="lora"),
    "lora, 4 micro-batches": Shape(training="lora", micro_batches=4),
    "optimizer on device": Shape(training="device"),
    "half frozen, fused": Shape(training="half", layers=16, fused=True),
}
SHARES = (0.8, 0.6, 0.4, 0.3, 0.2)
POLICIES = ("opt", "cost-opt", "lru", "fifo")


def print_distances(links: Links) -> None:
    """Per policy: bytes without prefetch / LP bound; with it bytes / LP bound, step / max, step / bound.

    max = max(compute, H2D, D2H) of the plan's own bytes; bound = `lower_bound_seconds`.
    """
    print(f"{'shape':22} {'share':>5} {'bound/max':>9}  " + "  ".join(f"{name:>29}" for name in POLICIES))
    for name, shape in SHAPES.items():
        for share in SHARES:
            trace = trace_of(shape, share)
            fewest, soonest = lower_bound(trace), lower_bound_seconds(trace, links)
            cells = []
            ratio = 0.0
            for policy in POLICIES:
                late = plan(trace, links=links, policy=policy, prefetch=False)
                schedule = plan(trace, links=links, policy=policy)
                check(trace, late)
                check(trace, schedule)
                most = simulate(trace, schedule, links).bound_seconds
                if policy == "opt":
                    ratio = soonest / most
                step = schedule.predicted_seconds
                cells.append(
                    f"{late.moved_bytes / fewest:8.4f} {schedule.moved_bytes / fewest:6.3f}"
                    f" {step / most:6.3f} {step / soonest:6.3f}"
                )
            print(f"{name:22} {share:5.0%} {ratio:9.3f}  " + "  ".join(cells), flush=True)


def print_speed(links: Links) -> None:
    """Processor seconds per plan (not wall time: the machine may be shared)."""
    for name, shape in {
        "lora, 140 micro-batches": Shape(training="lora", micro_batches=140),
        "device, 170 micro-batches": Shape(training="device", micro_batches=170),
    }.items():
        for share in (0.8, 0.4):
            trace = trace_of(shape, share)
            accesses = sum(len(moment.operands) for moment in trace.moments)
            for policy in POLICIES:
                began = time.process_time()
                schedule = plan(trace, links=links, policy=policy)
                seconds = time.process_time() - began
                fetches = sum(len(actions.fetch) for actions in schedule.actions)
                print(
                    f"{name:26} {share:.0%} {accesses} accesses {fetches} fetches {policy:9} {seconds:.2f} s"
                )
            began = time.process_time()
            lower_bound(trace)
            print(f"{name:26} {share:.0%} lower_bound {time.process_time() - began:.2f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--speed", action="store_true", help="time the planner instead")
    arguments = parser.parse_args()
    links = Links(h2d_bandwidth=25e9, d2h_bandwidth=25e9, latency=10e-6)
    if arguments.speed:
        print_speed(links)
    else:
        print_distances(links)


if __name__ == "__main__":
    main()
